"""A writer killed at any moment leaves whole steps, and a folder that says it is incomplete."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_writer import MANIFEST, STEPS_OF_A_FIT, content_of, write

from det_callbacks.errors import ReferenceNotFoundError
from det_callbacks.runs.store import Run
from det_callbacks.runs.writer import RunWriter

HERE = Path(__file__).parent
KILLS = 30
LONGEST = 0.5
"""Seconds that a writer has at most: some dozens of programs and hundreds of steps."""


@pytest.fixture(scope="module")
def kill_a_writer() -> Iterator[Callable[[Path, float], None]]:
    """Start a writer in a folder and kill it after some seconds."""
    server = subprocess.Popen(
        [sys.executable, str(HERE / "store_writer.py")],
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin
    assert server.stdout
    stdin, stdout = server.stdin, server.stdout
    assert stdout.readline() == "ready\n"

    def start_and_kill(path: Path, seconds: float) -> None:
        stdin.write(f"{path}\n")
        stdin.flush()
        pid = int(stdout.readline())
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        assert int(stdout.readline()) == -signal.SIGKILL, "the writer ended by itself"

    yield start_and_kill
    stdin.close()
    assert server.wait(30) == 0
    stdout.close()


def told_by(path: Path) -> list[tuple[int, int]]:
    """Return (segment, step) of what the writer said it had written; a line may be cut off."""
    told = path.parent / f"{path.name}.told"
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
    assert str(path) in str(run.incomplete_reason)
    rank = run.rank(0)
    held = [(record.segment, record.step) for record in rank.iterate()]
    assert held[: len(told)] == told
    assert len(held) <= len(told) + 1
    for segment, step in held:
        view = run.view(0, segment, step)
        program, layout, digests = content_of(segment, step)
        assert (view.program, view.layout) == (program, layout)
        assert (view.record.digests == digests).all()
    return len(held)


def record_whole(path: Path, num_fits: int) -> Path:
    writer = RunWriter.create(path, manifest=MANIFEST)
    for segment in range(num_fits):
        if segment:
            writer.start_segment()
        for step in range(STEPS_OF_A_FIT):
            write(writer, segment, step)
    writer.close(complete=True)
    return path


@pytest.mark.soak
def test_whole_steps_survive_every_kill(tmp_path: Path, kill_a_writer: Callable[[Path, float], None]) -> None:
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
    path = record_whole(tmp_path / "run", 1)
    (tmp_path / "run.told").write_text("".join(f"0 {step}\n" for step in range(STEPS_OF_A_FIT)))
    with pytest.raises(AssertionError):
        check(path)
    stream = path / "rank-00000" / "attempt-000.arrows"
    whole = stream.read_bytes()
    stream.write_bytes(whole[:-8])
    assert check(path) == STEPS_OF_A_FIT
    stream.write_bytes(whole[:-20])
    with pytest.raises(AssertionError):
        check(path)
    (path / "run.json").unlink()
    with pytest.raises(AssertionError, match="there is no run"):
        check(path)
