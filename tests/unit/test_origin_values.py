"""Numbers and shapes that go from a tensor through Python into the arguments of later ops."""

from functools import partial

import pytest
import torch
from step_builder import FLOAT, StepBuilder
from torch import nn
from tracing import step_of

from det_callbacks.compare import compare_steps
from det_callbacks.runs.program import TensorLayout
from det_callbacks.trace.hash_mode import HashMode

DATA = torch.arange(1.0, 5.0)


LONGER = TensorLayout(dtype="float32", shape=(8, 5), stride=(5, 1))
LENGTHS = TensorLayout(dtype="int64", shape=(3,), stride=(1,))


def a_batch_of_another_shape(step, is_current):
    step.named("batch[0]", 5, phase="data", entry=LONGER if is_current else FLOAT)


def other_lengths_in_a_batch(step, is_current):
    step.named("batch.batch_sizes", 5 + is_current, phase="data", entry=LENGTHS)


def another_number_in_a_batch(step, is_current):
    step.named("batch['scale']", 5 + is_current, phase="data", entry=TensorLayout(dtype="float", shape=()))


def one_more_entry_of_a_batch(step, is_current):
    if is_current:
        step.named("batch[7]", 5, phase="data")


def another_state_of_numpys_generator(step, is_current):
    step.row(5 + is_current, None, phase="rng", name="numpy", role="generator")


def an_op_with_another_structure(step, is_current):
    step.op("aten.gather.default", "?x", layout=LONGER if is_current else FLOAT)


def a_number_read_back(step, is_current):
    step.op("aten._local_scalar_dense.default", "?x", role="value", noise=is_current)


def indices_that_an_op_computed(step, is_current):
    step.op("aten.topk.default", "?x", layout=LENGTHS, noise=is_current)


def other_content(step, is_current):
    step.named("batch[0]", 5 + is_current, phase="data")


def bits_of_an_op(step, is_current):
    step.op("aten.exp.default", "?x", noise=is_current)


READABLE = (
    other_content,
    a_batch_of_another_shape,
    other_lengths_in_a_batch,
    another_number_in_a_batch,
    one_more_entry_of_a_batch,
    another_state_of_numpys_generator,
    an_op_with_another_structure,
    a_number_read_back,
    indices_that_an_op_computed,
)


def another_argument(step, is_current, **place):
    step.op("aten.mul.Scalar", "?y", **{"module": "last", **place}, arguments={"other": 2 + is_current})


def another_structure(step, is_current):
    step.op("aten.addmm.default", "?y", module="last", layout=LONGER if is_current else FLOAT)


def a_missing_op(step, is_current, **place):
    if not is_current:
        step.op("aten.slice_backward.default", "?y", module="last", **place)


def an_extra_op(step, is_current, **place):
    a_missing_op(step, not is_current, **place)


def another_tensor_that_is_read(step, is_current):
    places = [step.op("aten.relu.default", name, module="last") for name in ("?y", "?z")]
    step.op("aten.sin.default", places[is_current], module="last")


def other_bits_from_the_same_inputs(step, is_current, **place):
    step.op("aten.exp.default", "?y", module="last", noise=is_current, **place)


def judged(*parts):
    """Return what is said of the last part, where it differs."""
    reference, current = StepBuilder(), StepBuilder()
    for step, is_current in ((reference, False), (current, True)):
        for part in parts:
            part(step, is_current)
    divergences = compare_steps(reference.view(), current.view()).divergences
    return [item.is_origin for item in divergences if item.module == "last"]


@pytest.mark.parametrize("first", READABLE)
@pytest.mark.parametrize(
    "last", [another_argument, another_structure, a_missing_op, an_extra_op, another_tensor_that_is_read]
)
def test_what_python_may_have_passed_on_is_not_proven(first, last):
    assert judged(first, last) == [None]


@pytest.mark.parametrize("first", READABLE)
def test_other_bits_from_the_same_inputs_are_proven_whatever_python_read(first):
    assert judged(first, other_bits_from_the_same_inputs) == [True]


LATER = (an_op_with_another_structure, a_number_read_back, indices_that_an_op_computed)


@pytest.mark.parametrize(
    "last", [another_argument, another_structure, a_missing_op, an_extra_op, another_tensor_that_is_read]
)
@pytest.mark.parametrize("other", [bits_of_an_op, *LATER])
def test_floats_that_an_op_computed_and_what_comes_later_are_passed_on_by_nobody(other, last):
    assert judged(*((last, other) if other in LATER else (other, last))) == [True]


@pytest.mark.parametrize(
    ("last", "is_origin"),
    [
        (partial(another_argument, phase="backward"), None),
        (partial(an_extra_op, phase="backward"), None),
        (partial(another_argument, phase="optimizer"), True),
        (partial(other_bits_from_the_same_inputs, phase="backward"), True),
    ],
)
def test_how_ops_of_a_backward_pass_are_called_may_follow_from_the_forward_pass(last, is_origin):
    assert judged(last) == [True]
    assert judged(partial(another_argument, module="first"), last) == [is_origin]
    assert judged(partial(another_argument, module="first", phase="optimizer"), last) == [True]


def test_all_outputs_of_the_first_call_of_another_structure_are_origins():
    reference, current = StepBuilder(), StepBuilder()
    for step, layout in ((reference, FLOAT), (current, LONGER)):
        step.op("aten.native_layer_norm.default", "?x", outputs=3, layout=layout)
    divergences = compare_steps(reference.view(), current.view()).divergences
    assert [item.is_origin for item in divergences] == [True, True, True]


class Scaled(nn.Module):
    def forward(self, values: torch.Tensor, factor: float) -> torch.Tensor:
        return values * factor


def test_a_number_read_back_outside_the_selected_modules_is_not_lost():
    model = nn.Sequential(Scaled())

    def body(addend: float) -> None:
        model[0](DATA, (DATA + addend).sum().item())

    views = [step_of(HashMode(model, modules=("0",)), partial(body, addend)).view() for addend in (0.5, 0.25)]
    found = [(entry.op, entry.is_origin) for entry in compare_steps(*views).divergences if entry.op]
    assert found == [("aten._local_scalar_dense.default", False), ("aten.mul.Tensor", None)]
