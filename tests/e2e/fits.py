"""Fits that can be repeated, resumed and made to fail at a chosen place."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from styles import Classifier, Samples
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.flop_counter import FlopCounterMode
from trainers import quiet_trainer

from det_callbacks import DeterminismCallback
from det_callbacks.callback.session import Session


class StopError(Exception):
    """What a test raises."""


class Plain(Classifier):
    """Of nothing but ops that other modes leave as they are."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(inputs)))


class Steady(Classifier):
    """Without random draws, so that a resumed run has the bits of an uninterrupted one."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(inputs))))


class RaiseAt(pl.Callback):
    """Raises at the third call of one hook."""

    def __init__(self, hook: str, error: BaseException, *, call: int = 3) -> None:
        self.num_calls = 0

        def raise_it(*_: Any, **__: Any) -> None:
            self.num_calls += 1
            if self.num_calls == call:
                raise error

        setattr(self, hook, raise_it)


class RaiseInside(Classifier):
    """Raises in the third training step, at a place that a test chooses."""

    place = "nowhere"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        is_due = self.global_step == 2
        hidden = self.first(inputs)
        if is_due and self.place == "backward":
            hidden.register_hook(stop_backward)
        if is_due and self.place == "in a mode":
            with FlopCounterMode(display=False):
                raise StopError("in a mode")
        return cross_entropy(self.last(hidden), labels)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.place == "optimizer":
            optimizer.register_step_post_hook(self.stop_in_optimizer)
        return optimizer

    def stop_in_optimizer(self, *_: Any) -> None:
        if self.trainer.fit_loop.epoch_loop.total_batch_idx == 2:
            raise StopError("optimizer")


def stop_backward(gradient: torch.Tensor) -> None:
    raise StopError("backward")


def raising_inside(place: str) -> Callable[[], pl.LightningModule]:
    def make() -> pl.LightningModule:
        model = RaiseInside()
        model.place = place
        return model

    return make


class Fit:
    """One Trainer, one model and one loader, so that a test can fit more than once."""

    def __init__(self, *callbacks: pl.Callback, model: Callable[[], Any] = Classifier, **options: Any) -> None:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(11)
        self.model = model()
        self.trainer = quiet_trainer(*callbacks, **options)
        # a generator of its own: a loader draws from the global one at each epoch's start otherwise
        self.loader = DataLoader(Samples(), batch_size=8, generator=torch.Generator())

    def run(self, **options: Any) -> "Fit":
        self.trainer.fit(self.model, self.loader, **options)
        return self

    def again(self, *, epochs: int) -> "Fit":
        self.trainer.fit_loop.max_epochs = epochs
        return self.run()


def record(folder: Path, **options: Any) -> Path:
    Fit(DeterminismCallback(folder, mode="record"), **options).run()
    return folder


def assert_nothing_left(fit: Fit, callback: DeterminismCallback) -> None:
    """Nothing that a fit needs is there after it; what is global is watched for every test by the conftest."""
    assert _get_current_dispatch_mode_stack() == []
    assert "training_step" not in vars(fit.trainer.strategy)
    assert type(callback._hooks) is Session
    loop = fit.trainer.fit_loop
    assert "_load_combined_loader_states" not in vars(loop)
    assert not {"reset", "setup_data"} & set(vars(loop))
    assert "on_run_start" not in vars(loop.epoch_loop)
    assert not {"log", "reset"} & set(vars(loop.epoch_loop._results))
    assert type(loop._combined_loader) in (CombinedLoader, type(None))
    assert type(fit.loader.batch_sampler) is BatchSampler
    writer = getattr(callback._session.run, "_writer", callback._session.run)  # a verification has one
    assert writer is None or writer._file is None
