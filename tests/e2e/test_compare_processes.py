"""diff in several processes: the same verdict, and nothing left behind whatever ends them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from stored_runs import SELECTION, OneOf, append, join

from det_callbacks.judge import compare_runs
from det_callbacks.runs.writer import RunWriter

pytestmark = [pytest.mark.soak, pytest.mark.ddp]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of four ranks that differ in every step of two of them."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("reference", "current"):
        for rank in range(4):
            path = folder / name
            other = name == "current" and rank > 1
            manifest = {"selection": SELECTION, "environment": {}}
            writer = join(path, rank) if rank else RunWriter.create(path, peers=OneOf(0, 4), manifest=manifest)
            append(writer, range(300), num_sites=40, seed=rank + 10 * other)
            writer.close(complete=True)
    return folder / "reference", folder / "current"


def start(pair: tuple[Path, Path], *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "det_callbacks", "diff", *map(str, pair), "--json", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def workers_of(pid: int) -> list[int]:
    """Return the processes of a session that compare."""
    return [process for process, session, line in processes() if session == pid and "spawn_main" in line]


def processes() -> Iterator[tuple[int, int, str]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
                yield int(folder.name), session, (folder / "cmdline").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue


def wait_for_workers(process: subprocess.Popen[str], number: int) -> list[int]:
    limit = time.monotonic() + 60
    while len(found := workers_of(process.pid)) < number:
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.02)
    return found


def assert_nothing_is_left(session: int) -> None:
    limit = time.monotonic() + 20
    while left := [line for _, owner, line in processes() if owner == session and line]:
        assert time.monotonic() < limit, left
        time.sleep(0.05)


@pytest.mark.parametrize("options", [[], ["--check-files"]])
def test_the_verdict_is_that_of_one_process(pair, options):
    process = start(pair, "--jobs", "3", *options)
    out, err = process.communicate(timeout=200)
    assert (process.returncode, err) == (1, "")
    assert json.loads(out) == json.loads(json.dumps(compare_runs(*pair).to_dict()))
    assert_nothing_is_left(process.pid)


def test_an_interrupt_leaves_nothing(pair):
    process = start(pair, "--jobs", "2")
    wait_for_workers(process, 2)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")
    assert_nothing_is_left(process.pid)


def test_a_process_that_is_killed_is_an_error(pair):
    process = start(pair, "--jobs", "2")
    os.kill(wait_for_workers(process, 2)[0], signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert "exit code -9" in err
    assert "--jobs 1" in err
    assert_nothing_is_left(process.pid)


def test_workers_end_when_their_parent_is_killed(pair):
    process = start(pair, "--jobs", "2")
    wait_for_workers(process, 2)
    process.kill()
    process.communicate(timeout=60)
    assert_nothing_is_left(process.pid)


def test_damage_found_by_a_process_is_the_error_of_the_command(pair, tmp_path):
    damaged = tmp_path / "damaged"
    subprocess.run(["cp", "-r", str(pair[1]), str(damaged)], check=True)
    file = damaged / "rank-00003" / "attempt-000.arrows"
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)
    process = start((pair[0], damaged), "--jobs", "2")
    out, err = process.communicate(timeout=200)
    assert (process.returncode, out) == (2, "")
    assert "step 299 is not what its chain says" in err
