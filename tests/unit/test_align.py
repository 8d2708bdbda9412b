import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_builder import StepBuilder, training_step

from det_callbacks.compare.align import align, group


def one_sided(reference: StepBuilder, current: StepBuilder) -> tuple[list[int], list[int]]:
    """Return the positions that only the reference, and only the current step has."""
    alignment = align(reference.view(), current.view())
    missing = alignment.reference[alignment.current < 0]
    extra = alignment.current[alignment.reference < 0]
    return missing.tolist(), extra.tolist()


def test_unit_holds_the_rows_of_one_call():
    step = StepBuilder()
    step.named("net.weight", 1)
    step.generators(0)
    first = step.op("aten.native_dropout.default", 0, "?mask", generator=3, varying={"p": 0.5}, outputs=2)
    second = step.op("aten.native_dropout.default", first, outputs=2)
    units = group(step.view(), {})
    assert list(zip(units.leads, units.starts, units.stops, strict=True)) == [
        (0, 0, 1),
        (1, 1, 2),  # a generator at the top belongs to no op, though an op's input row follows it
        (2, 2, 3),
        (3, 5, first + 2),
        (second, second, second + 2),
    ]


def test_equal_programs_are_aligned_by_position():
    alignment = align(training_step().view(), training_step(noise_at=3).view())
    assert alignment.is_same_program
    assert np.array_equal(alignment.reference, alignment.current)


def test_one_inserted_among_twenty_is_the_inserted_one():
    for place in (0, 1, 10, 19):
        current = training_step(insert_at=place, factor=2.0)
        # With the same factor a shorter chain is the beginning of a longer one; here what it reads differs too.
        current_with_other = training_step(insert_at=place, factor=3.0)
        missing, extra = one_sided(training_step(), current_with_other)
        assert missing == []
        (position,) = extra
        site = current_with_other.sites[position]
        assert (site.op, site.module, site.arguments) == ("aten.mul.Tensor", "net.chain", '{"other":3.0}')
        missing, extra = one_sided(training_step(), current)
        assert (len(missing), len(extra)) == (0, 1)
        missing, extra = one_sided(current_with_other, training_step())
        assert (len(missing), len(extra)) == (1, 0)


def test_inserted_op_that_changes_all_later_bits_is_found_by_place_alone():
    reference, current = StepBuilder(), StepBuilder()
    for step, inserted in ((reference, None), (current, 10)):
        value = step.named("batch[0]", 5, phase="data")
        for index in range(20):
            if index == inserted:
                # the same op and arguments as its neighbours, but other bits
                value = step.op("aten.mul.Tensor", value, arguments={"other": 2.0}, noise="inserted")
            value = step.op("aten.mul.Tensor", value, arguments={"other": 2.0})
    assert one_sided(reference, current) == ([], [11])
    assert one_sided(current, reference) == ([11], [])


@pytest.mark.parametrize(("name", "other_bits"), [("net.weight", False), ("net.weight", True), ("?unnamed", False)])
def test_input_row_that_another_op_makes_now_stays_one_row(name, other_bits):
    reference, current = StepBuilder(), StepBuilder()
    for step in (reference, current):
        weights = {name: 7 + (other_bits and step is current)}
        value = step.named("batch[0]", 5, phase="data")
        if step is current:
            value = step.op("aten.mul.Tensor", value, name, module="net.extra", weights=weights)
        step.op("aten.mm.default", value, name, module="net.linear", weights=weights)
    missing, extra = one_sided(reference, current)
    assert missing == []
    assert [current.sites[position].op for position in extra] == ["aten.mul.Tensor"]
    missing, extra = one_sided(current, reference)
    assert extra == []
    assert [current.sites[position].op for position in missing] == ["aten.mul.Tensor"]


def test_rows_of_varying_arguments_are_no_insertions():
    assert one_sided(training_step(lr_varies=False), training_step(lr_varies=True)) == ([], [])
    assert one_sided(training_step(lr_varies=True), training_step(lr_varies=False)) == ([], [])


def test_op_with_more_outputs_keeps_those_it_had():
    reference, current = StepBuilder(), StepBuilder()
    reference.op("aten._foreach_add.List", outputs=2)
    current.op("aten._foreach_add.List", outputs=3)
    assert one_sided(reference, current) == ([], [2])
    assert one_sided(current, reference) == ([2], [])


def test_calls_with_shifted_arguments_stay_in_place():
    reference, current = StepBuilder(), StepBuilder()
    for step, first in ((reference, 1), (current, 2)):
        value = step.named("batch[0]", 5, phase="data")
        for other in range(first, first + 5):
            value = step.op("aten.add.Scalar", value, arguments={"other": other})
    assert one_sided(reference, current) == ([], [])


OPS = ("aten.mul.Tensor", "aten.add.Tensor", "aten.relu.default")


def chain_of(ops: list[tuple[int, int]], edits: dict[int, str]) -> tuple[StepBuilder, list[int]]:
    """Return a chain of ops in two modules, with ops left out or put in; the positions of those put in."""
    step = StepBuilder()
    value = step.named("batch[0]", 5, phase="data")
    inserted = []
    for index, (op, module) in enumerate(ops):
        edit = edits.get(index)
        if edit == "insert":
            value = step.op("aten.sin.default", value, module="new", arguments={"index": index})
            inserted.append(value)
        if edit != "remove":
            value = step.op(OPS[op], value, module=f"net.{module}", arguments={"index": index})
    return step, inserted


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=40),
    st.dictionaries(st.integers(0, 39), st.sampled_from(["insert", "remove"]), max_size=6),
)
@settings(max_examples=100, deadline=None)
def test_random_insertions_and_removals_are_found_exactly(ops, edits):
    reference, _ = chain_of(ops, {})
    current, inserted = chain_of(ops, edits)
    missing, extra = one_sided(reference, current)
    assert extra == inserted
    assert missing == [index + 1 for index, edit in sorted(edits.items()) if edit == "remove" and index < len(ops)]


@given(st.integers(0, 2**32), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_every_row_is_aligned_exactly_once(seed, num_edits):
    rng = random.Random(seed)
    ops = [(rng.randrange(3), rng.randrange(2)) for _ in range(30)]
    edits = {rng.randrange(30): rng.choice(["insert", "remove"]) for _ in range(num_edits)}
    reference, current = chain_of(ops, {})[0], chain_of(ops[::-1], edits)[0]
    alignment = align(reference.view(), current.view())
    assert sorted(alignment.reference[alignment.reference >= 0]) == list(range(len(reference.sites)))
    assert sorted(alignment.current[alignment.current >= 0]) == list(range(len(current.sites)))


def test_names_that_one_side_does_not_know_change_nothing():
    reference, current = StepBuilder(), StepBuilder()
    for step, name in ((reference, None), (current, "exp_avg of net.weight")):
        value = step.named("batch[0]", 5, phase="data")
        if step is current:
            step.op("aten.sin.default", value)
        value = step.op("aten.lerp_.Scalar", value, "?state", phase="optimizer", name=name)
        step.op("aten.sqrt.default", value, phase="optimizer")
    place = next(index for index, site in enumerate(current.sites) if site.role == "input")
    current.sites[place] = dataclasses.replace(current.sites[place], name="exp_avg of net.weight")
    assert one_sided(reference, current) == ([], [1])
    assert one_sided(current, reference) == ([1], [])
    for step in (reference, current):
        step.digests = [digest + (step is current) for digest in step.digests]
    assert one_sided(reference, current) == ([], [1])


def test_ops_on_other_names_are_not_paired():
    reference, current = StepBuilder(), StepBuilder()
    for step, names in ((reference, "abc"), (current, "bc")):
        for name in names:
            step.op("aten.mul_.Tensor", phase="optimizer", module="", name=name, noise=step is current)
    assert one_sided(reference, current) == ([0], [])


def test_unrelated_steps_of_one_module_are_aligned_within_bounds():
    """No unique key, no anchor, and more than is searched for common blocks."""
    rng = random.Random(0)
    steps = []
    for _ in range(2):
        step = StepBuilder()
        value = step.named("batch[0]", 5, phase="data", module=str(len(steps)))
        for _ in range(1_500):
            value = step.op(f"aten.op{rng.randrange(20)}.default", value)
        steps.append(step)
    alignment = align(steps[0].view(), steps[1].view())
    paired = (alignment.reference >= 0) & (alignment.current >= 0)
    assert np.count_nonzero(paired) > 300
    assert np.all(np.diff(alignment.reference[paired]) > 0)
    assert np.all(np.diff(alignment.current[paired]) > 0)


def test_a_collective_is_one_unit_with_all_that_goes_into_it_and_a_delivery_belongs_to_its_reader():
    step = StepBuilder()
    first = step.op("aten.ones.default")
    fields = {"phase": "forward", "op": "c10d.allreduce_coalesced_.default", "arguments": '{"group":"0-1"}'}
    sent = [step.row(index, role="sent", output=index, inputs=(first,), **fields) for index in range(2)]
    arrived = step.row(7, role="delivered", inputs=tuple(sent), **fields)
    step.op("aten.sum.default", arrived)
    units = group(step.view(), {})
    assert list(zip(units.leads, units.starts, units.stops, strict=True)) == [(0, 0, 1), (1, 1, 3), (3, 4, 5)]
