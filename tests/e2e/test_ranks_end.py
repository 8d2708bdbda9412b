"""However one process of a run ends, all others end too, and leave a folder that opens; a slow one is waited for."""

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
from det_callbacks.compare.record import record_path
from det_callbacks.ranks import RankGroup
from det_callbacks.runs.store import Run

pytestmark = pytest.mark.ddp


class EndAt(pl.Callback):
    """Ends a rank in some way, in step 2."""

    def __init__(self, how: str, rank: int) -> None:
        self.how, self.rank = how, rank

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 2 or trainer.global_rank != self.rank:
            return
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "refuse":
            raise SettingsError("one of ours")
        if self.how == "raise":
            raise ValueError("the user's own")
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


@pytest.mark.parametrize(
    ("how", "rank", "exit_code"),
    [
        ("kill", 0, -signal.SIGKILL),
        ("refuse", 1, 2),
        pytest.param("kill", 1, -signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("raise", 1, 1, marks=pytest.mark.slow),
        pytest.param("interrupt", 1, 1, marks=pytest.mark.slow),
    ],
)
def test_the_others_end(how: str, rank: int, exit_code: int, tmp_path: Path) -> None:
    def body(_: int) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        train(DeterminismCallback(tmp_path / "run", mode="record"), EndAt(how, rank))

    ended = run_ranks(body, tmp_path / "record")
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
        callbacks = DeterminismCallback(tmp_path / "run", mode="record"), EndAt("kill", 1)
        trainer = quiet_trainer(*callbacks, devices=2, strategy="ddp")
        trainer.fit(Classifier(), DataLoader(Samples(), batch_size=4, num_workers=2))

    other, one = run_ranks(body, tmp_path / "record", seconds=60)
    assert (one.exit_code, other.exit_code > 0) == (-signal.SIGKILL, True), other.output


class SleepIn(pl.Callback):
    """Takes longer on one rank alone than the others wait for a rank that is in a step, as a large save does."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.sleep)

    def sleep(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_rank == 0 and trainer.fit_loop.epoch_loop.total_batch_idx >= 3:
            time.sleep(3)


@pytest.mark.parametrize(
    "hook",
    [
        "on_train_end",
        *(
            pytest.param(hook, marks=pytest.mark.slow)
            for hook in ("on_train_epoch_end", "on_validation_end", "on_train_batch_end")
        ),
    ],
)
def test_a_slow_rank_is_waited_for(hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RankGroup.__init__.__kwdefaults__, "end_seconds", 1.0)  # for the forked processes
    slow = SleepIn(hook)
    for mode in ("record", "verify") if hook == "on_train_end" else ("record",):
        callback: Any = partial(DeterminismCallback, tmp_path / "run", mode=mode, current=tmp_path / "current")

        def body(_: int, callback: Any = callback) -> None:
            pl.seed_everything(11, verbose=False)
            order = (callback(), slow) if hook == "on_train_batch_end" else (slow, callback())
            trainer = quiet_trainer(*order, devices=2, strategy="ddp")
            loader = DataLoader(Samples(), batch_size=4)
            trainer.fit(Classifier(), loader, loader)

        ended = run_ranks(body, tmp_path / mode)
        assert [one.exit_code for one in ended] == [0, 0], ended
    assert Run.open(tmp_path / "run").is_complete


class Unequal(Classifier):
    """Has fewer batches on rank 1."""

    def train_dataloader(self) -> Any:
        return DataLoader(Subset(Samples(), range(16 if self.global_rank else 32)), batch_size=4)


def test_a_rank_with_fewer_batches_ends_all_and_nothing_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 comes to the end of its fit, and rank 0 is in a collective of the training."""
    monkeypatch.setitem(RankGroup.__init__.__kwdefaults__, "end_seconds", 2.0)  # for the forked processes

    def fit(callback: DeterminismCallback, model: Classifier) -> None:
        pl.seed_everything(11)
        trainer = quiet_trainer(callback, devices=2, strategy="ddp", use_distributed_sampler=False)
        trainer.fit(model, None if isinstance(model, Unequal) else DataLoader(Samples(), batch_size=4))

    def run(model: type[Classifier], **arguments: Any) -> list[Ended]:
        return run_ranks(
            lambda _: fit(DeterminismCallback(tmp_path / "run", **arguments), model()), tmp_path / model.__name__
        )

    assert [one.exit_code for one in run(Classifier, mode="record")] == [0, 0]
    other, one = run(Unequal, current=tmp_path / "current")
    assert (other.exit_code > 0, one.exit_code) == (True, 2), other.output + one.output
    assert "Rank 1 of 2 has finished its training, and rank 0 is in a training step, for 2 seconds" in one.output
    assert "one got fewer batches than the others, stopped early, or failed" in one.output
    assert "match" not in other.output + one.output
    assert not (tmp_path / "current" / "verdict.json").exists()
    assert not Run.open(tmp_path / "current").is_complete


def test_a_judge_that_fails_is_no_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(*paths: Path) -> Verdict:
        raise ReferenceFormatError("a file was damaged meanwhile", str(paths[0]))

    recorded = run_ranks(lambda _: train(DeterminismCallback(tmp_path / "run", mode="record")), tmp_path / "record")
    assert [one.exit_code for one in recorded] == [0, 0], recorded
    monkeypatch.setattr(verification, "compare_runs", judge)
    callback = partial(DeterminismCallback, tmp_path / "run", current=tmp_path / "current")
    one, other = run_ranks(lambda _: train(callback()), tmp_path / "verify")
    assert (one.exit_code, other.exit_code) == (2, 2), one.output + other.output
    assert "No verdict: Rank 0 failed in judging the two runs" in other.output
    assert f"det-callbacks diff {tmp_path / 'run'} {tmp_path / 'current'}" in other.output
    assert not (tmp_path / "current" / "verdict.json").exists()
    # what the ranks sealed is judged later, and not without all of them
    assert compare_runs(tmp_path / "run", tmp_path / "current").verdict == "match"
    record_path(tmp_path / "current", 1).unlink()
    with pytest.raises(ReferenceFormatError, match=r"rank-00001/record\.json is missing"):
        compare_runs(tmp_path / "run", tmp_path / "current")
