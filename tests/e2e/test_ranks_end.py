"""However one process of a run ends, all others end too, and leave a folder that opens."""

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from processes import Ended, run_ranks, train
from styles import Classifier, Samples
from torch.utils.data import DataLoader, Subset
from trainers import quiet_trainer

from det_callbacks import DeterminismCallback, ReferenceFormatError, SettingsError, Verdict, compare_runs, verification
from det_callbacks.callback import together
from det_callbacks.compare.record import record_path
from det_callbacks.ranks import RankGroup
from det_callbacks.runs.store import Run

pytestmark = pytest.mark.ddp


class EndAt(pl.Callback):
    """Ends a rank in some way, in step 2."""

    def __init__(self, how: str, rank: int) -> None:
        self.how = how
        self.rank = rank

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 2:
            return
        if trainer.global_rank != self.rank:
            return
        if self.how == "sleep":
            time.sleep(12)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "refuse":
            raise SettingsError("one of ours")
        if self.how == "raise":
            raise ValueError("the user's own")
        if self.how == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)


def end_one(how: str, folder: Path, *, rank: int = 1) -> list[Ended]:
    def body(_: int) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        train(DeterminismCallback(folder / "run", mode="record"), EndAt(how, rank))

    return run_ranks(body, folder / "record")


@pytest.mark.parametrize(
    ("how", "rank", "exit_code"),
    [
        ("kill", 1, -signal.SIGKILL),
        ("kill", 0, -signal.SIGKILL),
        ("raise", 1, 1),
        ("refuse", 1, 2),
        ("interrupt", 1, 1),
    ],
)
def test_the_others_end(how: str, rank: int, exit_code: int, tmp_path: Path) -> None:
    ended = end_one(how, tmp_path, rank=rank)
    one, other = ended[rank], ended[1 - rank]
    assert one.exit_code == exit_code, one.output
    assert other.exit_code > 0, other.output
    assert f"recording of rank {1 - rank} stopped by" in other.output
    run = Run.open(tmp_path / "run")
    assert not run.is_complete
    assert [run.rank(rank).steps(0).tolist() for rank in run.ranks] == [[0, 1]] * 2


@pytest.mark.slow
def test_workers_of_a_killed_rank_keep_no_connection_open(tmp_path: Path) -> None:
    """They are forked with the sockets of their rank, and end when they notice that it is gone."""

    def body(rank: int) -> None:
        trainer = quiet_trainer(
            DeterminismCallback(tmp_path / "run", mode="record"), EndAt("kill", 1), devices=2, strategy="ddp"
        )
        trainer.fit(Classifier(), DataLoader(Samples(), batch_size=4, num_workers=2))

    other, one = run_ranks(body, tmp_path / "record", seconds=60)
    assert (one.exit_code, other.exit_code > 0) == (-signal.SIGKILL, True), other.output


class SleepAfter(pl.Callback):
    """Does something on rank 0 alone at the end of step 2, as one that saves a large file does."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 0 and trainer.fit_loop.epoch_loop.total_batch_idx == 2:
            time.sleep(12)


@pytest.mark.slow
@pytest.mark.parametrize("slow", [EndAt("sleep", 1), SleepAfter()])
def test_a_slow_rank_is_waited_for(slow: pl.Callback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in an exchange of our own, which the other rank comes to after each step here."""
    monkeypatch.setitem(RankGroup.__init__.__kwdefaults__, "end_seconds", 5.0)  # for the forked processes
    monkeypatch.setattr(together, "SYNC_EVERY_N_STEPS", 1)

    def body(mode: Any) -> list[Ended]:
        callback = partial(DeterminismCallback, tmp_path / "run", mode=mode, current=tmp_path / "current")
        return run_ranks(lambda _: train(callback(), slow), tmp_path / mode)

    for mode in ("record", "verify"):
        ended = body(mode)
        assert [one.exit_code for one in ended] == [0, 0], ended
    assert Run.open(tmp_path / "run").is_complete


class Unequal(Classifier):
    """Has fewer batches on rank 1."""

    def train_dataloader(self) -> Any:
        return DataLoader(Subset(Samples(), range(16 if self.global_rank else 32)), batch_size=4)


@pytest.mark.slow
def test_a_rank_with_fewer_batches_ends_all(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        pl.seed_everything(11)
        callback = DeterminismCallback(tmp_path / "run", mode="record")
        trainer = quiet_trainer(callback, devices=2, strategy="ddp", use_distributed_sampler=False)
        trainer.fit(Unequal())

    other, one = run_ranks(body, tmp_path / "record")
    assert one.exit_code == 2, one.output
    assert (
        "Rank 1 of 2 has finished its training, and not all others came to the end of theirs within 30 seconds"
        in one.output
    )
    assert "it got fewer batches than they, or stopped early" in one.output
    assert other.exit_code > 0, other.output
    assert not Run.open(tmp_path / "run").is_complete


@pytest.mark.slow
def test_a_verification_with_fewer_batches_on_one_rank_is_no_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 comes to the end of its fit, and rank 0 is in a collective of the training."""
    monkeypatch.setitem(RankGroup.__init__.__kwdefaults__, "end_seconds", 10.0)  # for the forked processes

    def fit(callback: DeterminismCallback, model: Classifier) -> None:
        pl.seed_everything(11)
        trainer = quiet_trainer(callback, devices=2, strategy="ddp", use_distributed_sampler=False)
        trainer.fit(model, None if isinstance(model, Unequal) else DataLoader(Samples(), batch_size=4))

    ended = run_ranks(
        lambda _: fit(DeterminismCallback(tmp_path / "run", mode="record"), Classifier()), tmp_path / "record"
    )
    assert [one.exit_code for one in ended] == [0, 0], ended
    other, one = run_ranks(
        lambda _: fit(DeterminismCallback(tmp_path / "run", current=tmp_path / "current"), Unequal()),
        tmp_path / "verify",
    )
    assert (other.exit_code > 0, one.exit_code) == (True, 2), other.output + one.output
    assert (
        "Rank 1 of 2 has finished its training, and not all others came to the end of theirs within 10 seconds"
        in one.output
    )
    assert "match" not in other.output + one.output
    assert not (tmp_path / "current" / "verdict.json").exists()
    assert not Run.open(tmp_path / "current").is_complete


@pytest.mark.parametrize("how", ["fails", pytest.param("is slow", marks=pytest.mark.slow)])
def test_a_judge_that_fails_is_no_match_and_a_slow_one_is_waited_for(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RankGroup.__init__.__kwdefaults__, "end_seconds", 5.0)  # for the forked processes

    def judge(*paths: Path) -> Verdict:
        if how == "fails":
            raise ReferenceFormatError("a file was damaged meanwhile", str(paths[0]))
        time.sleep(7)
        return compare_runs(*paths)

    recorded = run_ranks(lambda _: train(DeterminismCallback(tmp_path / "run", mode="record")), tmp_path / "record")
    assert [one.exit_code for one in recorded] == [0, 0], recorded
    monkeypatch.setattr(verification, "compare_runs", judge)
    callback = partial(DeterminismCallback, tmp_path / "run", current=tmp_path / "current")
    one, other = run_ranks(lambda _: train(callback()), tmp_path / "verify")
    if how == "is slow":
        assert (one.exit_code, other.exit_code) == (0, 0), one.output + other.output
    else:
        assert (one.exit_code, other.exit_code) == (2, 2), one.output + other.output
        assert "No verdict: Rank 0 failed in judging the two runs" in other.output
        assert f"det-callbacks diff {tmp_path / 'run'} {tmp_path / 'current'}" in other.output
        assert not (tmp_path / "current" / "verdict.json").exists()
    # what the ranks sealed is judged later, and not without all of them
    assert compare_runs(tmp_path / "run", tmp_path / "current").verdict == "match"
    record_path(tmp_path / "current", 1).unlink()
    with pytest.raises(ReferenceFormatError, match=r"rank-00001/record\.json is missing"):
        compare_runs(tmp_path / "run", tmp_path / "current")
