"""Trainings that log metrics, one callback's use of a process, and what two comparisons of one run have to agree in."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from styles import Classifier, Samples
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset
from trainers import quiet_trainer

from det_callbacks import DeterminismCallback, compare_runs
from det_callbacks.verdict import Verdict


class Changed(Samples):
    """Samples of which one is another."""

    index = 0

    def __getitem__(self, index: int) -> Any:
        inputs, label = super().__getitem__(index)
        return (inputs + 1 if index == self.index else inputs), label


class LateChanged(Changed):
    index = 9


class Logged(Classifier):
    """Logs in training, validation and test."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def _look(self, name: str, batch: Any) -> None:
        inputs, labels = batch
        predicted = self(inputs)
        loss = cross_entropy(predicted, labels)
        self.log_dict({f"{name}/loss": loss, f"{name}/largest": predicted.max()})

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._look("val", batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._look("test", batch)


class Draws(Logged):
    """Draws from torch's generator in the validation after step 5, of which a metric shows what came."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        is_due = self.trainer.fit_loop.epoch_loop.total_batch_idx == 5 and not self.trainer.sanity_checking
        self.log("val/drawn", torch.rand(()) if is_due else torch.zeros(()))


class Timed(Logged):
    """Logs a wall clock."""

    def on_train_epoch_end(self) -> None:
        self.log("epoch_time", time.perf_counter())


class Also(Logged):
    """Logs one metric more in its second epoch."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch:
            self.log("also", 1.0)


class Rounds(Logged):
    """Computes a validation's loss otherwise, on the same data with the same weights."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        inputs, labels = batch
        self.log_dict({"val/loss": cross_entropy(self(inputs), labels) + 1e-3, "val/largest": self(inputs).max()})


class Silent(Classifier):
    """Logs nothing."""

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def test_step(self, batch: Any, batch_idx: int) -> None: ...


def loader(kind: type[Samples] = Samples, num_samples: int = 12) -> DataLoader[Any]:
    return DataLoader(Subset(kind(), range(num_samples)), 4, generator=torch.Generator())  # draws from no other


class Session:
    """One process's use of one callback: fits, tests and so on, with one model."""

    def __init__(
        self, mode: str, reference: Path, *, model: Callable[[], Any] = Logged, seed: int = 0, **arguments: Any
    ) -> None:
        torch.manual_seed(seed)
        defaults = {"level": "state"} if mode == "record" else {}
        self.callback = DeterminismCallback(reference, mode=mode, **{**defaults, **arguments})
        self.model = model()
        self.root = reference.parent

    def trainer(self, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
        given = {"max_epochs": 2, "num_sanity_val_steps": 1, "default_root_dir": self.root, **options}
        return quiet_trainer(self.callback, *callbacks, **given)

    def fit(self, validation: Any = None, *callbacks: pl.Callback, **options: Any) -> "Session":
        fit = {name: options.pop(name) for name in ("ckpt_path", "weights_only") if name in options}
        data = loader() if validation is None else validation
        self.trainer(*callbacks, **options).fit(self.model, loader(), data, **fit)
        return self

    def test(self, data: Any = None, **options: Any) -> "Session":
        self.trainer(**options).test(self.model, loader() if data is None else data, verbose=False)
        return self

    def validate(self, data: Any = None) -> "Session":
        self.trainer().validate(self.model, loader() if data is None else data, verbose=False)
        return self


def verdict_of(session: Session) -> Verdict:
    assert session.callback.verdict is not None
    return session.callback.verdict


def record(folder: Path, *args: Any, **options: Any) -> Path:
    Session("record", folder, **options).fit(*args)
    return folder


def assert_diff_agrees(reference: Path, verdict: Verdict) -> None:
    """What a verification found is what two recordings, or its folder, are said to be."""
    again = compare_runs(reference, verdict.current)
    assert (again.verdict, again.cause, again.first_divergence) == (
        verdict.verdict,
        verdict.cause,
        verdict.first_divergence,
    )
