"""A training, and the ways in which people make two of them differ."""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from trainers import quiet_trainer

from det_callbacks import DeterminismCallback
from det_callbacks.errors import DivergenceError, NotComparableError
from det_callbacks.verdict import Verdict

BATCH = 16
SAMPLES = 96
STEPS = 9
"""One epoch and a half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a training is made of; the fields are what can be got wrong."""

    seed: int = 0
    is_seeded_late: bool = False
    shuffle_seed: int | None = 1
    listing: str = "sorted"
    num_samples: int = SAMPLES
    batch_size: int = BATCH
    augment: str = "none"
    num_workers: int = 0
    draws_in_validation: bool = False
    callbacks: tuple[Callable[[], pl.Callback], ...] = ()
    first_callbacks: tuple[Callable[[], pl.Callback], ...] = ()
    logs: bool = False
    skips: bool = False
    changes_in_step: int | None = None
    every_n_steps: int = 1
    dropout_seed: int | None = None
    change_weight: str = ""
    scheduler: bool = False
    trainer: dict[str, Any] = field(default_factory=dict)
    level: str = "op"

    @mock.patch.dict(os.environ)  # in which seed_everything leaves something
    def fit(self, mode: str, reference: Path, **arguments: Any) -> None:
        """Train once, with the callback in a mode."""
        torch.seed() if self.is_seeded_late else pl.seed_everything(self.seed, verbose=False)
        module = Module(self)
        if self.is_seeded_late:
            pl.seed_everything(self.seed, verbose=False)
        if self.change_weight:
            with torch.no_grad():
                module.get_parameter(self.change_weight).add_(1e-3)
        callback = DeterminismCallback(reference, mode=mode, **arguments)
        options = {"max_steps": STEPS, "max_epochs": None, "val_check_interval": 3, "num_sanity_val_steps": 0}
        callbacks = (*(make() for make in self.first_callbacks), callback, *(make() for make in self.callbacks))
        trainer = quiet_trainer(*callbacks, default_root_dir=reference.parent, **{**options, **self.trainer})
        trainer.fit(module, *self.loaders())

    def record(self, reference: Path) -> Path:
        self.fit("record", reference, level=self.level, every_n_steps=self.every_n_steps)
        return reference

    def verify(self, reference: Path, **options: Any) -> Verdict:
        """Compare it with a reference, which it is not, and return the verdict."""
        with pytest.raises((DivergenceError, NotComparableError)) as caught:
            self.fit("verify", reference, on_divergence="collect", **options)
        return caught.value.verdict

    def loaders(self) -> tuple[DataLoader[Any], DataLoader[Any]]:
        data = Listed(self)
        generator = None if self.shuffle_seed is None else torch.Generator().manual_seed(self.shuffle_seed)
        train = DataLoader(data, self.batch_size, shuffle=True, generator=generator, num_workers=self.num_workers)
        return train, DataLoader(Listed(replace(self, augment="none")), 2 * BATCH)


class Listed(Dataset[tuple[Tensor, Tensor]]):
    """Samples that lie behind a listing, as files do behind the names in a folder."""

    def __init__(self, training: Training) -> None:
        self.inputs = torch.randn(SAMPLES, 1, 8, 8, generator=torch.Generator().manual_seed(3))
        self.numbers = [*range(training.num_samples)]
        if training.listing == "unsorted":
            random.Random(5).shuffle(self.numbers)
        self.augment = training.augment

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number = self.numbers[index]
        inputs = self.inputs[number]
        if self.augment != "none":
            generator = None
            if self.augment == "unseeded" and torch.utils.data.get_worker_info() is not None:
                generator = torch.Generator()
                generator.seed()
            inputs = inputs + 0.1 * torch.rand(inputs.shape, generator=generator)
        return inputs, torch.tensor(number % 10)


class Module(pl.LightningModule):
    def __init__(self, training: Training) -> None:
        super().__init__()
        self.made_of = training
        layers = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1)
        self.net = nn.Sequential(*layers, nn.Linear(256, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        made_of = self.made_of
        if made_of.skips and batch_idx == 2:
            return None
        if self.global_step == made_of.changes_in_step:
            with torch.no_grad():
                self.net[-1].bias += 1e-3
        if made_of.dropout_seed is not None and batch_idx == 2:
            torch.manual_seed(made_of.dropout_seed)
        loss = cross_entropy(self.net(batch[0]), batch[1])
        if made_of.logs:
            self.log("loss", loss, on_epoch=True, logger=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])
        if self.made_of.draws_in_validation:
            torch.rand(3)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return ([optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]) if self.made_of.scheduler else optimizer
