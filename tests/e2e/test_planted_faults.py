"""Faults planted in a training of more than fifty modules: the culprit is named, and nobody who passes it on.

What Python may have passed on, past every edge, is in tests/unit/test_origin.py.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from faults import Deep, Training, add_ulp, below, first_of, samples, verify
from torch import Tensor, nn
from trainers import LIGHTNING_ADVICE

from det_callbacks import compare_runs
from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE


def other_content() -> tuple[Tensor, Tensor]:
    inputs, labels = samples()
    add_ulp(inputs[17])
    return inputs, labels


class Cast(nn.Module):
    """Computes in another dtype, and gives back float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.to(self.dtype).tanh().float()


HALF = partial(Deep, middle=partial(Cast, torch.float16))
ADAMW = partial(Deep, optimizer=torch.optim.AdamW, lr=0.01, foreach=True)
NORM = "aten.native_layer_norm_backward"
SAID_DTYPE = "gave float16 [8, 16] in the reference, bfloat16 [8, 16] now"
SAID_PRECISION = "trainer.precision: 32-true in the reference, bf16-mixed now, and that is what differs first"

# the reference's model, the training, where it differs first (step, phase, module, op and name), how and why, what is
# said
FAULTS: dict[str, tuple[Any, Training, str, str, str]] = {
    "one ULP in the forward pass": (
        *(Deep, Training(around=below(op="aten.addmm", step=2, module="net.5.up"))),
        *("2|forward|net.5.up|aten.addmm.default|", "content forward"),
        "Step 2, forward: aten.addmm.default in net.5.up at tests/e2e/faults.py",
    ),
    "one ULP in the backward pass": (
        *(Deep, Training(around=below(op=NORM, step=1, call=3))),
        *(f"1|backward|net.6.norm|{NORM}.default|", "content backward"),
        f"Step 1, backward: {NORM}.default in net.6.norm",
    ),
    "one ULP in the backward of a custom Function": (
        *(Deep, Training(around=below(op="planted_faults.double", step=2))),
        *("2|backward|custom|planted_faults.double.default|", "content backward", "inputs agree"),
    ),
    "one ULP in one of many states that one op writes": (
        *(ADAMW, Training(model=ADAMW, around=below(op="aten._foreach_lerp_", step=1, written=14))),
        *("1|optimizer||aten._foreach_lerp_.Scalar|exp_avg of net.3.up.weight", "content optimizer", "gave other bits"),
    ),
    "other content in a batch": (
        *(Deep, Training(data=other_content), "2|data|||batch[0]", "content data_content"),
        "batch[0] differs; the difference came in through it, and no op is to blame",
    ),
    "learning rate of SGD": (
        *(Deep, Training(model=partial(Deep, lr=0.02))),
        *("0|optimizer||aten.add_.Tensor|net.0.norm.weight", "argument settings"),
        "called with other arguments (alpha: -0.01 -> -0.02)",
    ),
    "another precision": (
        *(Deep, Training(options={"precision": "bf16-mixed"})),
        *("0|forward|net.0.up|aten._to_copy.default|", "extra settings", SAID_PRECISION),
    ),
    "another dtype of an op": (
        *(HALF, Training(model=partial(Deep, middle=partial(Cast, torch.bfloat16)))),
        *("0|forward|middle|aten._to_copy.default|", "argument forward", SAID_DTYPE),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_culprit_is_named(fault: str, tmp_path: Path, references: Callable[..., Path]) -> None:
    model, training, place, kind_and_cause, said = FAULTS[fault]
    verdict = verify(references(model), training, tmp_path / "current")
    first = first_of(verdict)
    assert "|".join(map(str, (first.step, first.phase, first.module, first.op, first.name or ""))) == place
    assert f"{first.kind} {verdict.cause}" == kind_and_cause
    assert said in verdict.explanation
    assert first.is_origin == bool(first.op)
    if first.kind == "content":
        assert verdict.origins == (first,) * first.is_origin
    if first.is_origin:
        assert verdict.origins[0] == first
        assert "an origin is" not in verdict.explanation, "it is said once"


# where a difference is passed on, or cannot be followed, nobody is its origin


class ThroughNumpy(nn.Module):
    """A tensor that NumPy writes between two ops, where the trace cannot see it."""

    def __init__(self, read: Callable[[Tensor], Tensor], shift: float) -> None:
        super().__init__()
        self.read, self.shift = read, shift

    def forward(self, inputs: Tensor) -> Tensor:
        values = inputs * 2
        values.detach().numpy()[0, 0] += self.shift
        return inputs + self.read(values).sum()


def after(write: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    def read(values: Tensor) -> Tensor:
        write(values)
        return values[:1].tanh()

    return read


def in_empty(values: Tensor) -> Tensor:
    """Read memory of which one part has no writer but NumPy."""
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
def test_an_unseen_writer_makes_no_origin(read: Any, tmp_path: Path, references: Callable[..., Path]) -> None:
    reference = references(partial(Deep, middle=partial(ThroughNumpy, read, 0.0)))
    training = Training(model=partial(Deep, middle=partial(ThroughNumpy, read, 1e-3)))
    verdict = verify(reference, training, tmp_path / "current")
    first = first_of(verdict)
    assert (first.module, first.op.split(".")[1], first.kind, first.is_origin) == ("middle", "tanh", "content", None)
    assert verdict.origins == ()
    assert "what it reads was written by nothing that the trace saw" in verdict.explanation
    assert "cannot be proven" in verdict.explanation


class Viewing(nn.Module):
    """Takes one part of a tensor, or another one."""

    def __init__(self, view: Callable[[Tensor, int], Tensor], number: int) -> None:
        super().__init__()
        self.view, self.number = view, number
        self.weight = nn.Parameter(torch.linspace(0, 1, 8))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.view(inputs * 2 + self.weight.sum(), self.number).sum()


def write_row(values: Tensor, number: int) -> Tensor:
    rows = torch.zeros(4, 4)
    rows[number].fill_(1)
    return rows * torch.arange(16.0).view(4, 4)


VIEWS: dict[str, tuple[Callable[[Tensor, int], Tensor], str]] = {
    "a half": (lambda values, number: values.chunk(2, -1)[number].tanh(), "aten.tanh.default"),
    "a detached row": (lambda values, number: values[number].detach().exp(), "aten.exp.default"),
    "transposed": (
        lambda values, number: values[:4, :4].mm([values[:4, :4].mT, values[:4, :4]][number]),
        "aten.mm.default",
    ),
    "in a list": (lambda values, number: torch.cat([values[:1], values[number : number + 1]]), "aten.cat.default"),
    "a number": (lambda values, number: values * values[number, 0].item(), "aten._local_scalar_dense.default"),
    "written": (write_row, "aten.fill_.Scalar"),
}


@pytest.mark.parametrize(("view", "op"), VIEWS.values(), ids=VIEWS)
def test_an_op_that_reads_another_part_is_called_otherwise(
    view: Any, op: str, tmp_path: Path, references: Callable[..., Path]
) -> None:
    reference = references(partial(Deep, middle=partial(Viewing, view, 0)))
    verdict = verify(reference, Training(model=partial(Deep, middle=partial(Viewing, view, 1))), tmp_path / "current")
    first = first_of(verdict)
    assert (first.module, first.op, first.kind, first.is_origin) == ("middle", op, "structure", True)
    assert "read another part of what it was given: " in verdict.explanation


def test_an_unselected_module_in_between_makes_no_origin(tmp_path: Path, references: Callable[..., Path]) -> None:
    modules = ("net.[0-3]*", "net.[6-9]*", "head")
    reference = references(Deep, modules=modules)
    training = Training(around=below(op="aten.addmm", module="net.4.up", step=1, is_gross=True))
    verdict = verify(reference, training, tmp_path / "current")
    first = first_of(verdict)
    assert (first.step, first.phase, first.module, first.is_origin) == (1, "input", "net.6.norm", False)
    assert verdict.origins == ()
    assert "an op that is not recorded (modules, phases) may have written it" in verdict.explanation
    seen = {site.module for site in Run.open(reference).view(0, 0, 1).program.sites if site.op}
    assert "net.3.up" in seen
    assert not seen & {"net.4.up", "net.5.up"}


@pytest.mark.parametrize("level", ["module", "state"])
def test_lower_levels_find_the_step_and_blame_no_op(
    level: str, tmp_path: Path, references: Callable[..., Path]
) -> None:
    training = Training(around=below(op="aten.addmm", step=2, module="net.5.up", is_gross=True))
    verdict = verify(references(Deep, level=level), training, tmp_path / "current")
    first = first_of(verdict)
    assert (first.step, first.phase) == (2, "forward")
    assert first.module == ("net.5.up" if level == "module" else "")
    assert first.name == ("output" if level == "module" else "loss")
    assert not any(origin.op for origin in verdict.origins)


class FlipABit(pl.Callback):
    """Flips a bit of a gradient before the second update."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: torch.optim.Optimizer) -> None:
        if trainer.global_step == 1:
            module.head.weight.grad.numpy().view(np.int32).flat[3] ^= 1 << 12


@pytest.mark.parametrize("optimizer", [partial(torch.optim.AdamW, fused=True), partial(torch.optim.LBFGS, max_iter=3)])
def test_the_gradient_is_named_and_no_op_of_the_optimizer(optimizer: Any, tmp_path: Path) -> None:
    plain = Training(model=partial(Deep, optimizer=optimizer, lr=0.1), options={"max_steps": 2})
    flipped = replace(plain, callbacks=(FlipABit(),))
    reference = plain.record(tmp_path / "reference")
    verdict = verify(reference, flipped, tmp_path / "current")
    offline = compare_runs(reference, flipped.record(tmp_path / "second"))
    for name in ("first_divergence", "origins", "cause", "explanation"):
        assert getattr(offline, name) == getattr(verdict, name)
    first = first_of(verdict)
    assert (first.step, first.phase, first.name) == (1, "gradient", "grad of head.weight")
    assert (first.kind, first.is_origin, verdict.origins, verdict.cause) == ("content", None, (), "backward")
    assert "what wrote it agrees" in verdict.explanation
