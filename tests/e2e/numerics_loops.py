"""Loops of one step that keep all their tensors, and what a comparison of their numbers says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from det_callbacks import compare_runs
from det_callbacks.integrations.loop import TrainingRun

ALL: Any = {"keep_tensors": ["*"], "only_steps": [0]}


def words(text: str) -> str:
    return " ".join(text.split())


def loop(
    folder: Path,
    model: Callable[[], nn.Module],
    inputs: torch.Tensor,
    *,
    before_update: Callable[[nn.Module], None] | None = None,
    **options: Any,
) -> Path:
    """Train a step on the mean square of what a model returns, and record it."""
    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = TrainingRun(
        folder, model=net, optimizers=[optimizer], **{"mode": "record", **ALL, **options}
    )
    with run, run.step(inputs):
        loss = net(inputs).float().square().mean()
        loss.backward()
        if before_update is not None:
            before_update(net)
        optimizer.step()
    return folder


def layers(function: Callable[[torch.Tensor], torch.Tensor], width: int = 8) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, width), nn.Linear(width, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(function(self.first(x)))

    return Net()


def numerics_of(reference: Path, current: Path, **options: Any) -> Any:
    return compare_runs(reference, current, numerics=True, **options).numerics
