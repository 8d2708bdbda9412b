import json

import pytest
from step_builder import StepBuilder, training_step

from det_callbacks.compare.step import compare_steps
from det_callbacks.runs.program import TensorLayout, plain_value


def compare(reference, current, **options):
    return compare_steps(reference.view(step=7), current.view(step=7), **options)


def origins(difference):
    return [(item.phase, item.module, item.op, item.output, item.kind) for item in difference.origins]


def test_equal_steps_have_no_difference_whatever_their_source_lines():
    for shift in (0, 3):
        difference = compare(training_step(), training_step(shift_source=shift))
        assert (difference.num_differing, difference.divergences) == (0, ())
        assert difference.num_compared == len(training_step().sites)


def test_inserted_op_is_the_origin_and_nothing_cascades():
    difference = compare(training_step(), training_step(insert_at=10, factor=3.0))
    assert origins(difference) == [("forward", "net.chain", "aten.mul.Tensor", 0, "extra")]
    assert [item.kind for item in difference.divergences].count("extra") == 1
    assert {item.kind for item in difference.divergences[1:]} == {"content"}
    assert difference.divergences[0].current_digest is not None
    assert difference.divergences[0].reference_digest is None


def test_inserted_op_brings_its_own_input_rows():
    reference, current = StepBuilder(), StepBuilder()
    for step in (reference, current):
        value = step.named("batch[0]", 5, phase="data")
        if step is current:
            value = step.op("aten.native_dropout.default", value, "?constant", generator=4, outputs=2)
        step.op("aten.relu.default", value)
    difference = compare(reference, current)
    assert [(item.op, item.output, item.kind, item.is_origin) for item in difference.divergences] == [
        ("aten.native_dropout.default", 0, "extra", True),
        ("aten.native_dropout.default", 1, "extra", True),
        ("aten.relu.default", 0, "content", False),
    ]


@pytest.mark.parametrize(("was_varying", "is_varying"), [(False, False), (True, True), (False, True), (True, False)])
def test_other_argument_is_named_with_both_values(was_varying, is_varying):
    difference = compare(training_step(lr=0.1, lr_varies=was_varying), training_step(lr=0.2, lr_varies=is_varying))
    assert origins(difference) == [("optimizer", "net", "aten.addcdiv_.default", 0, "argument")]
    assert difference.num_differing == 2  # the update, and the weight after it
    assert difference.findings[0].arguments.values == {"value": ("-0.1", "-0.2")}


@pytest.mark.parametrize(("was_varying", "is_varying"), [(False, True), (True, False), (True, True)])
def test_equal_arguments_agree_however_they_are_kept(was_varying, is_varying):
    assert compare(training_step(lr_varies=was_varying), training_step(lr_varies=is_varying)).num_differing == 0


@pytest.mark.parametrize("kind", ["varying", "arguments"])
@pytest.mark.parametrize(("ours", "theirs"), [(1, 1.0), (True, 1), (0.0, -0.0), (float("inf"), 1e308), (-3, 3)])
def test_argument_of_another_type_or_sign_is_seen(kind, ours, theirs):
    reference, current = StepBuilder(), StepBuilder()
    for step, value in ((reference, ours), (current, theirs)):
        step.op("aten.add.Tensor", **{kind: {"alpha": value}})
    difference = compare(reference, current)
    assert [item.kind for item in difference.divergences] == ["argument"]
    shown = difference.findings[0].arguments.values["alpha"]
    assert shown == tuple(json.dumps(plain_value(value)) for value in (ours, theirs))


def test_other_argument_is_reported_at_the_first_output_and_at_those_that_differ():
    reference, current = StepBuilder(), StepBuilder()
    for step, eps in ((reference, 1e-5), (current, 1e-6)):
        value = step.op("aten.native_layer_norm.default", "?x", arguments={"eps": eps}, outputs=3)
        step.digests[value + 1] = 5
    difference = compare(reference, current)
    assert [(item.output, item.kind, item.is_origin) for item in difference.divergences] == [
        (0, "argument", True),
        (2, "argument", True),
    ]


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
    reference, current = StepBuilder(), StepBuilder()
    for step, beta in ((reference, 0.99), (current, 0.999)):
        step.digests[step.op("aten.lerp.Scalar", varying={"beta1": 0.9, "beta2": beta}, keeps_text=False)] = 5
    assert [item.kind for item in compare(reference, current).divergences] == ["argument"]


def test_arguments_that_cannot_be_compared_prove_no_origin():
    reference, current = StepBuilder(), StepBuilder()
    reference.op("aten.f.default", varying={"a": 1, "b": 2}, arguments={"c": 3}, keeps_text=False)
    current.op("aten.f.default", varying={"b": 2, "c": 3}, arguments={"a": 1}, noise="other bits", keeps_text=False)
    (divergence,) = compare(reference, current).divergences
    assert (divergence.kind, divergence.is_origin) == ("content", None)


def test_other_argument_with_the_same_bits_is_reported_and_blames_no_reader():
    reference, current = StepBuilder(), StepBuilder()
    for step, p in ((reference, 0.1), (current, 0.2)):
        value = step.op("aten.dropout.default", arguments={"p": p})
        step.digests[value] = 99
        step.op("aten.relu.default", value, noise=p)
    difference = compare(reference, current)
    assert [(item.op, item.kind, item.is_origin) for item in difference.divergences] == [
        ("aten.dropout.default", "argument", True),
        ("aten.relu.default", "content", True),
    ]


def test_call_without_outputs_shows_its_other_argument():
    reference, current = StepBuilder(), StepBuilder()
    for step, value in ((reference, 1), (current, 2)):
        step.op("lib.log.default", varying={"level": value}, outputs=0)
        step.op("aten.relu.default")
    (divergence,) = compare(reference, current).divergences
    assert (divergence.op, divergence.kind) == ("lib.log.default", "argument")


def test_other_dtype_is_a_structure():
    difference = compare(training_step(), training_step(dtype="float64"))
    first = difference.divergences[0]
    assert (first.op, first.kind, first.is_origin, first.dtype) == ("aten.mm.default", "structure", True, "float64")
    assert origins(difference) == [("forward", "net.linear", "aten.mm.default", 0, "structure")]


def test_other_strides_with_the_same_bits_are_a_structure():
    reference, current = StepBuilder(), StepBuilder()
    for step, stride in ((reference, (4, 1)), (current, (1, 8))):
        value = step.op("aten.clone.default", layout=TensorLayout(dtype="float32", shape=(8, 4), stride=stride))
        step.op("aten.relu.default", value)
    (divergence,) = compare(reference, current).divergences
    assert (divergence.kind, divergence.is_origin) == ("structure", True)


@pytest.mark.parametrize(
    ("change", "phase"),
    [({"rows": (2, 1, 3, 4)}, "data"), ({"seed": 1}, "rng"), ({"weight": 10}, "state")],
)
def test_sources_are_no_origins_and_neither_is_what_reads_them(change, phase):
    difference = compare(training_step(), training_step(**change))
    assert difference.divergences[0].phase == phase
    assert difference.divergences[0].is_origin is False
    assert difference.origins == ()


def test_parameter_changed_outside_the_trace_is_a_source():
    reference, current = training_step(is_first=False), training_step(is_first=False)
    place = next(index for index, site in enumerate(current.sites) if site.name == "net.weight")
    assert current.sites[place].role == "input"
    current.digests[place] ^= 1
    (divergence,) = compare(reference, current).divergences
    assert (divergence.phase, divergence.name, divergence.is_origin) == ("input", "net.weight", False)


def test_reader_of_two_writers_passes_on_what_either_wrote():
    """Partial writes: ``buf[0].copy_(a); buf[1].copy_(b); buf.sum()``."""
    for place, expected in ((0, [True, False]), (1, [True, False]), (None, [True])):
        reference, current = StepBuilder(), StepBuilder()
        for step in (reference, current):
            noise = ["other" if step is current and index == place else None for index in range(2)]
            parts = [step.op("aten.copy_.default", f"?{index}", noise=noise[index]) for index in range(2)]
            step.op("aten.sum.default", *parts, noise="sum" if step is current and place is None else None)
        assert [item.is_origin for item in compare(reference, current).divergences] == expected


def test_unseen_write_is_not_proven():
    reference, current = training_step(), training_step(noise_at=5, unseen_at=5)
    difference = compare(reference, current)
    assert difference.divergences[0].op == "aten.mul.Tensor"
    assert difference.divergences[0].is_origin is None
    assert difference.origins == ()


def test_named_tensor_without_recorded_writers_is_not_proven():
    reference, current = StepBuilder(), StepBuilder()
    for step, bits in ((reference, 1), (current, 2)):
        step.named("net.weight", 5)
        step.named("loss", bits, phase="forward")
        step.named("grad of net.weight", bits, phase="gradient")
        step.named("net.weight", bits)
    assert [item.is_origin for item in compare(reference, current).divergences] == [None, None, None]


def test_unselected_op_in_between_makes_no_false_origin():
    reference, current = StepBuilder(), StepBuilder()
    for step in (reference, current):
        noise = "ulp" if step is current else None
        value = step.op("aten.mm.default", "?x", noise=noise)
        # what an unselected module made of it is unknown: it enters again as an input
        step.op("aten.relu.default", f"?unselected{step.digests[value]}")
    difference = compare(reference, current)
    assert [(item.op, item.phase, item.is_origin) for item in difference.divergences] == [
        ("aten.mm.default", "forward", True),
        ("", "input", False),
        ("aten.relu.default", "forward", False),
    ]


def test_each_output_of_an_op_is_judged_by_its_inputs():
    reference, current = StepBuilder(), StepBuilder()
    for step in (reference, current):
        value = step.op("aten.native_layer_norm.default", "?x", outputs=3)
        if step is current:
            step.digests[value + 1] ^= 1
            step.digests[value + 2] ^= 1
    assert [(item.output, item.is_origin) for item in compare(reference, current).divergences] == [(1, True), (2, True)]


def test_two_independent_origins_are_both_found():
    difference = compare(training_step(), training_step(noise_at=3, lr=0.5))
    assert len(difference.origins) == 1  # the update reads a gradient that differs already
    reference, current = StepBuilder(), StepBuilder()
    for step in (reference, current):
        for index in range(3):
            step.op("aten.relu.default", f"?{index}", noise=step is current and index != 1)
    assert len(compare(reference, current).origins) == 2


def test_limit_bounds_what_is_described_and_not_what_is_counted():
    whole, few, none = (compare(training_step(), training_step(noise_at=0), limit=limit) for limit in (100, 3, 0))
    assert whole.num_differing == few.num_differing == none.num_differing
    assert few.divergences == whole.divergences[:3]
    assert none.divergences == none.origins == ()


def test_origin_beyond_the_limit_is_found():
    reference, current = StepBuilder(), StepBuilder()
    for step in (reference, current):
        for index in range(10):
            step.named(f"net.{index}", index + 100 * (step is current))
        step.op("aten.relu.default", "?x", noise=step is current)
    difference = compare(reference, current, limit=1)
    assert ([item.op for item in difference.origins], len(difference.divergences)) == (["aten.relu.default"], 1)


def test_step_whose_digests_do_not_fit_its_program_is_refused():
    good, bad = training_step().view(), training_step()
    bad.digests.append(1)
    with pytest.raises(ValueError, match="digests"):
        compare_steps(good, bad.view())


@pytest.mark.parametrize("num_sites", [4_000, pytest.param(60_000, marks=pytest.mark.slow)])
def test_many_sites_are_aligned(num_sites):
    reference, current = StepBuilder(), StepBuilder()
    for step in (reference, current):
        value = step.named("batch[0]", 5, phase="data")
        for index in range(num_sites):
            if step is current and index % 2_000 == 5:
                value = step.op("aten.sin.default", value)
            value = step.op("aten.mul.Tensor", value, module=f"net.{index % 50}", arguments={"other": 2.0})
    difference = compare(reference, current)
    assert [item.kind for item in difference.divergences].count("extra") == 1
    assert difference.num_differing == num_sites - 5 + num_sites // 2_000
    assert [item.op for item in difference.origins] == ["aten.sin.default"]


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
    assert difference.findings[0].is_written_unseen


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
