"""``det-callbacks check`` with real processes: what only a new process can have different, and an interruption."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checking import write_app

from det_callbacks import compare_runs

pytestmark = pytest.mark.slow

SECONDS = 280.0
COMMAND = (sys.executable, "-m", "det_callbacks", "check")


def test_hash_seed_and_threads_are_named(tmp_path: Path) -> None:
    script = write_app(tmp_path / "app")
    words = [*COMMAND, "--vary", "threads,hash-seed", "--to", "runs", "--", sys.executable, script.name]
    done = subprocess.run(
        [*words, "fault=set and reduction", "determinism.level=state"],
        cwd=script.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 1, done.stderr
    home = script.parent / "runs"
    verdicts = {name: compare_runs(home / "reference", home / name) for name in ("threads", "hash-seed")}
    threads, hashing = verdicts["threads"], verdicts["hash-seed"]
    assert threads.verdict == "not_comparable"
    assert threads.first_divergence is not None
    assert threads.first_divergence.name == "loss"
    assert hashing.verdict == "diverged"
    assert hashing.first_divergence is not None
    assert hashing.first_divergence.phase == "data"
    assert [entry.name for entry in hashing.environment] == ["env.PYTHONHASHSEED"]
    assert "repeats itself, bit for bit; bits depend on: threads, hash-seed; kept in" in done.stdout


def test_an_interruption_ends_the_training_and_its_workers(tmp_path: Path) -> None:
    script = write_app(tmp_path / "app")
    words = [*COMMAND, "--to", "runs", "--", sys.executable, script.name, "fault=endless", "determinism.level=state"]
    with subprocess.Popen(
        words, cwd=script.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        deadline = time.monotonic() + SECONDS
        while len(pids := sorted(script.parent.glob("*.pid"))) < 3:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert "verification" not in output
    assert "recording stopped by" in output or "KeyboardInterrupt" in output
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.stem), 0)
