"""Numbers and shapes that go from a tensor through Python into the arguments of later ops."""

from functools import partial

import pytest
import torch
from step_builder import FLOAT, both
from torch import nn
from tracing import step_of

from det_callbacks.compare.step import compare_steps
from det_callbacks.runs.program import TensorLayout
from det_callbacks.trace.hash_mode import HashMode

DATA = torch.arange(1.0, 5.0)
LONGER = TensorLayout(dtype="float32", shape=(8, 5), stride=(5, 1))
LENGTHS = TensorLayout(dtype="int64", shape=(3,), stride=(1,))
NUMBER = TensorLayout(dtype="float", shape=())


def noisy(name, read, **fields):
    """Return what adds a call that gives other bits in the current step."""
    return lambda step, now: step.op(name, read, noise=now, **fields)


# what Python may read, and so pass on
LATER = {
    "an op with another structure": lambda step, now: step.op(
        "aten.gather.default", "?x", layout=LONGER if now else FLOAT
    ),
    "a number read back": noisy("aten._local_scalar_dense.default", "?x", role="value"),
    "indices that an op computed": noisy("aten.topk.default", "?x", layout=LENGTHS),
}
READABLE = {
    "other content": lambda step, now: step.named("batch[0]", 5 + now, phase="data"),
    "a batch of another shape": lambda step, now: step.named(
        "batch[0]", 5, phase="data", entry=LONGER if now else FLOAT
    ),
    "other lengths": lambda step, now: step.named("batch.batch_sizes", 5 + now, phase="data", entry=LENGTHS),
    "another number": lambda step, now: step.named("batch['scale']", 5 + now, phase="data", entry=NUMBER),
    "one more entry": lambda step, now: now and step.named("batch[7]", 5, phase="data"),
    "NumPy's generator": lambda step, now: step.row(5 + now, None, phase="rng", name="numpy", role="generator"),
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
    "structure": lambda step, now: step.op("aten.addmm.default", "?y", module="last", layout=LONGER if now else FLOAT),
    "missing": lambda step, now: an_extra_op(step, not now),
    "extra": an_extra_op,
    "another tensor": another_tensor_that_is_read,
}
OTHER_BITS = noisy("aten.exp.default", "?y", module="last")


def judged(*parts):
    """Return what is said of the last part, where it differs."""
    pair = both(lambda step, now: [part(step, now) for part in parts])
    divergences = compare_steps(*(step.view() for step in pair)).divergences
    return [item.is_origin for item in divergences if item.module == "last"]


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


def test_all_outputs_of_the_first_call_of_another_structure_are_origins():
    def norm(step, now):
        step.op("aten.native_layer_norm.default", "?x", module="last", outputs=3, layout=LONGER if now else FLOAT)

    assert judged(norm) == [True, True, True]


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
