import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_builder import StepBuilder, both
from torch import nn
from tracing import traced

from det_callbacks.compare.align import align
from det_callbacks.compare.step import compare_steps
from det_callbacks.runs.program import StepView


def one_sided(reference: StepView, current: StepView) -> tuple[list[int], list[int]]:
    alignment = align(reference, current)
    missing = alignment.reference[alignment.current < 0].tolist()
    return missing, alignment.current[alignment.reference < 0].tolist()


def an_op_like_its_neighbours(step, now):
    value = step.named("batch[0]", 5, phase="data")
    for index in range(20):
        if now and index == 10:
            value = step.op("aten.mul.Tensor", value, arguments={"other": 2.0}, noise="inserted")
        value = step.op("aten.mul.Tensor", value, arguments={"other": 2.0})


def an_op_that_reads_first(name, *, other_bits=False):
    """The input row is made by another op than before, and stays one row."""

    def fill(step, now):
        weights = {name: 7 + (other_bits and now)}
        value = step.named("batch[0]", 5, phase="data")
        if now:
            value = step.op("aten.mul.Tensor", value, name, module="net.extra", weights=weights)
        step.op("aten.mm.default", value, name, module="net.linear", weights=weights)

    return fill


def a_name_that_one_side_does_not_know(*, other_bits):
    def fill(step, now):
        known, noise = "exp_avg of net.weight" if now else None, now and other_bits
        value = step.named("batch[0]", 5 + noise, phase="data")
        if now:
            value = step.op("aten.sin.default", value)
        read = known or "?state"
        value = step.op("aten.lerp_.Scalar", value, read, phase="optimizer", name=known, weights={read: 7 + noise})
        step.op("aten.sqrt.default", value, phase="optimizer")

    return fill


def one_more_output(step, now):
    step.op("aten._foreach_add.List", outputs=2 + now)


def shifted_arguments(step, now):
    value = step.named("batch[0]", 5, phase="data")
    for other in range(5):
        value = step.op("aten.add.Scalar", value, arguments={"other": other + now})


def one_more_name(step, now):
    for name in "abc" if now else "bc":
        step.op("aten.mul_.Tensor", phase="optimizer", module="", name=name, noise=now)


@pytest.mark.parametrize(
    ("fill", "extra"),
    [
        (an_op_like_its_neighbours, [11]),
        (an_op_that_reads_first("net.weight"), [2]),
        (an_op_that_reads_first("net.weight", other_bits=True), [2]),
        (an_op_that_reads_first("?unnamed"), [2]),
        (a_name_that_one_side_does_not_know(other_bits=False), [1]),
        (a_name_that_one_side_does_not_know(other_bits=True), [1]),
        (one_more_output, [2]),
        (shifted_arguments, []),
        (one_more_name, [0]),
    ],
)
def test_only_what_one_step_has_more_is_left_over(fill, extra):
    reference, current = (step.view() for step in both(fill))
    assert one_sided(reference, current) == ([], extra)
    assert one_sided(current, reference) == (extra, [])


OPS = ("aten.mul.Tensor", "aten.add.Tensor", "aten.relu.default")


def chain_of(ops: list[tuple[int, int]], edits: dict[int, str]) -> tuple[StepBuilder, list[int]]:
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
    missing, extra = one_sided(reference.view(), current.view())
    assert extra == inserted
    assert missing == [index + 1 for index, edit in sorted(edits.items()) if edit == "remove" and index < len(ops)]


def test_unrelated_steps_of_one_module_are_aligned_within_bounds():
    """No unique key, no anchor, and more than is searched for common blocks."""
    rng = random.Random(0)

    def fill(step, is_current):
        value = step.named("batch[0]", 5, phase="data", module=str(is_current))
        for _ in range(1_500):
            value = step.op(f"aten.op{rng.randrange(20)}.default", value)

    alignment = align(*(step.view() for step in both(fill)))
    paired = (alignment.reference >= 0) & (alignment.current >= 0)
    assert np.count_nonzero(paired) > 300
    assert np.all(np.diff(alignment.reference[paired]) > 0)
    assert np.all(np.diff(alignment.current[paired]) > 0)


@pytest.mark.parametrize("is_fused", [False, True])
def test_every_tensor_that_an_op_on_lists_reads_first_belongs_to_it(is_fused):
    """Gradients are read by AdamW, or by what clips them before; from outside the step, as all that AdamW reads."""

    def step(*, clips: bool) -> StepView:
        parameters = [nn.Parameter(torch.full((4,), value)) for value in (1.0, 2.0, 3.0)]
        gradients = [torch.full((4,), value) for value in (4.0, 5.0, 6.0)]
        optimizer = torch.optim.AdamW(parameters, foreach=not is_fused, fused=is_fused)

        def update() -> None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()

        update()

        def body() -> None:
            if clips:
                torch._foreach_mul_(gradients, 0.5)
            update()

        return traced(body).view()

    reference, current = step(clips=False), step(clips=True)
    missing, extra = one_sided(reference, current)
    assert missing == []
    assert {current.program.sites[row].op for row in extra} == {"aten._foreach_mul_.Scalar"}


@pytest.mark.parametrize("reader", [False, True])
def test_a_dict_in_another_order_is_no_difference(reader):
    """As in a recording of 1.0.0, which kept a dict's own order."""
    rows = {"batch['a']": 5, "batch['b']": 6, "batch['c']": 7}

    def fill(step, now):
        names = [*rows][:: -1 if now else 1]
        at = {name: step.batch(name, [rows[name]]) for name in names}
        if reader:
            step.op("aten.add.Tensor", at["batch['a']"], at["batch['c']"])
        for name in names:
            step.named(name.replace("batch", "output"), rows[name], phase="forward", module="net")

    reference, current = (step.view() for step in both(fill))
    assert reference.program.id != current.program.id
    assert one_sided(reference, current) == ([], [])
    assert compare_steps(reference, current).num_differing == 0


def test_a_key_that_only_one_batch_has_is_found_in_any_order():
    def fill(step, now):
        for name in ("b", "a", "c") if now else ("c", "d", "a", "b"):
            step.named(f"batch['{name}']", ord(name), phase="data")

    assert one_sided(*(step.view() for step in both(fill))) == ([1], [])
