"""Trainings without randomness that are stopped and gone on with: Lightning resumes them exactly by itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from fits import Fit, Steady
from lightning.pytorch.callbacks import EMAWeightAveraging
from styles import Samples
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from det_callbacks import DeterminismCallback

BATCHES = 4
"""Steps of an epoch of the samples."""


class Momentum(Steady):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Scheduled(Steady):
    """A schedule by step and, in the other optimizer's place, none."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class TwoOptimizers(Steady):
    """Manual optimization; the second optimizer updates every other step only."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        body, head = self.optimizers()
        body.zero_grad()
        head.zero_grad()
        self.manual_backward(cross_entropy(self(inputs), labels))
        body.step()
        if batch_idx % 2:
            head.step()

    def configure_optimizers(self) -> Any:
        body = torch.optim.AdamW([*self.first.parameters(), *self.norm.parameters()], lr=1e-2)
        return body, torch.optim.SGD(self.last.parameters(), lr=1e-2, momentum=0.9)


class Foreach(Steady):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=True)


class Fused(Steady):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


STYLES: dict[str, tuple[type[Steady], dict[str, Any], Callable[[], list[pl.Callback]]]] = {
    "momentum": (Momentum, {}, list),
    "adamw": (Steady, {}, list),
    "foreach": (Foreach, {}, list),
    "fused": (Fused, {}, list),
    "two_optimizers": (TwoOptimizers, {}, list),
    "accumulation": (Steady, {"accumulate_grad_batches": 3}, list),
    "scheduler": (Scheduled, {}, list),
    "bf16_mixed": (Steady, {"precision": "bf16-mixed"}, list),
    "clipping": (Momentum, {"gradient_clip_val": 0.1}, list),
    "ema": (Steady, {}, lambda: [EMAWeightAveraging(decay=0.9)]),
}


class Checkpoints(pl.Callback):
    """Saves ``<step>.ckpt`` at each epoch's end, or after the steps that are named: so many are done."""

    def __init__(self, folder: Path, *after: int) -> None:
        self.folder = folder
        self.after = after

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 in self.after:
            self.save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self.after:
            self.save(trainer)

    def save(self, trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.fit_loop.epoch_loop.total_batch_idx + 1}.ckpt")


class Stateful(DataLoader[Any]):
    """A loader that goes on where its state says; Lightning saves that in mid-epoch checkpoints."""

    def __init__(self) -> None:
        super().__init__(Samples(), batch_size=8, generator=torch.Generator())
        self.position = self.start = 0

    def __iter__(self) -> Any:
        start, self.start = self.start, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= start:
                self.position = number + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position % BATCHES}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"]


def fit(
    callback: DeterminismCallback | None,
    *others: pl.Callback,
    model: Callable[[], Any] = Steady,
    ckpt_path: Path | None = None,
    loader: DataLoader[Any] | None = None,
    **options: Any,
) -> Fit:
    """Train, for two epochs unless the options say otherwise, from the start or from a checkpoint."""
    callbacks = [*others] if callback is None else [callback, *others]
    fitting = Fit(*callbacks, model=model, **{"max_epochs": 2, **options})
    if loader is not None:
        fitting.loader = loader
    return fitting.run(ckpt_path=None if ckpt_path is None else str(ckpt_path))
