"""A training that is killed at a random moment leaves a run that opens and says what it is."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults import STEPS

from det_callbacks import ReferenceFormatError, compare_runs
from det_callbacks.runs.store import Run

TRAIN = f"""
import sys
sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]!r}
from lightning.pytorch import seed_everything
from faults import Training
seed_everything(0)
Training(options={{"max_epochs": int(sys.argv[2])}}).record(sys.argv[1])
"""
STREAM = "rank-00000/attempt-000.arrows"
EPOCHS = 200


def start(folder: Path, epochs: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", TRAIN, str(folder), str(epochs)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference") / "run"
    assert start(folder, EPOCHS).wait(timeout=280) == 0
    assert Run.open(folder).is_complete
    return folder


@pytest.mark.soak
@pytest.mark.parametrize("number", range(3))
def test_a_killed_training_can_be_compared_up_to_there(number: int, reference: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, EPOCHS)
    try:
        deadline = time.monotonic() + 120
        while not (folder / STREAM).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(random.uniform(0.5, 4))
        assert process.poll() is None, "it ended before it was killed"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    run = Run.open(folder)
    assert not run.is_complete
    assert STREAM in str(run.incomplete_reason)
    steps = run.rank(0).steps(0).tolist()
    assert 0 < len(steps) < STEPS * EPOCHS
    assert steps == list(range(len(steps)))
    assert f"{steps[-1]} is the last whole step" in str(run.incomplete_reason)
    for step in (0, steps[-1]):
        view = run.view(0, 0, step)
        assert len(view.program) == len(view.record.digests) > 100

    verdict = compare_runs(reference, folder, steps="common")
    assert verdict.verdict == "match"
    assert verdict.counts.steps_compared == len(steps)
    assert "The current run is incomplete" in verdict.explanation
    assert compare_runs(reference, folder).verdict == "diverged"
    with pytest.raises(ReferenceFormatError, match="incomplete"):
        compare_runs(folder, reference)
    assert compare_runs(folder, reference, steps="common").verdict == "match"
