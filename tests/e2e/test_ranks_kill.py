"""One of two recording processes is killed at a random moment: the other one ends, and what there is opens."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from processes import run_ranks, train

from det_callbacks import DeterminismCallback
from det_callbacks.runs.store import Run

pytestmark = [pytest.mark.ddp, pytest.mark.soak]

KILLS = 10
MANY_EPOCHS = 400


def kill_later(process: int, folder: Path, seconds: float) -> None:
    """Kill a process so many seconds after a folder appeared, from a process of its own: it never knows when."""
    if os.fork():
        return
    deadline = time.monotonic() + 60
    while not folder.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(process, signal.SIGKILL)
    os._exit(0)


@pytest.mark.parametrize("number", range(KILLS))
def test_what_a_kill_leaves_opens_and_can_be_recorded_again(number: int, tmp_path: Path) -> None:
    folder, killed = tmp_path / "run", number % 2
    seconds = random.uniform(0, 0.05 if number < KILLS // 2 else 1.5)  # half of them while the run is being opened

    def record(rank: int) -> None:
        if rank == killed:
            kill_later(os.getpid(), folder, seconds)
        train(DeterminismCallback(folder, mode="record"), max_epochs=MANY_EPOCHS)

    ended = run_ranks(record, tmp_path / "record")
    told = f"rank {killed} was killed after {seconds:.3f} s: {ended[1 - killed].output}"
    assert ended[killed].exit_code == -signal.SIGKILL, told
    assert ended[1 - killed].exit_code == 2, told

    run = Run.open(folder)
    assert not run.is_complete, told
    steps = [run.rank(rank).num_steps for rank in run.ranks]
    assert abs(max(steps) - min(steps)) <= 1 if len(steps) == 2 else sum(steps) == 0, told

    def again(_: int) -> None:
        train(DeterminismCallback(folder, mode="record", overwrite=True))

    assert [one.exit_code for one in run_ranks(again, tmp_path / "again")] == [0, 0]
    assert Run.open(folder).is_complete
