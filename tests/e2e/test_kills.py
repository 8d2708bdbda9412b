"""Processes that are killed at any moment, while they record, overwrite, resume or save
checkpoints; nothing is lost.

The moment is a random share of the time that an undisturbed process takes, so each kill hits
another instruction.
"""

import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from fits import Fit
from forks import end_with
from lightning.pytorch.callbacks import ModelCheckpoint
from loops import Loop

from det_callbacks import (
    DeterminismCallback,
    ReferenceNotFoundError,
    TrainingRun,
    check_checkpoint,
    compare_runs,
)
from det_callbacks.errors import (
    DivergenceWarning,
    NothingComparedError,
    ReferenceFormatError,
    RunExistsError,
)
from det_callbacks.runs.store import make_room

NUM_STEPS = 12
KILLS = pytest.mark.parametrize(
    "num_kills", [4, pytest.param(350, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)


def start(body: Callable[[], Any], folder: Path) -> int:
    process = os.fork()
    if not process:
        end_with(body, os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
    return process


def wait(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def run_whole(body: Callable[[], Any], folder: Path) -> float:
    """Run a body to its end; return the seconds it took."""
    started = time.monotonic()
    assert wait(start(body, folder)) == 0, (folder / "output.txt").read_text()
    return time.monotonic() - started


def kill_after(seconds: float, body: Callable[[], Any], folder: Path) -> bool:
    """Run a body and kill it; return whether it was still running."""
    process = start(body, folder)
    time.sleep(seconds)
    os.kill(process, signal.SIGKILL)
    status = wait(process)
    assert status in (0, -signal.SIGKILL), (folder / "output.txt").read_text()
    return status != 0


def record(path: Path, *, first: int = 0, overwrite: bool = False) -> None:
    """Record a loop from step ``first`` on; the steps before it run unrecorded,
    as if a checkpoint restored them.
    """
    loop = Loop()
    run = TrainingRun(
        path, mode="record", model=loop.model, optimizers=loop.optimizers, overwrite=overwrite
    )
    batches = (batch for _ in range(2) for batch in loop.loader)
    for batch in islice(batches, first):
        loop.train_step(batch)
    if first:
        run.resume_from(step=first)
    with run:
        for batch in batches:
            with run.step(batch):
                loop.train_step(batch)


def num_steps_equal(whole: Path, path: Path) -> int:
    """Return how many steps a folder holds; each of them has to
    match the uninterrupted recording.
    """
    try:
        verdict = compare_runs(whole, path, steps="common")
    except (ReferenceNotFoundError, NothingComparedError):
        return 0
    assert verdict.verdict == "match", verdict.explanation
    return verdict.counts.steps_compared


@KILLS
def test_a_killed_recording_holds_whole_steps_and_can_be_continued(num_kills, tmp_path):
    chance, whole, path = random.Random(1), tmp_path / "whole", tmp_path / "run"
    seconds = run_whole(lambda: record(whole), tmp_path)
    for _ in range(num_kills):
        before = num_steps_equal(whole, path)
        if before == NUM_STEPS:
            shutil.rmtree(path)
            before = 0
        first = chance.randint(1, before) if before else 0
        recording = partial(record, path, first=first, overwrite=not first and path.exists())
        kill_after(chance.uniform(0, seconds), recording, tmp_path)
        assert num_steps_equal(whole, path) >= before
    first = num_steps_equal(whole, path) % NUM_STEPS
    run_whole(partial(record, path, first=first, overwrite=not first), tmp_path)
    assert compare_runs(whole, path).verdict == "match"


@KILLS
def test_a_killed_verification_tells_what_differed_before_and_is_never_a_match(num_kills, tmp_path):
    reference, current = tmp_path / "reference", tmp_path / "current"
    run_whole(lambda: record(reference), tmp_path)

    def verify(dies_at: int = -1) -> None:
        warnings.simplefilter("ignore", DivergenceWarning)
        loop = Loop()
        kept = {"on_divergence": "warn", "current": current}
        with TrainingRun(reference, model=loop.model, optimizers=loop.optimizers, **kept) as run:
            for step, batch in enumerate(batch for _ in range(2) for batch in loop.loader):
                with run.step(batch):
                    loop.train_step(batch)
                    if step == dies_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                if step == 3:
                    next(loop.model.parameters()).data[0] += 1e-3

    assert wait(start(partial(verify, dies_at=8), tmp_path)) == -signal.SIGKILL
    verdict = compare_runs(reference, current)
    assert "was killed, or is still running: it compared steps until 7" in verdict.explanation
    assert (verdict.cause, verdict.counts.steps_compared) == ("external_write", 8)
    chance, found = random.Random(4), {verdict.first_divergence and verdict.first_divergence.step}
    seconds = run_whole(verify, tmp_path)
    for _ in range(num_kills):
        shutil.rmtree(current, ignore_errors=True)  # it may have been killed before it made one
        kill_after(chance.uniform(0.3, 1) * seconds, verify, tmp_path)
        try:
            verdict = compare_runs(reference, current)
        except (NothingComparedError, ReferenceFormatError, ReferenceNotFoundError):
            continue
        assert verdict.verdict == "diverged"
        found.add(verdict.first_divergence and verdict.first_divergence.step)
    assert found == {4}


@KILLS
def test_a_kill_while_a_run_is_replaced_leaves_the_earlier_or_the_later_one_whole(
    num_kills, tmp_path
):
    chance, whole, path = random.Random(2), tmp_path / "whole", tmp_path / "run"
    seconds = run_whole(lambda: record(whole), tmp_path)
    run_whole(lambda: record(path), tmp_path)
    for _ in range(num_kills):
        kill_after(
            chance.uniform(0, 1.2 * seconds), partial(record, path, overwrite=True), tmp_path
        )
        if not (path / "run.json").exists():  # one was removed, and the other is not there yet
            with pytest.raises(RunExistsError):
                make_room(path)
        verdict = compare_runs(whole, path)
        assert (verdict.verdict, verdict.counts.steps_compared) == ("match", NUM_STEPS), (
            verdict.explanation
        )


@KILLS
def test_a_kill_while_checkpoints_are_saved_leaves_digests_that_agree_or_none(num_kills, tmp_path):
    def fit() -> None:
        callback = DeterminismCallback(
            tmp_path / "run", mode="record", level="state", overwrite=True
        )
        saving = ModelCheckpoint(
            tmp_path / "checkpoints",
            every_n_train_steps=1,
            save_top_k=2,
            monitor="step",
            mode="max",
        )
        Fit(callback, saving, enable_checkpointing=True, max_epochs=3).run()

    chance, num_checked = random.Random(3), 0
    seconds = run_whole(fit, tmp_path)
    for _ in range(num_kills):
        kill_after(chance.uniform(0, seconds), fit, tmp_path)
        for sidecar in (tmp_path / "checkpoints").glob("*.digests.json"):
            assert check_checkpoint(str(sidecar).removesuffix(".digests.json")).equal
            num_checked += 1
    assert num_checked
