"""Faults planted in a training of more than fifty modules: the culprit is named,
and nobody who passes it on.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from faults import Deep, Training, add_ulp, below, verify
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from trainers import LIGHTNING_ADVICE

pytestmark = LIGHTNING_ADVICE


class Applied(nn.Module):
    """Adds what a function makes of a tensor and of something else."""

    def __init__(self, function: Callable[[Tensor, Any], Tensor], given: Any) -> None:
        super().__init__()
        self.function, self.given = function, given

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.function(inputs * 2, self.given).sum()


def applied(function: Callable[[Tensor, Any], Tensor], given: Any) -> Callable[[], Deep]:
    return partial(Deep, middle=partial(Applied, function, given))


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).tanh().float()


HALF = applied(cast, torch.float16)
ADAMW = partial(Deep, optimizer=torch.optim.AdamW, lr=0.01, foreach=True)
NORM = "aten.native_layer_norm_backward"
SAID_DTYPE = "float16 [8, 16] in the reference, bfloat16 [8, 16] in the current run"
SAID_PRECISION = (
    "trainer.precision is 32-true in the reference and bf16-mixed in the current run, which "
    "explains"
)


@contextmanager
def other_first_reader(model: Any) -> Iterator[None]:
    def read(*_: Any) -> None:
        if model.global_step:
            model.head.weight.detach().norm()

    model.head.register_forward_pre_hook(read)
    yield


@contextmanager
def other_division(model: Any) -> Iterator[None]:
    """What Lightning divides the loss by, or how, is another thing: here the op,
    below the trace.
    """

    class Dividing(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            output = func(*args, **(kwargs or {}))
            is_forward = torch._C._current_graph_task_id() == -1
            if (
                func is torch.ops.aten.div.Tensor
                and output.ndim == 0
                and model.global_step == 1
                and is_forward
            ):
                add_ulp(output)
            return output

    with Dividing():
        yield


# the reference's model, the training, where it differs first (step, phase, module, op, name), how
# and why, what is said
FAULTS: dict[str, tuple[Any, Training, str, str, str]] = {
    "one ULP in the forward pass": (
        *(Deep, Training(around=below(op="aten.addmm", step=2, module="net.5.up"))),
        *("2|forward|net.5.up|aten.addmm.default|", "content forward"),
        "Step 2, forward: aten.addmm.default in net.5.up (tests/e2e/faults.py",
    ),
    "one ULP in the backward pass": (
        *(Deep, Training(around=below(op=NORM, step=1, call=3))),
        *(f"1|backward|net.6.norm|{NORM}.default|", "content backward"),
        f"Step 1, backward: {NORM}.default in net.6.norm",
    ),
    "one ULP in the backward of a custom Function": (
        *(Deep, Training(around=below(op="planted_faults.double", step=2))),
        *(
            "2|backward|custom|planted_faults.double.default|",
            "content backward",
            "its inputs match",
        ),
    ),
    "one ULP in one of many states that one op writes": (
        *(ADAMW, Training(model=ADAMW, around=below(op="aten._foreach_lerp_", step=1, written=14))),
        *(
            "1|optimizer||aten._foreach_lerp_.Scalar|exp_avg of net.3.up.weight",
            "content optimizer",
            "produced different bits",
        ),
    ),
    "one ULP in what Lightning does with the loss": (
        *(
            Deep,
            Training(around=other_division),
            "1|other||aten.div.Tensor|",
            "content backward",
            "starts here",
        ),
    ),
    "another precision": (
        *(Deep, Training(options={"precision": "bf16-mixed"})),
        *("0|forward|net.0.up|aten._to_copy.default|", "extra settings", SAID_PRECISION),
    ),
    "an op that reads a weight before the others": (
        *(
            Deep,
            Training(around=other_first_reader),
            "1|forward|head|aten.linalg_vector_norm.default|",
        ),
        *("extra structure", "its inputs match, so the difference starts here"),
    ),
    "another dtype of an op": (
        *(HALF, Training(model=applied(cast, torch.bfloat16))),
        *("0|forward|middle|aten._to_copy.default|", "argument forward", SAID_DTYPE),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_culprit_is_named(fault, references, tmp_path):
    model, training, place, kind_and_cause, said = FAULTS[fault]
    verdict = verify(references(model), training, tmp_path / "current")
    first = verdict.first_divergence
    assert (
        "|".join(map(str, (first.step, first.phase, first.module, first.op, first.name or "")))
        == place
    )
    assert f"{first.kind} {verdict.cause}" == kind_and_cause
    assert said in verdict.explanation
    assert first.is_origin == bool(first.op)
    assert verdict.origins[:1] == (first,) * first.is_origin
    assert first.kind != "content" or len(verdict.origins) == first.is_origin
    assert not first.is_origin or "an origin is" not in verdict.explanation, "it is said once"


# where a difference is passed on, or cannot be followed, nobody is its origin


def after(write: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    def read(values: Tensor) -> Tensor:
        write(values)
        return values[:1].tanh()

    return read


def in_empty(values: Tensor) -> Tensor:
    memory = torch.empty(4, 4)
    memory[:2] = 0
    memory.numpy()[2:] = values.detach().numpy()[0, 0]
    return memory.tanh()


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "all of it": torch.tanh,
    "a part": lambda values: values[:, :2].tanh(),
    "a part, when another row was written": after(lambda values: values[1].zero_()),
    "a part, when a column was written": after(lambda values: values[:, 1].zero_()),
    "what it then overwrites": lambda values: torch.tanh(values.detach(), out=values.detach()),
    "memory that is half written": in_empty,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_an_unseen_writer_makes_no_origin(read, tmp_path):
    """NumPy writes between two ops, where the trace cannot see it."""

    def shifted(values: Tensor, shift: float) -> Tensor:
        values.detach().numpy()[0, 0] += shift
        return read(values)

    reference = Training(model=applied(shifted, 0.0)).record(tmp_path / "reference")
    verdict = verify(reference, Training(model=applied(shifted, 1e-3)), tmp_path / "current")
    first = verdict.first_divergence
    assert (first.module, first.op.split(".")[1], first.kind, first.is_origin) == (
        "middle",
        "tanh",
        "content",
        None,
    )
    assert verdict.origins == ()
    is_half_written = read is in_empty
    said = (
        "If NumPy or a raw kernel writes it, the recorder"
        if is_half_written
        else "what wrote its inputs"
    )
    assert said in verdict.explanation


def write_row(values: Tensor, number: int) -> Tensor:
    rows = torch.zeros(4, 4)
    rows[number].fill_(1)
    return rows * torch.arange(16.0).view(4, 4)


VIEWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "aten.tanh.default": lambda values, number: values.chunk(2, -1)[number].tanh(),
    "aten.exp.default": lambda values, number: values[number].detach().exp(),
    "aten.mm.default": lambda values, number: values[:4, :4].mm(
        [values[:4, :4].mT, values[:4, :4]][number]
    ),
    "aten.cat.default": lambda values, number: torch.cat([values[:1], values[number : number + 1]]),
    "aten._local_scalar_dense.default": lambda values, number: values * values[number, 0].item(),
    "aten.fill_.Scalar": write_row,
}


@pytest.mark.parametrize("op", VIEWS)
def test_an_op_that_reads_another_part_is_called_otherwise(op, tmp_path):
    reference = Training(model=applied(VIEWS[op], 0)).record(tmp_path / "reference")
    verdict = verify(reference, Training(model=applied(VIEWS[op], 1)), tmp_path / "current")
    first = verdict.first_divergence
    assert (first.module, first.op, first.kind, first.is_origin) == (
        "middle",
        op,
        "structure",
        True,
    )
    assert "read a different part of its input: " in verdict.explanation


@pytest.mark.parametrize("level", ["module", "state"])
def test_lower_levels_find_the_step_and_blame_no_op(level, references, tmp_path):
    training = Training(around=below(op="aten.addmm", step=2, module="net.5.up", is_gross=True))
    verdict = verify(references(level=level), training, tmp_path / "current")
    first = verdict.first_divergence
    assert (first.step, first.phase) == (2, "forward")
    assert first.module == ("net.5.up" if level == "module" else "")
    assert first.name == ("output" if level == "module" else "loss")
    assert not any(origin.op for origin in verdict.origins)


def flip_a_bit(trainer: pl.Trainer, module: Any, optimizer: torch.optim.Optimizer) -> None:
    """Flip a bit of a gradient before the second update."""
    if trainer.global_step == 1:
        module.head.weight.grad.numpy().view(np.int32).flat[3] ^= 1 << 12


@pytest.mark.parametrize(
    "optimizer", [partial(torch.optim.AdamW, fused=True), partial(torch.optim.LBFGS, max_iter=3)]
)
def test_the_gradient_is_named_and_no_op_of_the_optimizer(optimizer, tmp_path):
    plain = Training(model=partial(Deep, optimizer=optimizer, lr=0.1), options={"max_steps": 2})
    flipped = replace(plain, callbacks=(LambdaCallback(on_before_optimizer_step=flip_a_bit),))
    verdict = verify(plain.record(tmp_path / "reference"), flipped, tmp_path / "current")
    first = verdict.first_divergence
    assert (first.step, first.phase, first.name) == (1, "gradient", "grad of head.weight")
    assert (first.kind, first.is_origin, verdict.origins, verdict.cause) == (
        "content",
        None,
        (),
        "external_write",
    )
    assert "a raw kernel) changed grad of head.weight during the step" in verdict.explanation
