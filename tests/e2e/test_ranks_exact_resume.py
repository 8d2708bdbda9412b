"""Several processes: a resumed training is the training that was interrupted, on every rank."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from processes import Ended, run_ranks
from random_trainings import SaveAfter
from ranks_resumes import Sharded, Wide, data, record, resume, round_trip, sharded
from torch import Tensor
from trainers import quiet_trainer

from det_callbacks import CheckpointNotFoundError, check_checkpoint, prove_resume
from det_callbacks.judge import compare_runs
from det_callbacks.runs.store import Run

pytestmark = pytest.mark.ddp

SLOW = 240.0
"""Seconds that several trainings may take on a busy machine."""


def succeed(ended: list[Ended]) -> None:
    assert all(one.exit_code == 0 for one in ended), "\n----\n".join(one.output for one in ended)


class KillAt(pl.Callback):
    """Ends each process without a word, in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.step:
            trainer.strategy.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_recording_that_was_killed_goes_on_and_is_the_uninterrupted_one(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = {"accumulate_grad_batches": 2, "validates": True, "val_check_interval": 3}
    succeed(run_ranks(lambda rank: record(whole, **options), whole))
    others = SaveAfter(killed, 3, 5), KillAt(6)
    ended = run_ranks(lambda rank: record(killed, *others, **options), killed)
    assert [one.exit_code for one in ended] == [-9, -9]

    def go_on(rank: int) -> None:
        # the first of the two lies before a validation; both within a window of accumulated gradients
        assert resume(whole, killed / "3.ckpt", **options) == (3, 13)
        record(killed, ckpt_path=killed / "5.ckpt", seed=50, **options)

    succeed(run_ranks(go_on, killed))
    run = Run.open(killed / "run")
    assert run.is_complete
    for rank in (0, 1):
        assert (killed / "run" / f"rank-{rank:05d}" / "attempt-001.arrows").exists()
        assert run.rank(rank).steps(0).tolist() == [*range(14)]
    verdict = compare_runs(whole / "run", killed / "run")
    assert (verdict.verdict, verdict.coverage.ranks) == ("match", 2)


TRAININGS: dict[str, dict[str, Any]] = {
    # the first two steps are those in which DDP has one bucket, and is about to make others
    "batches": {"after": (1, 2, 3, 7, 10)},
    "validation": {"after": (2, 4, 6), "validates": True, "val_check_interval": 2},
    "accumulation": {"after": (1, 2, 3, 5, 6), "accumulate_grad_batches": 2},
    "workers": {"after": (3, 8), "data": lambda: data(num_workers=2)},
    "end_of_epoch": {"after": (7,), "at": "epoch", "validates": True},
    "unused": {"after": (3,), "strategy": "ddp_find_unused_parameters_true"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_from_wherever_it_was_saved(name: str, tmp_path: Path) -> None:
    succeed(run_ranks(lambda rank: round_trip(tmp_path, **TRAININGS[name]), tmp_path / "output", seconds=SLOW))


@pytest.mark.slow
def test_three_ranks_add_their_gradients_up_in_the_same_order(tmp_path: Path) -> None:
    """Of two ranks a sum has the same bits in any order; of three it has not."""
    trip = partial(round_trip, tmp_path, after=(1, 4, 8), num_ranks=3, level="state")
    succeed(run_ranks(lambda rank: trip(), tmp_path / "output", world_size=3, seconds=SLOW))


@pytest.mark.slow
@pytest.mark.parametrize("is_folder", [True, False])
def test_sharded_weights(is_folder: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": Sharded, "accumulate_grad_batches": 2}

    def body(rank: int) -> None:
        # a strategy serves one Trainer
        record(tmp_path, SaveAfter(tmp_path, 2, 3, 7), strategy=sharded(is_folder=is_folder), **options)
        for after in (2, 3, 7):
            strategy = sharded(is_folder=is_folder)
            assert resume(tmp_path, tmp_path / f"{after}.ckpt", strategy=strategy, **options) == (after, 13)

    succeed(run_ranks(body, tmp_path / "output", seconds=SLOW))
    assert (tmp_path / "3.ckpt").is_dir() == is_folder
    assert check_checkpoint(tmp_path / "3.ckpt").equal


class Scored(Wide):
    """Logs a value that is another one on each rank, so that the names of checkpoints are."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.log("score", float(self.global_rank) - self.trainer.global_step)
        return loss


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_that_lightning_names_links_and_removes(asynchronous: bool, tmp_path: Path) -> None:
    def keeping() -> ModelCheckpoint:
        name = "{step}-{score:.1f}"
        return ModelCheckpoint(
            tmp_path, filename=name, monitor="score", save_top_k=2, every_n_train_steps=4, save_last="link"
        )

    def body(rank: int) -> None:
        plugins = [AsyncCheckpointIO()] if asynchronous else []
        record(tmp_path, keeping(), model=Scored, plugins=plugins)
        (path,) = tmp_path.glob("step=8-*.ckpt")
        for name in (path, tmp_path / "last.ckpt"):
            resume(tmp_path, name, keeping(), model=Scored, enable_checkpointing=True)

    succeed(run_ranks(body, tmp_path / "output", seconds=SLOW))
    kept = {path.name for path in tmp_path.glob("*.ckpt") if not path.is_symlink()}
    assert "step=4-score=-3.0.ckpt" not in kept
    assert {path.name for path in tmp_path.glob("*.resume")} == {f"{name}.resume" for name in kept}
    for name in kept:
        assert check_checkpoint(tmp_path / name).equal


@pytest.mark.slow
def test_the_proof(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        make = partial(quiet_trainer, max_epochs=3, default_root_dir=tmp_path, devices=2, strategy="ddp")
        for how, stop_at, expected in (("exact", 4, "match"), ("exact", 7, "match"), ("plain", 4, "diverged")):
            verdict = prove_resume(make, Wide, data, stop_at=stop_at, steps=12, resume=how)
            assert (verdict.verdict, verdict.coverage.ranks) == (expected, 2), verdict.explanation
            if how == "exact":
                assert verdict.coverage.steps == (stop_at, 11)

    ended = run_ranks(body, tmp_path / "output", seconds=SLOW)
    succeed(ended)
    assert not any("TrainingInterruptedError: . Rank" in one.output for one in ended)
    assert len(list((tmp_path / "determinism").iterdir())) == 3


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_kill_between_two_ranks_leaves_a_checkpoint_without_digests(
    killed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SaveTwice(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            step = trainer.fit_loop.epoch_loop.total_batch_idx
            if step == 4 and trainer.global_rank == killed:  # which has not written what it keeps yet
                monkeypatch.setattr("det_callbacks.resume.session.write_part", lambda *_, **__: os._exit(9))
            if step in (2, 4):
                trainer.save_checkpoint(tmp_path / "last.ckpt")

    ended = run_ranks(lambda rank: record(tmp_path / "killed", SaveTwice(), level="state"), tmp_path / "output")
    assert ended[killed].exit_code == 9
    assert ended[1 - killed].exit_code != 0
    path = tmp_path / "last.ckpt"
    with pytest.raises(CheckpointNotFoundError, match="nothing to compare"):
        check_checkpoint(path)
    # the checkpoint before, since the save waits for all ranks: a preempted job goes on from it
    ended = run_ranks(lambda rank: record(tmp_path / "on", level="state", ckpt_path=path), tmp_path / "output")
    succeed(ended)
    assert all("last.ckpt is resumed by Lightning alone" in one.output for one in ended)
