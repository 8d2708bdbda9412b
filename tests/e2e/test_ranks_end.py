"""How fits of several processes end: all together, and what they leave opens;
a slow process is waited for.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
from fits import Classifier, Samples
from judged import require_one_verdict
from lightning.pytorch.callbacks import LambdaCallback
from processes import Ended, Faulty, linked, run_ranks, run_training, train, verdict_in
from torch.utils.data import DataLoader, Subset
from trainers import quiet_trainer

from det_callbacks import (
    DeterminismCallback,
    DivergenceError,
    NothingComparedError,
    ReferenceFormatError,
    SettingsError,
    compare_runs,
)
from det_callbacks.compare.record import record_path
from det_callbacks.ranks import group
from det_callbacks.report.page import write_report
from det_callbacks.runs.store import Run
from det_callbacks.training.recording import take_unfinished

pytestmark = pytest.mark.ddp
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("how", "rank", "exit_code", "workers"),
    [
        ("kill", 0, -signal.SIGKILL, 0),
        ("refuse", 1, 2, 0),
        pytest.param("interrupt", 1, 1, 0, marks=SLOW),
        # workers are forked with the sockets of their rank, and end when
        # they notice that it is gone
        pytest.param("kill", 1, -signal.SIGKILL, 2, marks=SLOW),
    ],
)
def test_the_others_end(how, rank, exit_code, workers, tmp_path):
    def end(trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx, trainer.global_rank) != (2, rank):
            return
        if how == "refuse":
            raise SettingsError("one of ours")
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGINT)
        time.sleep(1)

    def body(_: int) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        callbacks = (
            DeterminismCallback(tmp_path / "run", mode="record"),
            LambdaCallback(on_train_batch_start=end),
        )
        trainer = quiet_trainer(*callbacks, devices=2, strategy="ddp")
        trainer.fit(Classifier(), DataLoader(Samples(), batch_size=4, num_workers=workers))

    ended = run_ranks(body, tmp_path / "record")
    one, other = ended[rank], ended[1 - rank]
    assert (one.exit_code, other.exit_code > 0) == (exit_code, True), one.output + other.output
    assert f"recording of rank {1 - rank} stopped by" in other.output
    run = Run.open(tmp_path / "run")
    assert (run.is_complete, [run.rank(rank).steps(0).tolist() for rank in run.ranks]) == (
        False,
        [[0, 1]] * 2,
    )


def test_a_verification_whose_rank_fails_says_what_diff_will_show(tmp_path):
    folder = tmp_path / "a folder"

    def fail(trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx, trainer.global_rank) == (2, 1):
            raise KeyError("one of the training's own")

    def run(mode: Any, *callbacks: pl.Callback, status: int | None = None) -> list[Ended]:
        def body(rank: int) -> None:
            current = folder / "current" if mode == "verify" else None
            train(None, DeterminismCallback(folder / "run", mode=mode, current=current), *callbacks)

        return run_ranks(body, tmp_path / mode, status=status)

    run("record", status=0)
    failed = run("verify", LambdaCallback(on_train_batch_start=fail))[1].output
    said = " ".join(failed.split())
    assert (
        "no verdict. Correct the error, and verify again. To see whether a rank differed before it:"
        in said
    )
    assert (
        f"det-callbacks diff '{folder}/run' '{folder}/current' (exit status 2 if none did, or "
        "if a rank"
    ) in said
    with pytest.raises(
        NothingComparedError,
        match=r"by \w+ after step 1 on rank 0 and by KeyError after step 1 on rank 1",
    ):
        compare_runs(folder / "run", folder / "current")


def test_a_slow_rank_is_waited_for(tmp_path, monkeypatch):
    """One takes longer alone than the others wait for a rank that is in a step,
    as a large save does.
    """
    monkeypatch.setattr(group.RankGroup, "end_seconds", 1.0)  # for the forked processes

    def body(rank: int) -> None:
        sleeping = LambdaCallback(
            on_train_batch_end=lambda *args: time.sleep(3 * (args[-1] == 3 and rank == 0))
        )
        train(None, DeterminismCallback(tmp_path / "run", mode="record"), sleeping)

    run_ranks(body, tmp_path / "output", status=0)
    assert Run.open(tmp_path / "run").is_complete


def test_a_rank_with_fewer_batches_ends_all_and_nothing_matches(tmp_path, monkeypatch):
    """Rank 1 comes to the end of its fit, and rank 0 is in a collective of the training."""
    monkeypatch.setattr(group.RankGroup, "end_seconds", 2.0)  # for the forked processes

    def run(mode: Any, num_samples: int) -> list[Ended]:
        def body(rank: int) -> None:
            pl.seed_everything(11)
            callback = DeterminismCallback(
                tmp_path / "run", mode=mode, current=tmp_path / "current"
            )
            trainer = quiet_trainer(
                callback, devices=2, strategy="ddp", use_distributed_sampler=False
            )
            samples = Subset(Samples(), range(num_samples if rank else 32))
            trainer.fit(Classifier(), DataLoader(samples, batch_size=4))

        return run_ranks(body, tmp_path / mode)

    assert [one.exit_code for one in run("record", 32)] == [0, 0]
    other, one = run("verify", 16)
    assert (other.exit_code > 0, one.exit_code) == (True, 2), other.output + one.output
    assert (
        "Rank 1 of 2 has finished its training, but rank 0 is in a training step, for 2 seconds"
        in one.output
    )
    assert "match" not in other.output + one.output
    assert not (tmp_path / "current" / "verdict.json").exists()
    assert not Run.open(tmp_path / "current").is_complete


def test_a_judge_that_fails_is_no_match(tmp_path, monkeypatch):
    run_training("record", tmp_path)
    error = ReferenceFormatError("a file was damaged meanwhile", str(tmp_path))
    monkeypatch.setattr("det_callbacks.verify.verification.compare_runs", Mock(side_effect=error))
    _, other = run_training("verify", tmp_path, status=2)
    assert "No verdict: Rank 0 failed in judging the two runs" in other.output
    assert f"det-callbacks diff {tmp_path / 'run'} {tmp_path / 'current'}" in other.output
    assert not (tmp_path / "current" / "verdict.json").exists()
    # what the ranks sealed is judged later, and not without all of them
    assert compare_runs(tmp_path / "run", tmp_path / "current").verdict == "match"
    record_path(tmp_path / "current", 1).unlink()
    with pytest.raises(ReferenceFormatError, match=r"rank-00001/record\.json is missing"):
        compare_runs(tmp_path / "run", tmp_path / "current")


def test_no_rank_leaves_before_the_report_is_written(tmp_path, monkeypatch):
    """A launcher such as torchrun ends all processes when the first one exits."""
    run_training("record", tmp_path)

    def write_late(*args: Any, **options: Any) -> Path:
        time.sleep(1)
        return write_report(*args, **options)

    # for the forked processes
    monkeypatch.setattr("det_callbacks.training.verifying.write_report", write_late)

    def body(_: int) -> None:
        callback = DeterminismCallback(tmp_path / "run", current=tmp_path / "current")
        with pytest.raises(DivergenceError):
            train(callback, model=lambda: Faulty("data"))
        assert (tmp_path / "current" / "report.html").exists()

    run_ranks(body, tmp_path / "verify", status=0)


def test_two_fits_are_verified_together_and_both_have_to_come(tmp_path):
    def run(mode: Any, num_fits: int, status: int) -> list[Ended]:
        def body(_: int) -> None:
            callback = DeterminismCallback(
                tmp_path / "run", mode=mode, current=tmp_path / f"{num_fits}" / "current"
            )
            for _ in range(num_fits):
                train(callback)
            if (error := take_unfinished()) is not None:  # as at the process's exit
                raise error

        return run_ranks(body, tmp_path / mode, status=status)

    run("record", 2, status=0)
    ended = run("verify", 2, status=0)
    assert [
        one.output.count("det_callbacks: match: verified 16 steps of 2 ranks") for one in ended
    ] == [1, 0]
    ended = run("verify", 1, status=1)
    assert all(
        "this process ended after 1 of the 2 parts (fit, fit)" in one.output for one in ended
    )
    assert verdict_in(tmp_path / "1")["verdict"] == "diverged"


@pytest.fixture(scope="module")
def one_fit(tmp_path_factory: Any) -> Path:
    run_training("record", folder := tmp_path_factory.mktemp("one"), batches=8)
    return folder


# after other weights only rank 1 differs by then
@pytest.mark.parametrize(
    ("every", "last", "fault", "how"),
    [(2, 3, "data", "raise"), (3, 2, "weights", "raise"), (2, 7, "data", "collect")],
)
def test_all_ranks_stop_at_the_same_sync_or_go_on_to_the_end(
    every, last, fault, how, one_fit, tmp_path, monkeypatch
):
    monkeypatch.setattr(group, "SYNC_EVERY_N_STEPS", every)
    ended = run_training(
        "verify", linked(one_fit, tmp_path), fault, batches=8, on_divergence=how, status=1
    )
    assert all("the verdict: diverged" in one.output for one in ended)
    said = f"det_callbacks: diverged: verified {2 * (last + 1)} steps of 2 ranks, "
    assert [one.output.count(said) for one in ended] == [1, 0]
    verdict = verdict_in(tmp_path)
    assert (verdict["counts"]["steps_compared"], verdict["coverage"]["steps"]) == (
        2 * (last + 1),
        [0, last],
    )
    assert (verdict["first_divergence"]["rank"], verdict["first_divergence"]["step"]) == (1, 2)
    assert not [row for row in verdict["origins"] if row["kind"] == "missing"]
    run = Run.open(tmp_path / "current")
    stored = [run.rank(rank).steps(0).tolist() for rank in (0, 1)]
    assert stored == ([[], [2]] if fault == "weights" else [list(range(2, last + 1))] * 2)
    if fault == "weights":
        assert (
            "it started on rank 1; 1 of 2 ranks differ (rank 1 from step 2 on)"
            in verdict["explanation"]
        )
    require_one_verdict(verdict, tmp_path / "run", tmp_path / "current")


LEAVES_A_FIT = """
from det_callbacks.errors import DivergenceError
from det_callbacks.training.recording import wait
print("not flushed yet", end="")
wait(print, lambda: DivergenceError("one fit of two"))
"""


def test_a_process_ends_as_diverged_where_a_fit_is_left_also_one_that_a_strategy_forks():
    child = multiprocessing.get_context("fork").Process(target=exec, args=(LEAVES_A_FIT, {}))
    child.start()
    child.join()
    assert child.exitcode == 1
    words = [sys.executable, "-W", "ignore", "-c", LEAVES_A_FIT]
    variables = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "not flushed yet")
    assert done.stderr.startswith("DivergenceError: one fit of two")
