"""Where a difference is passed on, or cannot be followed, nobody is called its origin."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from faults import Deep, Training, below
from finding import first_of, verify
from torch import Tensor, nn
from trainers import LIGHTNING_ADVICE

from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE


class TwoWrites(nn.Module):
    """One buffer that two ops write, a half each."""

    def forward(self, inputs: Tensor) -> Tensor:
        buffer = torch.empty_like(inputs)
        buffer[:, :8].copy_(inputs[:, :8].sin())
        buffer[:, 8:].copy_(inputs[:, 8:].cos())
        return buffer.square()


class WrittenViews(nn.Module):
    """Views that are written in place."""

    def forward(self, inputs: Tensor) -> Tensor:
        values = inputs * 0.1
        left, right = values[:, :8], values[:, 8:]
        left.mul_(0.5)
        right[:, 0].add_(0.1)
        return values * 0.5


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(self.lstm(inputs.view(-1, 4, 4))[0].flatten(1))


MIDDLES: dict[str, tuple[type[nn.Module], dict[str, Any], str]] = {
    "what one of two writes into a buffer reads": (TwoWrites, {"op": "aten.cos"}, "middle"),
    "a view of a view written in place": (WrittenViews, {"op": "aten.add_"}, "middle"),
    "an op before an LSTM": (Recurrent, {"op": "aten.addmm"}, "net.9.up"),
}


@pytest.mark.parametrize("case", MIDDLES)
def test_nobody_else_is_called_an_origin(case: str, tmp_path: Path, references: Callable[..., Path]) -> None:
    middle, place, module = MIDDLES[case]
    model = partial(Deep, middle=middle)
    training = Training(model=model, around=below(**place, module=module, step=1, is_gross=True))
    verdict = verify(references(model), training, tmp_path / "current")
    first = first_of(verdict)
    assert (first.step, first.phase, first.module, first.kind) == (1, "forward", module, "content")
    assert first.op.startswith(f"{place['op']}.")
    assert first.is_origin
    assert verdict.origins == (first,)
    assert verdict.counts.sites_differing > 100


class ThroughNumpy(nn.Module):
    """A tensor that NumPy writes between two ops, where the trace cannot see it."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, inputs: Tensor) -> Tensor:
        values = inputs * 2
        values.detach().numpy()[:] += self.shift
        return values.tanh()


def test_an_unseen_writer_makes_no_origin(tmp_path: Path, references: Callable[..., Path]) -> None:
    reference = references(partial(Deep, middle=partial(ThroughNumpy, 0.0)))
    training = Training(model=partial(Deep, middle=partial(ThroughNumpy, 1e-3)))
    verdict = verify(reference, training, tmp_path / "current")
    first = first_of(verdict)
    assert (first.module, first.op, first.kind, first.is_origin) == ("middle", "aten.tanh.default", "content", None)
    assert verdict.origins == ()
    assert "something that the trace did not see wrote what it reads" in verdict.explanation
    assert "cannot be proven" in verdict.explanation


class WritesBeforeUpdate(pl.Callback):
    """Writes one element of a weight through NumPy when the step has read it for the last time, in the second step."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: torch.optim.Optimizer) -> None:
        if trainer.global_step == 1:
            weight = module.net[3].up.weight.detach().numpy()
            weight[0, 0] = np.nextafter(weight[0, 0], np.float32(np.inf))


def test_a_weight_written_unseen_before_its_update_makes_no_origin(
    tmp_path: Path, references: Callable[..., Path]
) -> None:
    model = partial(Deep, optimizer=torch.optim.AdamW, foreach=True)
    reference = references(model)
    verdict = verify(reference, Training(model=model, callbacks=(WritesBeforeUpdate(),)), tmp_path / "current")
    first = first_of(verdict)
    assert (first.step, first.phase, first.name) == (1, "optimizer", "net.3.up.weight")
    assert first.op == "aten._foreach_mul_.Scalar"
    assert (first.kind, first.is_origin, verdict.origins) == ("content", None, ())
    assert "something that the trace did not see wrote what it reads" in verdict.explanation


def test_an_unselected_module_in_between_makes_no_origin(tmp_path: Path, references: Callable[..., Path]) -> None:
    modules = ("net.[0-3]*", "net.[6-9]*", "head")
    reference = references(Deep, modules=modules)
    training = Training(around=below(op="aten.addmm", module="net.4.up", step=1, is_gross=True))
    verdict = verify(reference, training, tmp_path / "current")
    first = first_of(verdict)
    assert (first.step, first.phase, first.module, first.is_origin) == (1, "input", "net.6.norm", False)
    assert verdict.origins == ()
    assert "no op is to blame" in verdict.explanation
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
