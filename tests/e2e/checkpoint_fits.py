"""Fits with digests beside their checkpoints."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from fits import Fit
from lightning.pytorch.callbacks import ModelCheckpoint

from det_callbacks import DeterminismCallback, check_checkpoint


def ours(folder: Path, **options: Any) -> DeterminismCallback:
    return DeterminismCallback(folder / "run", mode="record", level="state", overwrite=True, **options)


def fit(folder: Path, *callbacks: pl.Callback, **options: Any) -> Fit:
    return Fit(ours(folder), *callbacks, enable_checkpointing=True, default_root_dir=folder, **options)


def every(folder: Path, steps: int = 1, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "checkpoints", **{"every_n_train_steps": steps, **options})


def save(folder: Path) -> Path:
    """Return the path of a checkpoint that a short fit saved."""
    done = fit(folder, max_epochs=1, limit_train_batches=3).run()
    done.trainer.save_checkpoint(folder / "x.ckpt")
    return folder / "x.ckpt"


def copy_of(saved: Path, folder: Path) -> Path:
    """Return a copy of a checkpoint and of what stands beside it, to be changed."""
    for suffix in ("", ".digests.json"):
        shutil.copy(f"{saved}{suffix}", folder / f"{saved.name}{suffix}")
    shutil.copytree(f"{saved}.resume", folder / f"{saved.name}.resume")
    return folder / saved.name


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


def damage(path: Path, change: Callable[[Any], object]) -> None:
    """Load a checkpoint, change it, and save it in its place."""
    checkpoint = torch.load(path, weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, path)
