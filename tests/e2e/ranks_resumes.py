"""Trainings of several processes in which everything is random, and another thing on each rank."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from resumes import Augmented, Noisy, SaveAfter, fit
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from det_callbacks import DeterminismCallback

BATCHES = 7
"""Batches of an epoch on each rank."""


class Wide(Noisy):
    """Large enough for several of DDP's buckets, whose layers are registered in another order than they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(600, 2)
        self.middle = nn.Linear(600, 600)
        self.first = nn.Linear(4, 600)
        self.norm = nn.BatchNorm1d(600)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.dropout(self.norm(self.first(rows)).relu())
        return self.last(self.middle(hidden).relu())


class Apart(pl.Callback):
    """Moves the generators of each rank by another number of draws, and those of a resumed training by more."""

    def __init__(self, draws: int) -> None:
        self.draws = draws

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        for _ in range(trainer.global_rank + self.draws):
            torch.rand(())
            random.random()
            np.random.rand()


def data(num_ranks: int = 2, **options: Any) -> DataLoader[Any]:
    rows = Augmented(num_samples=2 * BATCHES * num_ranks)
    return DataLoader(rows, **{"batch_size": 2, "shuffle": True, **options})


def train(callback: DeterminismCallback, *others: pl.Callback, num_ranks: int = 2, **options: Any) -> pl.Trainer:
    defaults = {"strategy": "ddp", "model": Wide, "data": lambda: data(num_ranks), "max_epochs": 2}
    draws = 5 if "ckpt_path" in options else 0
    return fit(callback, Apart(draws), *others, devices=num_ranks, **{**defaults, **options})


def record(folder: Path, *others: pl.Callback, level: Any = "op", how: Any = "exact", **options: Any) -> pl.Trainer:
    return train(DeterminismCallback(folder / "run", mode="record", level=level, resume=how), *others, **options)


def resume(folder: Path, path: Path, *others: pl.Callback, how: Any = "exact", **options: Any) -> Any:
    """Verify a resumed training against the recorded one, and return the steps that were compared."""
    current = folder / f"current-{path.stem}"
    callback = DeterminismCallback(folder / "run", current=current, resume=how)
    train(callback, *others, ckpt_path=path, **options)
    assert callback.verdict is not None
    assert callback.verdict.verdict == "match"
    return callback.verdict.coverage.steps


def round_trip(folder: Path, after: Sequence[int], *, at: str = "batch", level: Any = "op", **options: Any) -> None:
    """Record a training that saves checkpoints, and resume from each of them."""
    record(folder, SaveAfter(folder, *after, at=at), level=level, **options)
    for number in after:
        assert resume(folder, folder / f"{number}.ckpt", **options) == (number, 2 * BATCHES - 1)


class Sharded(Noisy):
    """FSDP2; with dropout and a gradient that is kept over two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        for layer in (self.first, self.last, self):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self(batch).pow(2).mean()


def sharded(*, is_folder: bool) -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=is_folder)
