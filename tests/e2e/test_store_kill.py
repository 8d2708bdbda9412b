"""A writer killed at any moment leaves whole steps, and a folder that says it is incomplete."""

import itertools
import multiprocessing
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from stored_runs import create, digests_of, resume, small_layout, small_program

from det_callbacks.errors import ReferenceNotFoundError
from det_callbacks.runs.store import Run
from det_callbacks.runs.writer import RunWriter

KILLS = 30
LONGEST = 0.5
"""Seconds that a writer has at most: some dozens of programs and hundreds of steps."""


def content_of(step: int) -> tuple[Any, Any, Any]:
    """Return what is written in a step; programs and layouts change often, so that their writing is hit too."""
    number = step // 7
    num_sites = 1 + number % 400
    program = small_program(num_sites, op=f"aten.op{number}.default")
    return program, small_layout(num_sites), digests_of(step, num_sites)


def write(writer: RunWriter, step: int) -> None:
    program, layout, digests = content_of(step)
    writer.put_program(program)
    writer.put_layout(layout)
    writer.append(step, 0, program.id, layout.id, digests)


def num_told(path: Path) -> int:
    """Return how many steps the writer said it had written: a byte each."""
    told = path.with_suffix(".told")
    return told.stat().st_size if told.exists() else 0


def write_until_killed(path: Path) -> None:
    """Start a run, or go on with one where it ended, never stop, and tell of each step after it was written."""
    writer = resume(path) if (path / "run.json").exists() else create(path, overwrite=True)
    with path.with_suffix(".told").open("ab", buffering=0) as told:
        for step in itertools.count(num_told(path)):
            write(writer, step)
            told.write(b"+")


def kill_a_writer(path: Path, seconds: float) -> None:
    """Start a writer in a folder and kill it after some seconds; forked, since imports take longer than all of it."""
    process = multiprocessing.get_context("fork").Process(target=write_until_killed, args=(path,))
    process.start()
    time.sleep(seconds)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, "the writer ended by itself"


def check(path: Path) -> int:
    """Check what a kill left; return the number of steps."""
    try:
        run = Run.open(path)
    except ReferenceNotFoundError:
        assert num_told(path) == 0, "steps were written, and there is no run"
        return 0
    assert not run.is_complete
    held = run.rank(0).steps(0).tolist() if run.rank(0).segments else []
    assert held == list(range(len(held)))
    assert num_told(path) <= len(held) <= num_told(path) + 1
    for step in held:
        view, (program, layout, digests) = run.view(0, 0, step), content_of(step)
        assert (view.program, view.layout, view.record.digests.tolist()) == (program, layout, digests.tolist())
    return len(held)


@pytest.mark.soak
def test_whole_steps_survive_every_kill(tmp_path: Path) -> None:
    moments = random.Random(7)
    counts = []
    for number in range(KILLS):
        # every third run is killed again while it is resumed
        for _ in range(1 + (number % 3 == 0)):
            kill_a_writer(tmp_path / f"run-{number}", moments.uniform(0, LONGEST if number % 2 else 0.02))
            counts.append(check(tmp_path / f"run-{number}"))
    assert sum(counts) > 10 * KILLS, "the writers were killed before they wrote"
    assert len(set(counts)) > KILLS / 3, "the moments were not random"


def test_what_the_storm_checks_can_fail(tmp_path: Path) -> None:
    path = tmp_path / "run"
    writer = create(path)
    for step in range(3):
        write(writer, step)
    writer.close(complete=True)
    path.with_suffix(".told").write_bytes(b"+++")
    stream = path / "rank-00000" / "attempt-000.arrows"
    whole = stream.read_bytes()
    stream.write_bytes(whole[:-8])
    assert check(path) == 3
    for size in (len(whole), len(whole) - 20):
        stream.write_bytes(whole[:size])
        with pytest.raises(AssertionError):
            check(path)
    (path / "run.json").unlink()
    with pytest.raises(AssertionError, match="there is no run"):
        check(path)
