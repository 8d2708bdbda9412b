"""A writer killed at any moment leaves whole steps, and a folder that says it is incomplete."""

import multiprocessing
import random
import signal
import time
from pathlib import Path

import pytest
from stored_runs import create, digests_of, resume, small_layout, small_program

from det_callbacks.errors import ReferenceNotFoundError
from det_callbacks.runs.store import Run
from det_callbacks.runs.writer import RunWriter

KILLS = 30
LONGEST = 0.5
"""Seconds that a writer has at most: some dozens of programs and hundreds of steps."""
STEPS_OF_A_FIT = 60
STEPS_OF_A_PROGRAM = 7


def content_of(segment: int, step: int) -> tuple:
    """Return what is written in a step; programs and layouts change often, so that their writing is hit too."""
    number = (segment * STEPS_OF_A_FIT + step) // STEPS_OF_A_PROGRAM
    num_sites = 1 + number % 400
    digests = digests_of(step, num_sites, seed=segment)
    return small_program(num_sites, op=f"aten.op{number}.default"), small_layout(num_sites), digests


def write(writer: RunWriter, segment: int, step: int) -> None:
    program, layout, digests = content_of(segment, step)
    writer.put_program(program)
    writer.put_layout(layout)
    writer.append(step, 0, program.id, layout.id, digests)


def write_until_killed(path: Path) -> None:
    """Start a run, or go on with one where it ended, never stop, and tell of each step after it was written."""
    segment, step = 0, 0
    if (path / "run.json").exists():
        # the last fit may have been killed before any of its steps was told of
        segment = Run.open(path).rank(0).segments[-1]
        step = max((known + 1 for fit, known in told_by(path) if fit == segment), default=0)
        writer = resume(path)
    else:
        writer = create(path, overwrite=True)
    with path.with_suffix(".told").open("a", buffering=1) as told:
        while True:
            if step == STEPS_OF_A_FIT:
                writer.start_segment()
                segment, step = segment + 1, 0
            write(writer, segment, step)
            told.write(f"{segment} {step}\n")
            step += 1


def kill_a_writer(path: Path, seconds: float) -> None:
    """Start a writer in a folder and kill it after some seconds; forked, since imports take longer than all of it."""
    process = multiprocessing.get_context("fork").Process(target=write_until_killed, args=(path,))
    process.start()
    time.sleep(seconds)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, "the writer ended by itself"


def told_by(path: Path) -> list[tuple[int, int]]:
    """Return (segment, step) of what the writer said it had written; a line may be cut off."""
    told = path.with_suffix(".told")
    lines = told.read_text().splitlines(keepends=True) if told.exists() else []
    return [(int(words[0]), int(words[1])) for line in lines if line.endswith("\n") and (words := line.split())]


def check(path: Path) -> int:
    """Check what a kill left; return the number of steps."""
    told = told_by(path)
    try:
        run = Run.open(path)
    except ReferenceNotFoundError:
        assert told == [], "steps were written, and there is no run"
        return 0
    assert not run.is_complete
    held = [(record.segment, record.step) for record in run.rank(0).iterate()]
    assert held[: len(told)] == told
    assert len(held) <= len(told) + 1
    for segment, step in held:
        view = run.view(0, segment, step)
        program, layout, digests = content_of(segment, step)
        assert (view.program, view.layout, view.record.digests.tolist()) == (program, layout, digests.tolist())
    return len(held)


@pytest.mark.soak
def test_whole_steps_survive_every_kill(tmp_path: Path) -> None:
    moments = random.Random(7)
    counts = []
    for number in range(KILLS):
        path = tmp_path / f"run-{number}"
        # every third run is killed again while it is resumed
        for _ in range(1 + (number % 3 == 0)):
            kill_a_writer(path, moments.uniform(0, LONGEST if number % 2 else 0.02))
            counts.append(check(path))
    assert sum(counts) > 10 * KILLS, "the writers were killed before they wrote"
    assert len(set(counts)) > KILLS / 3, "the moments were not random"


def test_what_the_storm_checks_can_fail(tmp_path: Path) -> None:
    path = tmp_path / "run"
    writer = create(path)
    for step in range(3):
        write(writer, 0, step)
    writer.close(complete=True)
    path.with_suffix(".told").write_text("0 0\n0 1\n0 2\n")
    stream = path / "rank-00000" / "attempt-000.arrows"
    whole = stream.read_bytes()
    for size, is_right in ((len(whole), False), (len(whole) - 8, True), (len(whole) - 20, False)):
        stream.write_bytes(whole[:size])
        if is_right:
            assert check(path) == 3
        else:
            with pytest.raises(AssertionError):
                check(path)
    (path / "run.json").unlink()
    with pytest.raises(AssertionError, match="there is no run"):
        check(path)
