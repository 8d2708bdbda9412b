"""A seed decides what is drawn in every process: the main one, and the workers of a DataLoader."""

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import enforce_determinism


def draw() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand((), dtype=torch.float64))]


class Drawn(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, *draw()], dtype=torch.float64)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1, dtype=torch.float64)
        self.seen: list[list[float]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.extend(batch.tolist())
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(seed: int) -> list[Any]:
    """Return what is drawn with a seed: before the training, as weights, in the workers, and afterwards."""
    with enforce_determinism({"seed": seed}):
        begin, model = draw(), Model()
        weights = model.layer.weight.tolist()
        quiet_trainer(max_epochs=2).fit(model, DataLoader(Drawn(), batch_size=2, num_workers=2, shuffle=True))
        return [begin, weights, model.seen, model.layer.weight.tolist(), draw()]


@pytest.mark.slow
@LIGHTNING_ADVICE
def test_a_seed_decides_what_is_drawn() -> None:
    zero, one = train(0), train(1)
    torch.rand(3)
    assert [train(1), train(0)] == [one, zero]
    # every generator: Python's, NumPy's and torch's, here and in the workers, weights and order
    assert all(a != b for a, b in zip(zero[0], one[0], strict=True))
    assert zero[1] != one[1]
    assert [row[0] for row in zero[2]] != [row[0] for row in one[2]]
    for position in (1, 2, 3):
        drawn, others = ({row[position] for row in seed[2]} for seed in (zero, one))
        assert drawn.isdisjoint(others)
        assert len(drawn) == len(zero[2]) == 12, "no two workers or epochs share a seed"
