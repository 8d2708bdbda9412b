"""Trainings that are recorded, resumed from a checkpoint and verified."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from random_trainings import (
    Noisy,
    fit,
)
from trainers import LIGHTNING_ADVICE

from det_callbacks import (
    DeterminismCallback,
    NotResumableError,
)

RESUMING = [
    LIGHTNING_ADVICE,
    pytest.mark.filterwarnings("ignore:.*dataloader is not resumable"),  # Lightning's advice: a resume within an epoch
    # Lightning's advice: callbacks may differ
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings(r"ignore:`\.fit\(ckpt_path=None\)` was called without a model"),  # Lightning's
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available"),  # Lightning's: a first start
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork"),  # Python's, of processes that are forked here
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),  # Lightning's, of a batch that is no tensor
    pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument"),  # Lightning's, of a step that takes it
]


@pytest.fixture(autouse=True)
def environment_again() -> Iterator[None]:
    """What ``seed_everything`` sets."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def record(folder: Path, *others: pl.Callback, **options: Any) -> pl.Trainer:
    return fit(DeterminismCallback(folder / "run", mode="record", level="state"), *others, **options)


def resume(folder: Path, name: str | Path, *others: pl.Callback, how: str = "exact", **options: Any) -> Any:
    """Verify a resumed training against the recorded one; return the steps that were compared."""
    number = len(list(folder.glob("current-*")))
    callback = DeterminismCallback(folder / "run", current=folder / f"current-{number}", resume=how)
    fit(callback, *others, ckpt_path=folder / name, **options)
    assert callback.verdict is not None
    assert callback.verdict.verdict == "match"
    return callback.verdict.coverage.steps


def failing(step: int, base: type[Noisy] = Noisy) -> type[Noisy]:
    return type("Failing", (base,), {"fails_at": step})


class RaiseAt(pl.Callback):
    def __init__(self, hook: str, number: int) -> None:
        self.hook, self.number = hook, number
        setattr(self, hook, self.count)

    def count(self, trainer: pl.Trainer, *_: Any) -> None:
        done = trainer.fit_loop.epoch_loop.total_batch_idx + (self.hook != "on_train_batch_start")
        if done >= self.number:
            raise RuntimeError("planted")


def refused(folder: Path, name: str, *others: pl.Callback, **options: Any) -> tuple[str, ...]:
    with pytest.raises(NotResumableError, match='resume="warn"') as caught:
        resume(folder, name, *others, **options)
    assert caught.value.exit_code == 2
    return caught.value.problems
