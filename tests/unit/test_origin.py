"""Where the differences of one step start, in steps that are made by hand."""

import json
from functools import partial

import pytest
import torch
from step_builder import FLOAT, StepBuilder, both, training_step
from tracing import traced

from det_callbacks.compare.differences import MAX_DESCRIBED, StepDifference
from det_callbacks.compare.ranks import compare_steps
from det_callbacks.runs.program import TensorLayout, plain_value

RELU, LAYOUTS = (
    "aten.relu.default",
    (FLOAT, TensorLayout(dtype="float32", shape=(8, 5), stride=(5, 1))),
)
CASES = []


def compare(reference, current) -> StepDifference:
    return compare_steps(reference.view(step=7), current.view(step=7))


def case(*expected):
    """Add a function that fills both steps, with each divergence: kind, op, output,
    whether it is an origin.
    """
    return lambda fill: CASES.append((fill, [*expected])) or fill


@case()
def other_source_lines(step, now):
    step.op(RELU, source=(f"train.py:{40 + now} in forward",))


@case("extra native_dropout 0 True", "extra native_dropout 1 True", "content relu 0 False")
def an_inserted_op_with_input_rows(step, now):
    value = step.named("batch[0]", 5, phase="data")
    step.generators(0)
    if now:
        value = step.op("aten.native_dropout.default", value, "?constant", generator=4, outputs=2)
    step.op(RELU, value)


@case("argument layer_norm 0 True", "argument layer_norm 2 True")
def an_argument_at_the_first_output_and_those_that_differ(step, now):
    value = step.op(
        "aten.layer_norm.default", "?x", arguments={"eps": 1e-6 if now else 1e-5}, outputs=3
    )
    step.digests[value + 1] = 5


@case("argument lerp 0 True")
def one_of_several_changing_arguments(step, now):
    varying = {"beta1": 0.9, "beta2": 0.999 if now else 0.99}
    step.digests[step.op("aten.lerp.Scalar", varying=varying, keeps_text=False)] = 5


@case("argument dropout 0 True", "content relu 0 True")
def an_argument_with_the_same_bits_blames_no_reader(step, now):
    value = step.op("aten.dropout.default", arguments={"p": 0.2 if now else 0.1})
    step.digests[value] = 99
    step.op(RELU, value, noise=now)


@case("argument log 0 True")
def an_argument_of_a_call_without_outputs(step, now):
    step.op("lib.log.default", varying={"level": 1 + now}, outputs=0)
    step.op(RELU)


@case("structure clone 0 True")
def other_strides_with_the_same_bits(step, now):
    layout = TensorLayout(dtype="float32", shape=(8, 4), stride=(1, 8) if now else (4, 1))
    step.op(RELU, step.op("aten.clone.default", layout=layout))


def a_reader_of_two_writers(noisy):
    """Partial writes: ``buf[0].copy_(a); buf[1].copy_(b); buf.sum()``."""

    def fill(step, now):
        parts = [
            step.op("aten.copy_.default", f"?{index}", noise=now and index == noisy)
            for index in range(2)
        ]
        step.op("aten.sum.default", *parts, noise=now and noisy is None)

    return fill


for writer in (0, 1):
    case("content copy_ 0 True", "content sum 0 False")(a_reader_of_two_writers(writer))
case("content sum 0 True")(a_reader_of_two_writers(None))


@case("content mm 0 True", "content input 0 False", "content relu 0 False")
def an_unselected_op_in_between(step, now):
    value = step.op("aten.mm.default", "?x", noise=now)
    # what an unselected module made of it is unknown: it enters again as an input
    step.op(RELU, f"?unselected{step.digests[value]}")


@case("content layer_norm 1 True", "content layer_norm 2 True")
def outputs_that_differ_each_for_itself(step, now):
    value = step.op("aten.layer_norm.default", "?x", outputs=3)
    step.digests[value + 1] ^= now
    step.digests[value + 2] ^= now


@case("structure layer_norm 0 True", "structure layer_norm 1 True", "structure layer_norm 2 True")
def outputs_of_the_first_call_of_another_structure(step, now):
    step.op("aten.layer_norm.default", "?x", outputs=3, layout=LAYOUTS[now])


@case("content relu 0 True", "content relu 0 False", "content relu 0 True")
def an_origin_after_a_receiver_of_another(step, now):
    step.op(RELU, step.op(RELU, "?x", noise=now))
    step.op(RELU, "?y", noise=now)


@pytest.mark.parametrize(("fill", "expected"), CASES)
def test_what_differs_and_who_starts_it(fill, expected):
    found = compare(*both(fill)).divergences
    ops = [item.op.split(".")[1] if item.op else item.phase for item in found]
    shown = [
        f"{item.kind} {op} {item.output} {item.is_origin}"
        for item, op in zip(found, ops, strict=True)
    ]
    assert shown == expected


@pytest.mark.parametrize("was_varying", [False, True])
@pytest.mark.parametrize("is_varying", [False, True])
def test_other_argument_is_named_with_both_values(was_varying, is_varying):
    reference = training_step(lr=0.1, lr_varies=was_varying)
    assert compare(reference, training_step(lr=0.1, lr_varies=is_varying)).num_differing == 0
    difference = compare(reference, training_step(lr=0.2, lr_varies=is_varying))
    (origin,) = difference.origins
    assert (origin.phase, origin.op, origin.kind) == (
        "optimizer",
        "aten.addcdiv_.default",
        "argument",
    )
    assert difference.num_differing == 2  # the update, and the weight after it
    assert [*difference.arguments.values()] == [{"value": ("-0.1", "-0.2")}]


@pytest.mark.parametrize("kind", ["varying", "arguments"])
@pytest.mark.parametrize(
    ("ours", "theirs"), [(1, 1.0), (True, 1), (0.0, -0.0), (float("inf"), 1e308), (-3, 3)]
)
def test_argument_of_another_type_or_sign_is_seen(kind, ours, theirs):
    pair = both(
        lambda step, now: step.op("aten.add.Tensor", **{kind: {"alpha": theirs if now else ours}})
    )
    difference = compare(*pair)
    assert [item.kind for item in difference.divergences] == ["argument"]
    (shown,) = difference.arguments.values()
    assert shown["alpha"] == tuple(json.dumps(plain_value(value)) for value in (ours, theirs))


@pytest.mark.parametrize(("other", "num_differing"), [(0.99, 0), (0.999, 1)])
def test_digest_of_several_arguments_is_compared_with_constants(other, num_differing):
    values = {"beta1": 0.9, "beta2": 0.99}
    reference, current = StepBuilder(), StepBuilder()
    reference.op("aten.lerp.Scalar", varying=values, arguments={"eps": 1.0})
    current.op("aten.lerp.Scalar", arguments={**values, "beta2": other, "eps": 1.0})
    for one, two in ((reference, current), (current, reference)):
        assert [item.kind for item in compare(one, two).divergences] == ["argument"] * num_differing


def test_an_unseen_write_is_not_proven_and_passes_on_what_it_starts():
    difference = compare(training_step(), training_step(noise_at=5, unseen_at=5))
    assert (difference.divergences[0].op, difference.divergences[0].is_origin) == (
        "aten.mul.Tensor",
        None,
    )
    assert difference.origins == ()
    difference = compare(training_step(), training_step(noise_at=3, lr=0.5))
    assert len(difference.origins) == 1  # the update reads a gradient that differs already


def test_what_is_described_is_bounded_and_not_what_is_counted():
    def fill(step: StepBuilder, now: bool) -> None:
        for index in range(2 * MAX_DESCRIBED):
            step.named(f"net.{index}", 2 * index + now)
        step.op(RELU, "?x", noise=now)

    difference = compare(*both(fill))
    assert (difference.num_differing, len(difference.divergences)) == (
        2 * MAX_DESCRIBED + 1,
        MAX_DESCRIBED,
    )
    assert [item.op for item in difference.origins] == [RELU]  # beyond them


# memory that a named tensor shows to be changed


def named_after(*, unseen: bool, is_shown: bool = True, in_place: bool = False) -> StepBuilder:
    """A gradient, what it is named as later, and an op of the optimizer that reads it."""
    step = StepBuilder()
    written = step.op("aten.mm.default", "?x", phase="backward")
    if in_place:
        step.op("aten.add_.Tensor", written, phase="optimizer", noise=unseen)
    bits = step.digests[written] ^ (unseen and is_shown)
    step.named("grad of net.weight", bits, phase="gradient", inputs=(written,))
    step.op("aten.mul_.Tensor", written, phase="optimizer", noise=unseen)
    return step


def test_who_reads_memory_that_a_named_tensor_shows_to_be_changed_is_a_receiver():
    difference = compare(named_after(unseen=False), named_after(unseen=True))
    assert [(item.op, item.is_origin) for item in difference.divergences] == [
        ("", None),
        ("aten.mul_.Tensor", False),
    ]
    assert difference.starting("written since")
    below_op = [StepBuilder(), StepBuilder()]  # where no op is recorded, what wrote it is not
    for bits, step in enumerate(below_op):
        before = step.named("net.weight", 3)
        step.batch("batch[0]", [1])
        step.named("net.weight", bits, inputs=(before,))
    assert compare(*below_op).starting("not recorded")
    for options in ({"is_shown": False}, {"in_place": True}):  # not shown yet
        first = compare(
            *(named_after(unseen=unseen, **options) for unseen in (False, True))
        ).divergences[0]
        assert (first.op != "", first.is_origin) == (True, True)
    current = StepBuilder()  # without the named tensor, nothing is shown
    written = current.op("aten.mm.default", "?x", phase="backward")
    current.op("aten.mul_.Tensor", written, phase="optimizer", noise=True)
    assert [item.is_origin for item in compare(named_after(unseen=False), current).divergences] == [
        None,
        True,
    ]


# numbers and shapes that go from a tensor through Python into the arguments of later ops

LENGTHS = TensorLayout(dtype="int64", shape=(3,), stride=(1,))
NUMBER = TensorLayout(dtype="float", shape=())


def noisy(name, read, **fields):
    return lambda step, now: step.op(name, read, noise=now, **fields)


# what Python may read, and so pass on
LATER = {
    "an op with another structure": lambda step, now: step.op(
        "aten.gather.default", "?x", layout=LAYOUTS[now]
    ),
    "a number read back": noisy("aten._local_scalar_dense.default", "?x", role="value"),
    "indices that an op computed": noisy("aten.topk.default", "?x", layout=LENGTHS),
}
READABLE = {
    "other content": lambda step, now: step.named("batch[0]", 5 + now, phase="data"),
    "a batch of another shape": lambda step, now: step.named(
        "batch[0]", 5, phase="data", entry=LAYOUTS[now]
    ),
    "other lengths": lambda step, now: step.named(
        "batch.batch_sizes", 5 + now, phase="data", entry=LENGTHS
    ),
    "another number": lambda step, now: step.named(
        "batch['scale']", 5 + now, phase="data", entry=NUMBER
    ),
    "one more entry": lambda step, now: now and step.named("batch[7]", 5, phase="data"),
    "NumPy's generator": lambda step, now: step.row(
        5 + now, None, phase="rng", name="numpy", role="generator"
    ),
    **LATER,
}


def another_argument(step, now, **place):
    step.op("aten.mul.Scalar", "?y", **{"module": "last", **place}, arguments={"other": 2 + now})


def an_extra_op(step, now, **place):
    if now:
        step.op("aten.slice_backward.default", "?y", module="last", **place)


def another_tensor_that_is_read(step, now):
    places = [step.op("aten.relu.default", name, module="last") for name in ("?y", "?z")]
    step.op("aten.sin.default", places[now], module="last")


PASSED_ON = {
    "argument": another_argument,
    "structure": lambda step, now: step.op(
        "aten.addmm.default", "?y", module="last", layout=LAYOUTS[now]
    ),
    "missing": lambda step, now: an_extra_op(step, not now),
    "extra": an_extra_op,
    "another tensor": another_tensor_that_is_read,
}
OTHER_BITS = noisy("aten.exp.default", "?y", module="last")


def judged(*parts):
    pair = both(lambda step, now: [part(step, now) for part in parts])
    return [item.is_origin for item in compare(*pair).divergences if item.module == "last"]


@pytest.mark.parametrize("first", READABLE)
def test_what_python_may_have_passed_on_is_not_proven_unless_the_inputs_agree(first):
    for last in PASSED_ON.values():
        assert judged(READABLE[first], last) == [None]
    assert judged(READABLE[first], OTHER_BITS) == [True]


@pytest.mark.parametrize("last", PASSED_ON)
def test_floats_that_an_op_computed_and_what_comes_later_are_passed_on_by_nobody(last):
    assert judged(noisy("aten.exp.default", "?x"), PASSED_ON[last]) == [True]
    for later in LATER.values():
        assert judged(PASSED_ON[last], later) == [True]


@pytest.mark.parametrize(
    ("last", "is_origin"),
    [
        (partial(another_argument, phase="backward"), None),
        (partial(an_extra_op, phase="backward"), None),
        (partial(another_argument, phase="optimizer"), True),
        (noisy("aten.exp.default", "?y", module="last", phase="backward"), True),
    ],
)
def test_how_ops_of_a_backward_pass_are_called_may_follow_from_the_forward_pass(last, is_origin):
    assert judged(last) == [True]
    assert judged(partial(another_argument, module="first"), last) == [is_origin]
    assert judged(partial(another_argument, module="first", phase="optimizer"), last) == [True]


def test_a_number_read_back_outside_the_selected_modules_is_not_lost():
    trace = traced(lambda: torch.arange(3.0).sum().item(), modules=("nothing",))
    assert [site.op for site in trace.program.sites if site.op] == [
        "aten._local_scalar_dense.default"
    ]
