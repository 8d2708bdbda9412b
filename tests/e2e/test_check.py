"""``det-callbacks check`` on an application that depends on one thing that must not matter."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checking import Check, Checked, check, write_app
from styles import FEATURES, Classifier
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback, compare_runs
from det_callbacks.check import NUM_WORKERS_VARIABLE
from det_callbacks.errors import SettingsError
from det_callbacks.verdict import Verdict

pytestmark = LIGHTNING_ADVICE

__all__ = ["check"]

STATE = "determinism.level=state"


def verdict_of(done: Checked, name: str) -> Verdict:
    verdict = done.run(name).verdict
    assert verdict is not None
    return verdict


@pytest.mark.slow
def test_a_script_that_repeats_itself_is_a_match(check: Check) -> None:
    done = check(STATE)
    assert done.status == 0
    assert [(run.name, run.outcome) for run in done.report.runs] == [
        ("recording", "recorded"),
        ("plain", "match"),
    ]
    assert verdict_of(done, "plain").counts.steps_compared == 4
    assert "\nMATCH\nAll " in done.text
    assert "training with none" in done.text
    assert re.search(r"check: record: .*/python\S* train.py \S+ \+determinism=record", done.text)
    assert "match: the script repeats itself, bit for bit; kept in " in done.text
    home = done.report.folder
    assert sorted(path.name for path in home.iterdir()) == [".gitignore", "plain", "reference"]
    assert (home / ".gitignore").read_text() == "*\n"


def test_augmentation_in_the_main_process_depends_on_the_workers(check: Check) -> None:
    done = check(STATE, "fault=augmentation", options=("--vary", "workers"))
    assert done.status == 1
    assert [(run.name, run.outcome) for run in done.report.runs[1:]] == [("plain", "match"), ("workers", "diverged")]
    assert done.run("workers").change == "2 instead of 0"
    verdict = verdict_of(done, "workers")
    assert verdict.first_divergence is not None
    assert (verdict.first_divergence.step, verdict.cause) == (0, "data_content")
    assert "\nworkers: 2 instead of 0\nDIVERGED\n" in done.text
    assert "num_workers of train_dataloader: 0 in the reference, 2 now" in done.text
    assert re.search(r"^plain +nothing +match +- +-$", done.text, re.MULTILINE)
    assert re.search(
        r"^workers +2 instead of 0 +diverged +step 0, data: batch\[0\] +data_content$", done.text, re.MULTILINE
    )
    assert "bit for bit; bits depend on: workers; kept in" in done.text


def test_workers_that_no_loader_can_have_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else would tell that a run with another number of them was none."""
    monkeypatch.setenv(NUM_WORKERS_VARIABLE, "2")
    trainer = quiet_trainer(DeterminismCallback(tmp_path / "run", mode="record", level="state"))
    with pytest.raises(SettingsError, match="no torch DataLoader whose number of workers"):
        trainer.fit(Classifier(), [(torch.ones(2, FEATURES), torch.tensor([0, 1]))])


def test_an_application_that_builds_no_callback_is_no_match(check: Check) -> None:
    done = check(STATE, "fault=no callbacks")
    assert done.status == 2
    assert "the script failed with status" in done.report.runs[-1].reason
    assert "no DeterminismCallback ran a fit in this job" in done.errors
    assert "passes them to the Trainer" in done.text
    assert "it could not be checked whether the script repeats itself" in done.text


# real processes: what only a new one can have different, and an interruption

SECONDS = 280.0
COMMAND = (sys.executable, "-m", "det_callbacks", "check")


@pytest.mark.slow
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


@pytest.mark.slow
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
