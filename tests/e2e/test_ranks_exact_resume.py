"""Several processes: a resumed training is the training that was interrupted, on every rank."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from processes import Ended, run_ranks
from ranks_resumes import Sharded, Wide, data, record, resume, round_trip, sharded
from resumes import SaveAfter
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
        record(killed, ckpt_path=killed / "5.ckpt", **options)

    succeed(run_ranks(go_on, killed))
    run = Run.open(killed / "run")
    assert run.is_complete
    for rank in (0, 1):
        assert (killed / "run" / f"rank-{rank:05d}" / "attempt-001.arrows").exists()
        assert run.rank(rank).steps(0).tolist() == [*range(14)]
    verdict = compare_runs(whole / "run", killed / "run")
    assert (verdict.verdict, verdict.coverage.ranks) == ("match", 2)


TRAININGS: dict[str, dict[str, Any]] = {
    "batches": {"after": (3, 7, 10)},
    "validation": {"after": (4, 6), "validates": True, "val_check_interval": 2},
    "workers": {"after": (8,), "data": lambda: data(num_workers=2)},
    "end_of_epoch": {"after": (7,), "at": "epoch", "validates": True},
    "unused": {"after": (3,), "strategy": "ddp_find_unused_parameters_true"},
    # of two ranks a sum has the same bits in any order; of three it has not
    "three_ranks": {"after": (4, 8), "num_ranks": 3, "level": "state"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_from_wherever_it_was_saved(name: str, tmp_path: Path) -> None:
    trip = partial(round_trip, tmp_path, **TRAININGS[name])
    world_size = TRAININGS[name].get("num_ranks", 2)
    succeed(run_ranks(lambda rank: trip(), tmp_path / "output", world_size=world_size, seconds=SLOW))


@pytest.mark.slow
@pytest.mark.parametrize("is_folder", [True, False])
def test_sharded_weights(is_folder: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": Sharded, "accumulate_grad_batches": 2}

    def body(rank: int) -> None:
        # a strategy serves one Trainer
        record(tmp_path, SaveAfter(tmp_path, 3, 7), strategy=sharded(is_folder=is_folder), **options)
        for after in (3, 7):
            strategy = sharded(is_folder=is_folder)
            assert resume(tmp_path, tmp_path / f"{after}.ckpt", strategy=strategy, **options) == (after, 13)

    succeed(run_ranks(body, tmp_path / "output", seconds=SLOW))
    assert (tmp_path / "3.ckpt").is_dir() == is_folder
    assert check_checkpoint(tmp_path / "3.ckpt").equal


class Scored(Wide):
    """Logs a value that is another one on each rank, so that the names of checkpoints are."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.log("score", float(self.global_rank) - self.trainer.global_step)
        return super().training_step(batch, index)


@pytest.mark.slow
def test_checkpoints_that_lightning_names_links_and_removes(tmp_path: Path) -> None:
    def keeping() -> ModelCheckpoint:
        name = "{step}-{score:.1f}"
        return ModelCheckpoint(
            tmp_path, filename=name, monitor="score", save_top_k=2, every_n_train_steps=4, save_last="link"
        )

    def body(rank: int) -> None:
        record(tmp_path, keeping(), model=Scored)
        resume(tmp_path, tmp_path / "last.ckpt", keeping(), model=Scored, enable_checkpointing=True)

    succeed(run_ranks(body, tmp_path / "output", seconds=SLOW))
    kept = {path.name for path in tmp_path.glob("*.ckpt") if not path.is_symlink()}
    assert "step=4-score=-3.0.ckpt" not in kept
    assert {path.name for path in tmp_path.glob("*.resume")} == {f"{name}.resume" for name in kept}
    for name in kept:
        assert check_checkpoint(tmp_path / name).equal


@pytest.mark.slow
def test_the_proof(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        make = partial(quiet_trainer, max_epochs=2, default_root_dir=tmp_path, devices=2, strategy="ddp")
        os.chdir(tmp_path)
        for how, expected in (("exact", "match"), ("plain", "diverged")):
            verdict = prove_resume(make, Wide, data, stop_at=4, steps=10, resume=how)
            assert (verdict.verdict, verdict.coverage.ranks) == (expected, 2), verdict.explanation
            if how == "exact":
                assert verdict.coverage.steps == (4, 9)

    ended = run_ranks(body, tmp_path / "output", seconds=SLOW)
    succeed(ended)
    assert not any("TrainingInterruptedError: . Rank" in one.output for one in ended)
    assert len(list((tmp_path / "determinism").iterdir())) == 2


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_kill_between_two_ranks_leaves_a_checkpoint_without_digests(
    killed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SaveTwice(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            step = trainer.fit_loop.epoch_loop.total_batch_idx
            if step == 4 and trainer.global_rank == killed:  # which has not written its part yet
                monkeypatch.setattr("det_callbacks.checkpoint.resume.write_part", lambda *_, **__: os._exit(9))
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
