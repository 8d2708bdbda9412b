"""However one process of a run ends, all others end too, say why, and leave a folder that opens."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from processes import Ended, run_ranks, train
from styles import Classifier, Samples
from torch.utils.data import DataLoader, Subset
from trainers import quiet_trainer

from det_callbacks import DeterminismCallback, SettingsError
from det_callbacks.ranks import RankGroup
from det_callbacks.trace.store import Run

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
            if self.how == "raise while others sleep":
                time.sleep(100)
            return
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "refuse":
            raise SettingsError("one of ours")
        if self.how.startswith("raise"):
            raise ValueError("the user's own")
        if self.how == "runtime":
            raise RuntimeError("looks like a collective's")
        if self.how == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)


def end_one(how: str, folder: Path, *, rank: int = 1) -> list[Ended]:
    def body(_: int) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        train(DeterminismCallback(folder / "run", mode="record"), EndAt(how, rank))

    return run_ranks(body, folder / "record")


@pytest.mark.parametrize(
    ("how", "exit_code", "said"),
    [
        ("kill", -signal.SIGKILL, "rank 1 of 2 is gone, at step 1: it ended without a word: killed, most likely"),
        ("raise", 1, "rank 1 of 2 ended at step 1: ValueError: the user's own"),
        ("refuse", 2, "rank 1 of 2 ended at step 1: SettingsError: one of ours"),
        ("runtime", 1, "rank 1 of 2 ended at step 1: RuntimeError: looks like a collective's"),
        ("interrupt", 1, "rank 1 of 2 ended at step 1: KeyboardInterrupt"),
    ],
)
def test_the_others_end_and_say_why(how: str, exit_code: int, said: str, tmp_path: Path) -> None:
    other, one = end_one(how, tmp_path)
    assert one.exit_code == exit_code, one.output
    assert other.exit_code == (2 if how == "kill" else exit_code), other.output
    assert said in other.output
    assert other.output.count("Look at what rank 1 printed") == 1
    run = Run.open(tmp_path / "run")
    assert not run.is_complete
    assert [run.rank(rank).steps(0).tolist() for rank in run.ranks] == [[0, 1]] * 2


def test_without_rank_0_the_others_end_too(tmp_path: Path) -> None:
    one, other = end_one("kill", tmp_path, rank=0)
    assert one.exit_code == -signal.SIGKILL
    assert other.exit_code == 2, other.output
    assert "rank 0 of 2 is gone, at a step that is not known: it ended without a word" in other.output
    assert not Run.open(tmp_path / "run").is_complete


KILLED = f"""
import os, signal, sys
sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]!r}
from processes import train
from det_callbacks import DeterminismCallback
from test_ranks_end import EndAt
train(DeterminismCallback(sys.argv[1], mode="record"), EndAt("kill", 1))
"""


@pytest.mark.slow
def test_the_status_of_a_program_is_that_of_the_message(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path / "run")],
            env=os.environ
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "NODE_RANK": "0"}
            | {"LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        output, _ = started[0].communicate(timeout=150)
        assert started[1].wait(timeout=60) == -signal.SIGKILL
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert started[0].returncode == 2, output  # not 1, as of another uncaught error
    assert "rank 1 of 2 is gone, at step 1" in output


@pytest.mark.slow
def test_a_rank_that_does_not_end_by_itself_is_ended(tmp_path: Path) -> None:
    other, one = end_one("raise while others sleep", tmp_path)
    assert (one.exit_code, other.exit_code) == (1, 1)
    assert "rank 1 of 2 ended at step 1: ValueError: the user's own" in other.output


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
    assert other.exit_code == 2, other.output
    assert "rank 1 of 2 ended at step 3: RankError" in other.output
    assert not Run.open(tmp_path / "run").is_complete


@pytest.mark.slow
def test_a_verification_with_fewer_batches_on_one_rank_is_no_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 comes to the end of its fit, and rank 0 is in a collective of the training."""
    monkeypatch.setitem(RankGroup.__init__.__kwdefaults__, "timeout_seconds", 10.0)  # for the forked processes

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
    assert (other.exit_code, one.exit_code) == (2, 2), other.output + one.output
    assert (
        "Rank 1 of 2 has finished its training, and not all others came to the end of theirs within 10 seconds"
        in one.output
    )
    assert "rank 1 of 2 ended at step 3: RankError" in other.output
    assert "match" not in other.output + one.output
    assert not (tmp_path / "current" / "verdict.json").exists()
    assert not Run.open(tmp_path / "current").is_complete
