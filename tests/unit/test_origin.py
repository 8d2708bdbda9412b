import json

import pytest
from step_builder import StepBuilder, both, training_step

from det_callbacks.compare.step import compare_steps
from det_callbacks.runs.program import TensorLayout, plain_value


def compare(reference, current, **options):
    return compare_steps(reference.view(step=7), current.view(step=7), **options)


def flags(pair):
    """Return what differs between two steps, and whether it is an origin."""
    return [(item.op or item.phase, item.output, item.kind, item.is_origin) for item in compare(*pair).divergences]


def test_equal_steps_have_no_difference_whatever_their_source_lines():
    difference = compare(training_step(), training_step(shift_source=3))
    assert (difference.num_differing, difference.divergences) == (0, ())
    assert difference.num_compared == len(training_step().sites)


def test_inserted_op_brings_its_own_input_rows():
    def fill(step, is_current):
        value = step.named("batch[0]", 5, phase="data")
        step.generators(0)
        if is_current:
            value = step.op("aten.native_dropout.default", value, "?constant", generator=4, outputs=2)
        step.op("aten.relu.default", value)

    assert flags(both(fill)) == [
        ("aten.native_dropout.default", 0, "extra", True),
        ("aten.native_dropout.default", 1, "extra", True),
        ("aten.relu.default", 0, "content", False),
    ]


@pytest.mark.parametrize(("was_varying", "is_varying"), [(False, False), (True, True), (False, True), (True, False)])
def test_other_argument_is_named_with_both_values(was_varying, is_varying):
    reference = training_step(lr=0.1, lr_varies=was_varying)
    assert compare(reference, training_step(lr=0.1, lr_varies=is_varying)).num_differing == 0
    difference = compare(reference, training_step(lr=0.2, lr_varies=is_varying))
    (origin,) = difference.origins
    assert (origin.phase, origin.module, origin.op) == ("optimizer", "net", "aten.addcdiv_.default")
    assert (origin.output, origin.kind) == (0, "argument")
    assert difference.num_differing == 2  # the update, and the weight after it
    assert [one.values for one in difference.arguments.values()] == [{"value": ("-0.1", "-0.2")}]


@pytest.mark.parametrize("kind", ["varying", "arguments"])
@pytest.mark.parametrize(("ours", "theirs"), [(1, 1.0), (True, 1), (0.0, -0.0), (float("inf"), 1e308), (-3, 3)])
def test_argument_of_another_type_or_sign_is_seen(kind, ours, theirs):
    pair = both(lambda step, now: step.op("aten.add.Tensor", **{kind: {"alpha": theirs if now else ours}}))
    difference = compare(*pair)
    assert [item.kind for item in difference.divergences] == ["argument"]
    (shown,) = difference.arguments.values()
    assert shown.values["alpha"] == tuple(json.dumps(plain_value(value)) for value in (ours, theirs))


def test_other_argument_is_reported_at_the_first_output_and_at_those_that_differ():
    def fill(step, is_current):
        arguments = {"eps": 1e-6 if is_current else 1e-5}
        value = step.op("aten.native_layer_norm.default", "?x", arguments=arguments, outputs=3)
        step.digests[value + 1] = 5

    name = "aten.native_layer_norm.default"
    assert flags(both(fill)) == [(name, 0, "argument", True), (name, 2, "argument", True)]


def test_digest_of_several_arguments_is_compared_with_constants():
    values = {"beta1": 0.9, "beta2": 0.99}
    for other, expected in ((0.99, 0), (0.999, 1)):
        reference, current = StepBuilder(), StepBuilder()
        reference.op("aten.lerp.Scalar", varying=values, arguments={"eps": 1.0})
        current.op("aten.lerp.Scalar", arguments={**values, "beta2": other, "eps": 1.0})
        for one, two in ((reference, current), (current, reference)):
            difference = compare(one, two)
            assert difference.num_differing == expected
            assert [item.kind for item in difference.divergences] == ["argument"] * expected


def test_one_of_several_changing_arguments_is_seen():
    def fill(step, is_current):
        varying = {"beta1": 0.9, "beta2": 0.999 if is_current else 0.99}
        step.digests[step.op("aten.lerp.Scalar", varying=varying, keeps_text=False)] = 5

    assert flags(both(fill)) == [("aten.lerp.Scalar", 0, "argument", True)]


def test_other_argument_with_the_same_bits_is_reported_and_blames_no_reader():
    def fill(step, is_current):
        p = 0.2 if is_current else 0.1
        value = step.op("aten.dropout.default", arguments={"p": p})
        step.digests[value] = 99
        step.op("aten.relu.default", value, noise=p)

    assert flags(both(fill)) == [
        ("aten.dropout.default", 0, "argument", True),
        ("aten.relu.default", 0, "content", True),
    ]


def test_call_without_outputs_shows_its_other_argument():
    def fill(step, is_current):
        step.op("lib.log.default", varying={"level": 1 + is_current}, outputs=0)
        step.op("aten.relu.default")

    assert [row[::2] for row in flags(both(fill))] == [("lib.log.default", "argument")]


def test_other_strides_with_the_same_bits_are_a_structure():
    def fill(step, is_current):
        layout = TensorLayout(dtype="float32", shape=(8, 4), stride=(1, 8) if is_current else (4, 1))
        step.op("aten.relu.default", step.op("aten.clone.default", layout=layout))

    assert flags(both(fill)) == [("aten.clone.default", 0, "structure", True)]


@pytest.mark.parametrize(("place", "expected"), [(0, [True, False]), (1, [True, False]), (None, [True])])
def test_reader_of_two_writers_passes_on_what_either_wrote(place, expected):
    """Partial writes: ``buf[0].copy_(a); buf[1].copy_(b); buf.sum()``."""

    def fill(step, is_current):
        parts = [step.op("aten.copy_.default", f"?{index}", noise=is_current and index == place) for index in range(2)]
        step.op("aten.sum.default", *parts, noise=is_current and place is None)

    assert [row[-1] for row in flags(both(fill))] == expected


def test_unseen_write_is_not_proven():
    difference = compare(training_step(), training_step(noise_at=5, unseen_at=5))
    assert difference.divergences[0].op == "aten.mul.Tensor"
    assert difference.divergences[0].is_origin is None
    assert difference.origins == ()


def test_unselected_op_in_between_makes_no_false_origin():
    def fill(step, is_current):
        value = step.op("aten.mm.default", "?x", noise=is_current)
        # what an unselected module made of it is unknown: it enters again as an input
        step.op("aten.relu.default", f"?unselected{step.digests[value]}")

    assert flags(both(fill)) == [
        ("aten.mm.default", 0, "content", True),
        ("input", 0, "content", False),
        ("aten.relu.default", 0, "content", False),
    ]


def test_each_output_of_an_op_is_judged_by_its_inputs():
    def fill(step, is_current):
        value = step.op("aten.native_layer_norm.default", "?x", outputs=3)
        step.digests[value + 1] ^= is_current
        step.digests[value + 2] ^= is_current

    assert [row[1::2] for row in flags(both(fill))] == [(1, True), (2, True)]


def test_two_independent_origins_are_both_found():
    difference = compare(training_step(), training_step(noise_at=3, lr=0.5))
    assert len(difference.origins) == 1  # the update reads a gradient that differs already
    pair = both(lambda step, now: [step.op("aten.relu.default", f"?{at}", noise=now and at != 1) for at in range(3)])
    assert len(compare(*pair).origins) == 2


def test_limit_bounds_what_is_described_and_not_what_is_counted():
    whole, few, none = (compare(training_step(), training_step(noise_at=0), limit=limit) for limit in (100, 3, 0))
    assert whole.num_differing == few.num_differing == none.num_differing
    assert few.divergences == whole.divergences[:3]
    assert none.divergences == none.origins == ()


def test_origin_beyond_the_limit_is_found():
    def fill(step, is_current):
        for index in range(10):
            step.named(f"net.{index}", index + 100 * is_current)
        step.op("aten.relu.default", "?x", noise=is_current)

    difference = compare(*both(fill), limit=1)
    assert ([item.op for item in difference.origins], len(difference.divergences)) == (["aten.relu.default"], 1)


def test_step_whose_digests_do_not_fit_its_program_is_refused():
    good, bad = training_step().view(), training_step()
    bad.digests.append(1)
    with pytest.raises(ValueError, match="digests"):
        compare_steps(good, bad.view())


@pytest.mark.parametrize("num_sites", [4_000, pytest.param(60_000, marks=pytest.mark.slow)])
def test_many_sites_are_aligned(num_sites):
    def fill(step, is_current):
        value = step.named("batch[0]", 5, phase="data")
        for index in range(num_sites):
            if is_current and index % 2_000 == 5:
                value = step.op("aten.sin.default", value)
            value = step.op("aten.mul.Tensor", value, module=f"net.{index % 50}", arguments={"other": 2.0})

    difference = compare(*both(fill))
    assert [item.kind for item in difference.divergences].count("extra") == 1
    assert difference.num_differing == num_sites - 5 + num_sites // 2_000
    (origin,) = difference.origins
    assert (origin.op, origin.reference_digest, origin.current_digest is None) == ("aten.sin.default", None, False)


def named_after(*, written_unseen, named_differs=True, noise=None, in_place=False):
    """A gradient, what it is named as later, and an op of the optimizer that reads it."""
    step = StepBuilder()
    written = step.op("aten.mm.default", "?x", phase="backward")
    if in_place:
        step.op("aten.add_.Tensor", written, phase="optimizer", noise=written_unseen)
    bits = step.digests[written] ^ (written_unseen and named_differs)
    step.named("grad of net.weight", bits, phase="gradient", inputs=(written,))
    step.op("aten.mul_.Tensor", written, phase="optimizer", noise=written_unseen or noise)
    return step


def test_who_reads_memory_that_a_named_tensor_shows_to_be_changed_is_a_receiver():
    difference = compare(named_after(written_unseen=False), named_after(written_unseen=True))
    assert [(item.op, item.is_origin) for item in difference.divergences] == [("", None), ("aten.mul_.Tensor", False)]
    assert difference.starting("written since")


@pytest.mark.parametrize("options", [{"named_differs": False}, {"in_place": True}])
def test_who_reads_memory_that_is_not_shown_to_be_changed_yet_may_be_an_origin(options):
    reference, current = (named_after(written_unseen=changed, **options) for changed in (False, True))
    first = compare(reference, current).divergences[0]
    assert (first.op != "", first.is_origin) == (True, True)


def test_a_named_tensor_that_only_one_side_has_shows_nothing():
    reference, current = named_after(written_unseen=False), StepBuilder()
    written = current.op("aten.mm.default", "?x", phase="backward")
    current.op("aten.mul_.Tensor", written, phase="optimizer", noise=True)
    assert [item.is_origin for item in compare(reference, current).divergences] == [None, True]
