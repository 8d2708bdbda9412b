import random
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_builder import StepBuilder, both
from torch import nn
from tracing import traced

from det_callbacks import HashMode
from det_callbacks.compare.align import align
from det_callbacks.compare.ranks import compare_steps
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
        value = step.op(
            "aten.lerp_.Scalar",
            value,
            read,
            phase="optimizer",
            name=known,
            weights={read: 7 + noise},
        )
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
    assert missing == [
        index + 1 for index, edit in sorted(edits.items()) if edit == "remove" and index < len(ops)
    ]


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, foreach=False),
    "foreach": partial(torch.optim.Adam, foreach=True),
    "fused": partial(torch.optim.AdamW, fused=True),
    "RMSprop": torch.optim.RMSprop,
}


def trained(make, order, *, level="op", clips=False, noise=None) -> list[StepView]:
    """Return two steps of layers that are registered, updated and given their batch in an order."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(3, 3) for name in "abc"}
    model = nn.ModuleDict({name: layers[name] for name in order})
    parameters = [parameter for name in order for parameter in layers[name].parameters()]
    optimizer, mode = make(parameters), HashMode(model, level=level)
    views = []
    for number in range(2):
        batch = {name: torch.full((2, 3), 1.0 + number + place) for place, name in enumerate("abc")}
        mode.begin(batch={name: batch[name] for name in order}, is_first=number == 0)
        optimizer.zero_grad()
        sum(layers[name](batch[name]).square().sum() for name in "abc").backward()
        if noise == number:
            layers["b"].weight.grad[0, 0] += 1e-3
        mode.recorder.phase = "gradient"
        if clips:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        views.append(mode.finish().view(step=number))
    return views


@pytest.mark.parametrize("level", ["op", "module", "state"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_what_is_registered_updated_or_given_in_another_order_is_compared_by_name(make, level):
    for reference, current in zip(
        trained(make, "abc", level=level), trained(make, "cab", level=level), strict=True
    ):
        difference = compare_steps(reference, current)
        assert difference.kinds == {}
        assert difference.num_compared == len(reference.program) == len(current.program)
        assert {"state", "gradient"} <= {*difference.alignment.reordered}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_difference_among_reordered_updates_has_the_name_that_it_has(make):
    reference, current = trained(make, "abc")[1], trained(make, "cab", noise=1)[1]
    difference = compare_steps(reference, current)
    first = difference.divergences[0]
    assert (first.op, first.kind, first.is_origin) == ("aten.add_.Tensor", "extra", True)
    named = {one.name for one in difference.divergences if one.name is not None}
    assert named
    assert all(name.endswith("b.weight") for name in named)


def test_a_sum_over_all_gradients_depends_on_their_order():
    """Only what combines several of them: the norm of each is compared with
    that of the same gradient.
    """
    reference, current = (
        trained(OPTIMIZERS["SGD"], order, clips=True)[0] for order in ("abc", "cab")
    )
    divergences = compare_steps(reference, current).divergences
    assert divergences[0].op == "aten.stack.default"
    assert "aten._foreach_norm.Scalar" not in {one.op for one in divergences}


@given(st.permutations("abcdef"), st.sets(st.sampled_from("abcdef")))
@settings(max_examples=50, deadline=None)
def test_a_list_in_any_order_lacks_only_what_is_not_in_it(order, absent):
    def fill(step, now):
        for name in order if now else "abcdef":
            if not (now and name in absent):
                step.named(f"batch[{name!r}]", ord(name), phase="data")

    reference, current = (step.view() for step in both(fill))
    missing, extra = one_sided(reference, current)
    assert {reference.program.sites[row].name for row in missing} == {
        f"batch[{name!r}]" for name in absent
    }
    assert extra == []
    assert [*compare_steps(reference, current).kinds.values()] == ["missing"] * len(absent)


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
    """Gradients are read by AdamW, or by what clips them before; from outside the step,
    as all that AdamW reads.
    """

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
