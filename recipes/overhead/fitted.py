"""The same training steps under Lightning's Trainer, alone and with DeterminismCallback."""

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from device import wait_for
from models import Workload
from torch.utils.data import IterableDataset

from det_callbacks import DeterminismCallback

WARM_UP = 3  # steps of each fit that do not count: a recording finds its program in the second


class Batches(IterableDataset):
    def __init__(self, workload: Workload, first: int, number: int) -> None:
        self._workload, self._numbers = workload, range(first, first + number)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Any]:
        return map(self._workload.batch, self._numbers)


class Module(pl.LightningModule):
    def __init__(self, workload: Workload, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.model = workload.model
        self._loss, self._optimizer = workload.loss, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer


class Clock(pl.Callback):
    """Takes the time from the end of the last step that does not count; it is the last callback."""

    start = 0.0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        wait_for(self._device)
        if batch_idx == WARM_UP - 1:
            self.start = time.perf_counter()
        self.end = time.perf_counter()


class Fitted:
    """Fits with DeterminismCallback at a level, or without it; each is a new run."""

    def __init__(
        self, workload: Workload, optimizer: torch.optim.Optimizer, level: str | None, folder: Path
    ) -> None:
        self._workload, self._level, self._folder = workload, level, folder
        self._module, self._numbers = Module(workload, optimizer), count()
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def warm_up(self, num_steps: int) -> None:
        self.seconds(0, num_steps, self._workload.device)

    def seconds(self, first: int, num_steps: int, device: torch.device) -> float:
        """Return how long a step takes."""
        clock = Clock(device)
        callbacks: list[pl.Callback] = [clock]
        if self._level is not None:
            run = self._folder / str(next(self._numbers))
            callbacks.insert(
                0, DeterminismCallback(run, mode="record", level=self._level, log_metrics=False)
            )
        quiet = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        kind = "cpu" if device.type == "cpu" else "gpu"
        with redirect_stdout(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice on how to train faster
            trainer = pl.Trainer(
                max_epochs=1, accelerator=kind, devices=1, callbacks=callbacks, **quiet
            )
            batches = Batches(self._workload, first - WARM_UP, WARM_UP + num_steps)
            trainer.fit(self._module, torch.utils.data.DataLoader(batches, batch_size=None))
        return (clock.end - clock.start) / num_steps
