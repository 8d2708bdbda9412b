"""NumPy changes a gradient between the backward pass and the optimizer: nobody who reads it then is an origin."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from finding import first_of, verify
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback, Verdict, compare_runs

pytestmark = LIGHTNING_ADVICE


class InPlace(torch.optim.Optimizer):
    """Works on the gradients themselves, as Shampoo and others do."""

    def __init__(self, parameters: Any, *, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(parameters, {})
        self.change = change

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]  # Lightning gives one
        loss = closure()
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(self.change(parameter.grad), alpha=0.1)
        return loss


def scaled_in_part(gradient: Tensor) -> Tensor:
    gradient.view(-1)[2:5].mul_(2)
    return gradient


class Model(pl.LightningModule):
    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer], *, flips: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.make_optimizer = optimizer
        self.flips = flips

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradient = self.net[2].weight.grad
        if self.flips and self.global_step == 1 and gradient is not None:
            gradient.numpy().view(np.int32).flat[3] ^= 1 << 12

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    optimizer: Callable[..., torch.optim.Optimizer]
    flips: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def fit(self, callback: DeterminismCallback) -> None:
        torch.manual_seed(0)
        data = torch.randn(2, 5, 4)
        loader = DataLoader(data, batch_size=None)  # type: ignore[arg-type]  # a tensor will do
        quiet_trainer(callback, **self.options).fit(Model(self.optimizer, flips=self.flips), loader)


def planted(folder: Path, **training: Any) -> tuple[Verdict, ...]:
    """Return the verdicts on a flipped bit: while it trains, on what that kept, and on a second recording."""
    Training(**training).fit(DeterminismCallback(folder / "reference", mode="record"))
    flipped = Training(**training, flips=True)
    live = verify(folder / "reference", flipped, folder / "current")  # type: ignore[arg-type]  # all that it needs
    flipped.fit(DeterminismCallback(folder / "second", mode="record"))
    return live, *(compare_runs(folder / "reference", folder / name) for name in ("current", "second"))


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, foreach=False),
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "LBFGS": partial(torch.optim.LBFGS, lr=0.1, max_iter=3),
    "mul_ of a part": partial(InPlace, change=scaled_in_part),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_the_gradient_is_named_and_no_op_of_the_optimizer(case: str, tmp_path: Path) -> None:
    for verdict in planted(tmp_path, optimizer=OPTIMIZERS[case]):
        first = first_of(verdict)
        assert (first.step, first.phase, first.name) == (1, "gradient", "grad of net.2.weight")
        assert (first.kind, first.is_origin, verdict.origins, verdict.cause) == ("content", None, (), "backward")
        assert "what wrote it agrees, so something that the trace did not see" in verdict.explanation


def test_clipping_that_reads_the_gradient_first_is_no_origin(tmp_path: Path) -> None:
    options = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "norm"}
    live, kept, _ = planted(tmp_path, optimizer=OPTIMIZERS["SGD"], options=options)
    for verdict in (live, kept):
        first = first_of(verdict)
        assert (first.step, first.phase, first.kind, first.is_origin) == (1, "gradient", "content", None)
        assert (verdict.origins, verdict.cause, first.op.startswith("aten._foreach_")) == ((), "backward", True)
        assert "something that the trace did not see wrote what it reads" in verdict.explanation
    # evidence that cannot be read leaves nothing proven
    (evidence,) = (tmp_path / "current" / "rank-00000").glob("*.evidence.arrows")
    evidence.write_bytes(b"damaged" + evidence.read_bytes()[7:])
    verdict = compare_runs(tmp_path / "reference", tmp_path / "current")
    assert (first_of(verdict).is_origin, verdict.origins) == (None, ())
