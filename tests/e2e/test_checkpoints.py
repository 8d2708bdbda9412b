"""Each checkpoint that a Trainer saves gets digests; one that is damaged, or another,
is refused when it is loaded.
"""

import itertools
import json
import os
import random
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from fits import Fit, Plain, RaiseAt, StopError
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from resumes import RESUMING

from det_callbacks import (
    CheckpointFormatError,
    CheckpointMismatchError,
    DeterminismCallback,
    check_checkpoint,
)

pytestmark = RESUMING


def ours(folder: Path, **options: Any) -> DeterminismCallback:
    return DeterminismCallback(
        folder / "run", mode="record", level="state", overwrite=True, **options
    )


def fit(folder: Path, *callbacks: pl.Callback, **options: Any) -> Fit:
    return Fit(
        ours(folder), *callbacks, enable_checkpointing=True, default_root_dir=folder, **options
    )


def every(folder: Path | str, steps: int = 1, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(f"{folder}/checkpoints", every_n_train_steps=steps, **options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint, to be changed."""
    path = tmp_path / "copy" / "x.ckpt"
    fit(tmp_path, max_epochs=1, limit_train_batches=3).run().trainer.save_checkpoint(path)
    return path


def assert_all_agree(folder: Path, num_checkpoints: int, *, num_without_state: int = 0) -> None:
    """Every checkpoint is what was saved, has the state to resume from it,
    and nothing without one is left.
    """
    checkpoints = set(folder.glob("*.ckpt"))
    files = {path for path in checkpoints if not path.is_symlink()}
    states = {Path(f"{path}.resume") for path in files}
    found = set(folder.iterdir())
    assert found - states == checkpoints | {Path(f"{path}.digests.json") for path in files}
    assert (len(checkpoints), len(states - found)) == (num_checkpoints, num_without_state), found
    assert all(len(list(path.iterdir())) == 1 for path in states & found)
    assert all(check_checkpoint(path).equal for path in checkpoints)


@pytest.mark.parametrize("save_last", [True, "link"])
def test_deletion_of_all_but_the_best_leaves_nothing(save_last, tmp_path):
    keeping = every(tmp_path, monitor="step", mode="max", save_top_k=2, save_last=save_last)
    fit(tmp_path, keeping, max_epochs=2).run()
    assert_all_agree(tmp_path / "checkpoints", 3)
    last = check_checkpoint(keeping.last_model_path).sidecar
    assert (last.step, last.epoch) == (7, 1)
    plain = Fit(every(tmp_path, 100, save_last=save_last), enable_checkpointing=True, max_epochs=3)
    plain.run(ckpt_path="last")  # without us
    assert plain.trainer.ckpt_path == str(tmp_path / "checkpoints" / "last.ckpt")
    assert plain.trainer.global_step == 12


def test_saved_by_hand_in_a_fit_and_after_another_stage(tmp_path):
    folder = tmp_path / "c"
    saving = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: trainer.save_checkpoint(folder / "during.ckpt")
    )
    done = fit(tmp_path, saving, max_epochs=1).run()
    done.trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    done.model.test_step = lambda *_: None
    done.trainer.test(done.model, done.loader, verbose=False)
    done.trainer.save_checkpoint(folder / "tested.ckpt")
    assert_all_agree(folder, 3, num_without_state=1)
    assert "optimizer_states" not in check_checkpoint(folder / "weights.ckpt").sections
    sidecar = json.loads((folder / "during.ckpt.digests.json").read_text())
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert sidecar["run"] == {
        "id": run["run_id"],
        "mode": "record",
        "reference": str(tmp_path / "run"),
    }
    assert sidecar["parameters"]["0/state/0"] == "first.weight"


def test_a_checkpoint_of_an_exception_has_digests(tmp_path):
    folder = tmp_path / "checkpoints"
    with pytest.raises(StopError):
        fit(
            tmp_path,
            OnExceptionCheckpoint(folder),
            RaiseAt("on_train_batch_start", StopError("stop")),
        ).run()
    assert_all_agree(folder, 1)
    (path,) = folder.glob("*.ckpt")
    assert check_checkpoint(path).sidecar.step == 1
    # its teardown, after ours, takes the checkpoint away
    again = Fit(
        ours(tmp_path, resume="plain"), OnExceptionCheckpoint(folder), enable_checkpointing=True
    )
    again.run(ckpt_path=str(path))
    assert os.listdir(folder) == []


# not there when it returns
LATE = type("Late", (TorchCheckpointIO,), {"save_checkpoint": lambda *_, **__: None})


@pytest.mark.parametrize("io", [TorchCheckpointIO, LATE, AsyncCheckpointIO])
def test_a_remote_or_later_checkpoint_gets_no_digests_and_a_line(io, tmp_path, capsys):
    is_remote = io is TorchCheckpointIO
    keeping = every("memory://remote" if is_remote else tmp_path, save_top_k=-1)
    fit(tmp_path, keeping, plugins=[io()]).run()
    assert capsys.readouterr().out.count("gets no digests and no exact resume") == 1
    assert not list(tmp_path.rglob("*.digests.json"))
    if is_remote:
        Fit(ours(tmp_path), max_epochs=2).run(ckpt_path=keeping.best_model_path)
        out = capsys.readouterr().out
        assert "was loaded unchecked: it has no digests" in out
        assert "is resumed by Lightning alone" in out
        fsspec.filesystem("memory").rm("/remote", recursive=True)


# as Python's audit calls them, whoever asks for it
DISK_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")


def save_killed(trainer: pl.Trainer, path: Path, at: int) -> bool:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 99
    count = itertools.count()
    sys.addaudithook(
        lambda event, _: os._exit(99) if event in DISK_CHANGES and next(count) == at else None
    )
    try:
        trainer.save_checkpoint(path)
    finally:
        os._exit(0)


def test_a_kill_at_any_change_leaves_digests_that_agree_or_none(tmp_path, capsys):
    trainer = fit(tmp_path, max_epochs=1).run().trainer
    path, has_digests, was_killed = tmp_path / "c" / "last.ckpt", list[bool](), True
    while was_killed and len(has_digests) < 50:
        trainer.save_checkpoint(path)
        was_killed = save_killed(trainer, path, at=len(has_digests))
        has_digests.append(Path(f"{path}.digests.json").exists())
        assert not has_digests[-1] or check_checkpoint(path).equal
    assert 4 < len(has_digests) < 50
    assert has_digests == [True, *[False] * (len(has_digests) - 2), True]
    path.with_name("last.ckpt.digests.json").unlink()
    Fit(ours(tmp_path), max_epochs=2).run(ckpt_path=str(path))  # a preempted job goes on
    assert "was loaded unchecked" in capsys.readouterr().out


def test_no_flipped_bit_and_no_truncation_passes(path):
    content, draw, found = path.read_bytes(), random.Random(0), Counter[str]()
    for _ in range(200):
        flipped = bytearray(content)
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        try:
            report = check_checkpoint(path)
        except CheckpointFormatError:
            found["refused"] += 1
        else:
            assert report.exit_code == 1
            found["named"] += bool(report.entries)
    assert found["named"] > 20  # of bits in tensors
    assert found["refused"] > 20  # of bits in what holds the file together
    for length in [0, 1, 3, 4, 100, len(content) - 1, *draw.sample(range(len(content)), 20)]:
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointFormatError, match="so it is truncated"):
            check_checkpoint(path)
    with pytest.raises(CheckpointFormatError, match="so it is truncated"):
        Fit(ours(path.parent), max_epochs=2).run(ckpt_path=str(path))


def exchange(state: Any) -> None:
    state["norm.weight"], state["first.bias"] = state["first.bias"], state["norm.weight"]


CHANGES = [
    (lambda one: one["state_dict"]["last.weight"][0].add_(1), r"state_dict: last\.weight differs"),
    (lambda one: exchange(one["state_dict"]), r"first\.bias differs[\s\S]*norm\.weight differs"),
    (lambda one: one["state_dict"].update(more=torch.ones(1)), "state_dict: more is new"),
    (
        lambda one: one.pop("optimizer_states"),
        r"0/state/0/step \(step of first\.weight\) is missing",
    ),
    (
        lambda one: one["optimizer_states"][0]["param_groups"][0].update(lr=0.5),
        "0/param_groups/0/lr differs",
    ),
]


def assert_refused(path: Path, message: str, stage: str = "fit") -> None:
    made = Fit(ours(path.parent), model=Plain, max_epochs=2)
    made.model.validation_step = made.model.test_step = made.model.predict_step = lambda *_: None
    with pytest.raises(CheckpointMismatchError, match=message) as caught:
        getattr(made.trainer, stage)(made.model, made.loader, ckpt_path=str(path))
    assert (caught.value.exit_code, caught.value.path, made.trainer.global_step) == (
        1,
        str(path),
        0,
    )
    assert not check_checkpoint(path).equal


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_changed_checkpoint_is_refused_before_a_step(change, message, path):
    checkpoint = torch.load(path, weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, path)
    assert_refused(path, message)


def test_it_is_compared_in_every_stage_and_with_its_own_digests(path, tmp_path):
    content = path.read_bytes()
    path.write_bytes(content + b"\0")
    for stage in ("fit", "validate", "test", "predict"):
        assert_refused(path, "x.ckpt is not the file that was saved: its bytes differ", stage)
    path.write_bytes(content)
    fit(tmp_path, max_epochs=1).run().trainer.save_checkpoint(tmp_path / "other.ckpt")
    shutil.copy(tmp_path / "other.ckpt.digests.json", f"{path}.digests.json")
    assert_refused(path, "x.ckpt does not match what was saved")
