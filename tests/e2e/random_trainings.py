"""Trainings in which everything is random: the order of the data, its augmentation, dropout and a noise of its own."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from trainers import quiet_trainer

from det_callbacks import DeterminismCallback

SAMPLES = 14
BATCHES = 7
"""Batches of an epoch, of two samples each."""


class Augmented(Dataset[Tensor]):
    """Rows that get noise from all global generators, or ("own") from one of the data set's, or none."""

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


class Endless(IterableDataset[Tensor]):
    """The same without a length, so that Lightning looks a batch ahead."""

    def __init__(self, noise: str = "global") -> None:
        self.data = Augmented(noise)

    def __iter__(self) -> Iterator[Tensor]:
        return (self.data[index] for index in range(SAMPLES))


class Noisy(pl.LightningModule):
    """Dropout, a generator of its own, a schedule, and random numbers in a hook."""

    fails_at: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm: nn.Module = nn.Identity()
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(8, 2)
        self.noise = torch.Generator().manual_seed(3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.dropout(self.norm(self.first(rows)).relu()))

    def training_step(self, batch: Any, index: int) -> Tensor:
        rows = batch["long"] + batch["short"][:1] if isinstance(batch, dict) else batch
        loss = self(rows).pow(2).mean() + torch.randn((), generator=self.noise) * self.first.weight.sum() / 100
        if self.trainer.fit_loop.epoch_loop.total_batch_idx == self.fails_at:
            raise RuntimeError("planted")
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self(batch)

    def on_train_epoch_start(self) -> None:
        torch.randn(3)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9), "interval": "step"}]


class Normed(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)


class Manual(Noisy):
    """Two optimizers, of which the second one adds up the gradients of two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:  # as Lightning has it
        body, head = self.optimizers()
        loss = super().training_step(batch, index)
        body.zero_grad()
        self.manual_backward(loss)
        body.step()
        if index % 2:
            head.step()
            head.zero_grad()

    def configure_optimizers(self) -> Any:
        head = torch.optim.SGD(self.last.parameters(), lr=1e-2, momentum=0.9)
        return torch.optim.AdamW([*self.first.parameters(), *self.norm.parameters()], lr=1e-2), head


class OneCycle(Noisy):
    """Asks for the number of steps, for which Lightning sets up the data before anything else of a fit."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Plateau(Noisy):
    """Lowers its learning rate at the end of every epoch."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.log("epoch", float(self.current_epoch), on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", patience=0, factor=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "epoch"}}


class Logging(Noisy):
    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Iterating(Noisy):
    """Draws its batches itself."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # as Lightning has it
        batch, _, _ = next(dataloader_iter)
        return self(batch).pow(2).mean()


def loader(noise: str = "global", **options: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(noise), **{"batch_size": 2, "shuffle": True, **options})


class SaveAfter(pl.Callback):
    """Saves ``<n>.ckpt`` when n batches were trained: at the end of the batch, or ("epoch") of the epoch."""

    def __init__(self, folder: Path, *after: int, at: str = "batch") -> None:
        self.folder = folder
        self.after = after
        self.at = at

    def save(self, trainer: pl.Trainer, at: str) -> None:
        number = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if at == self.at and number in self.after:
            trainer.save_checkpoint(self.folder / f"{number}.ckpt")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "batch")

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.save(trainer, "validation")

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "epoch")


def fit(
    callback: DeterminismCallback,
    *others: pl.Callback,
    model: Callable[[], pl.LightningModule] = Noisy,
    data: Callable[[], Any] = loader,
    validates: bool = False,
    seed: int = 1,
    ckpt_path: Path | None = None,
    **options: Any,
) -> pl.Trainer:
    """Train from a seed, three epochs by default."""
    pl.seed_everything(seed, workers=True, verbose=False)
    options = {"max_epochs": 3, "num_sanity_val_steps": 1, **options}
    options["enable_checkpointing"] = any(isinstance(other, Checkpoint) for other in others)
    trainer = quiet_trainer(callback, *others, **options)
    validation = DataLoader(Augmented(num_samples=4), batch_size=2) if validates else None
    trainer.fit(model(), data(), validation, ckpt_path=ckpt_path)
    return trainer
