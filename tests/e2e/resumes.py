"""Trainings in which everything is random, that are recorded, stopped,
resumed from a checkpoint and verified.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback, NotResumableError

RESUMING = [
    LIGHTNING_ADVICE,
    pytest.mark.usefixtures("environment_again"),  # seeds of Lightning
    # more advice: callbacks, folders, the last model
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    # Python's, of processes that are forked here
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork"),
]
SAMPLES = 14
BATCHES = 7
"""Batches of an epoch, of two samples each."""


class Augmented(Dataset[Tensor]):
    """Rows that get noise from all global generators, or ("own") from one
    of the data set's, or none.
    """

    def __init__(self, noise: str = "global", num_samples: int = SAMPLES) -> None:
        self.rows = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(0))
        self.noise = noise
        self.rng = np.random.default_rng(5)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        row = self.rows[index]
        if self.noise == "global":
            row = row + torch.randn(4) + random.gauss(0, 1) + np.random.randn()
        if self.noise == "own":
            row = row + float(self.rng.normal())
        return row.float()


def loader(noise: str = "global", **options: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(noise), **{"batch_size": 2, "shuffle": True, **options})


class Noisy(pl.LightningModule):
    """Dropout, a generator of its own, a schedule, and random numbers in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(8, 2)
        self.noise = torch.Generator().manual_seed(3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.dropout(self.norm(self.first(rows)).relu()))

    def training_step(self, batch: Any, index: int) -> Tensor:
        return (
            self(batch).pow(2).mean()
            + torch.randn((), generator=self.noise) * self.first.weight.sum() / 100
        )

    def validation_step(self, batch: Tensor, index: int) -> None:
        self(batch)

    def on_fit_start(self) -> None:
        for _ in range(self.global_rank + 5 * bool(self.trainer.ckpt_path)):
            torch.rand(()), random.random(), np.random.rand()

    def on_train_epoch_start(self) -> None:
        torch.randn(3)

    def configure_optimizers(self) -> Any:
        # Lightning sets up the data for it, before all else of a fit
        _ = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9), "interval": "step"}
        ]


def noisy(**methods: Callable[..., Any]) -> type[Noisy]:
    return type("Noisy", (Noisy,), methods)


class Manual(Noisy):
    """Two optimizers, of which the second one adds up the gradients of two batches."""

    automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:  # as Lightning has it
        body, head = self.optimizers()
        self.manual_backward(super().training_step(batch, index))
        for optimizer in (body, head) if index % 2 else (body,):
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        head = torch.optim.SGD(self.last.parameters(), lr=1e-2, momentum=0.9)
        return torch.optim.AdamW([*self.first.parameters(), *self.norm.parameters()], lr=1e-2), head


class SaveAfter(pl.Callback):
    """Saves ``<n>.ckpt`` in a hook when n batches were trained.

    Other ranks than the first are told another path, as where a metric in a file's
    name is another one on each.
    """

    def __init__(self, folder: Path, *after: int, at: str = "train_batch_end") -> None:
        self.folder, self.after = folder, after
        setattr(self, f"on_{at}", self.save)

    def save(self, trainer: pl.Trainer, *_: Any) -> None:
        number = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if number in self.after and not trainer.sanity_checking:
            folder = self.folder if trainer.is_global_zero else self.folder / "elsewhere"
            trainer.save_checkpoint(folder / f"{number}.ckpt")


def fit(
    *callbacks: pl.Callback, model: Any = Noisy, data: Any = loader, **options: Any
) -> pl.Trainer:
    pl.seed_everything(1, workers=True, verbose=False)
    ckpt_path, validates = options.pop("ckpt_path", None), options.pop("validates", False)
    trainer = quiet_trainer(*callbacks, **{"max_epochs": 2, "num_sanity_val_steps": 1, **options})
    validation = DataLoader(Augmented(num_samples=4), batch_size=2) if validates else None
    trainer.fit(model(), data(), validation, ckpt_path=ckpt_path)
    return trainer


def record(
    folder: Path, *others: pl.Callback, level: Any = "state", how: Any = "exact", **options: Any
) -> pl.Trainer:
    callback = DeterminismCallback(folder / "run", mode="record", level=level, resume=how)
    return fit(callback, *others, **options)


def resume(
    folder: Path, name: str, *others: pl.Callback, how: Any = "exact", **options: Any
) -> Any:
    current = folder / f"current-{name.removesuffix('.ckpt').replace('/', '-')}"
    callback = DeterminismCallback(folder / "run", current=current, resume=how)
    fit(callback, *others, ckpt_path=folder / name, **options)
    assert callback.verdict.verdict == "match"
    return callback.verdict.coverage.steps


def refused(folder: Path, name: str, *others: pl.Callback, **options: Any) -> str:
    with pytest.raises(NotResumableError, match='resume="plain"') as caught:
        resume(folder, name, *others, **options)
    (problem,) = caught.value.problems
    return problem
