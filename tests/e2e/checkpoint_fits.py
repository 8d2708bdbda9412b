"""Fits with digests beside their checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fits import Fit
from lightning.pytorch.callbacks import ModelCheckpoint
from trainers import LIGHTNING_ADVICE

from det_callbacks import (
    DeterminismCallback,
    check_checkpoint,
)

# what Lightning says of resuming without the callbacks that saved, into a folder that is there
RESUMING = [
    # a resumed training writes there again
    # a resumed training writes there again
    # a resumed training writes there again
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available"),
    LIGHTNING_ADVICE,
    pytest.mark.filterwarnings(r"ignore:`\.fit\(ckpt_path=None\)` was called without a model"),
]


def ours(folder: Path, **options: Any) -> DeterminismCallback:
    return DeterminismCallback(folder / "run", mode="record", level="state", overwrite=True, **options)


def fit(folder: Path, *callbacks: pl.Callback, **options: Any) -> Fit:
    return Fit(ours(folder), *callbacks, enable_checkpointing=True, default_root_dir=folder, **options)


def every(folder: Path, steps: int = 1, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "checkpoints", **{"every_n_train_steps": steps, **options})


def assert_all_agree(folder: Path, num_checkpoints: int, *, num_without_state: int = 0) -> None:
    """Every checkpoint is what was saved, has the state to resume from it, and nothing without one is left."""
    found = {path.name for path in folder.iterdir()}
    checkpoints = {name for name in found if name.endswith(".ckpt")}
    assert len(checkpoints) == num_checkpoints, found
    files = {name for name in checkpoints if not (folder / name).is_symlink()}
    sidecars = {f"{name}.digests.json" for name in files}
    states = {f"{name}.resume" for name in files}
    assert found - states == checkpoints | sidecars
    assert len(states - found) == num_without_state
    assert all(len(list((folder / name).iterdir())) == 1 for name in states & found)
    assert all(check_checkpoint(folder / name).equal for name in checkpoints)


def damage(path: str, change: Callable[[Any], object]) -> None:
    checkpoint = torch.load(path, weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, path)
