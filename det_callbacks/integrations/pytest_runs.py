"""Records the runs of a test into its folder, or verifies them against it."""

import inspect
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from det_callbacks.compare.record import VERDICT_FILE
from det_callbacks.errors import (
    DetCallbacksError,
    NothingComparedError,
    ReferenceNotFoundError,
    SelectionError,
    divergence_error,
)
from det_callbacks.integrations.lightning import DeterminismCallback
from det_callbacks.integrations.loop import TrainingRun
from det_callbacks.report.verdict import verdict_lines
from det_callbacks.runs.files import MANIFEST, REPLACEMENT, read_file, writing
from det_callbacks.runs.lock import FolderLock
from det_callbacks.runs.replacement import put_in_place, settle
from det_callbacks.runs.store import Run
from det_callbacks.settings import DeterminismSettings, enforce_determinism
from det_callbacks.training.recording import take_unfinished
from det_callbacks.verdict import Verdict
from det_callbacks.verify.judge import compare_runs

_NUMBERS: Mapping[str, Any] = {"only_steps": [0, 1], "keep_tensors": ["*"], "tensor_budget_mib": 4}
"""Default arguments for recordings whose numbers are compared."""
_CHOSEN = ("reference", "mode", "current")
"""Arguments of a callback that the fixture chooses."""
_ARGUMENTS = [
    name for name in inspect.signature(DeterminismCallback).parameters if name not in _CHOSEN
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Training:
    reference: Path
    folder: Path
    is_recording: bool
    tolerance: str | Path | None = None  # for numbers; None compares bits


class TrainingRuns:
    """The value of the fixture ``training_snapshot``; a test calls it for each run.

    The constructor seeds all generators with 0; ``close`` restores everything. ``record`` is None
    to verify, "missing" to record missing references, or "all" to also replace references that
    differ. ``command`` records the references of the test.
    """

    def __init__(
        self, *, folder: Path, record: str | None, new_folder: Callable[[], Path], command: str
    ) -> None:
        self._folder, self._record, self._new_folder, self.command = (
            folder,
            record,
            new_folder,
            command,
        )
        self._trainings: dict[str | None, _Training] = {}
        self._undo = ExitStack()
        self._undo.enter_context(enforce_determinism(DeterminismSettings.choose(seed=0)))

    def __call__(
        self,
        train: Callable[[Callable[..., TrainingRun]], Any] | None = None,
        /,
        *,
        name: str | None = None,
        settings: DeterminismSettings | Mapping[str, Any] | None = None,
        tolerance: str | Path | None = None,
        **arguments: Any,
    ) -> Any:
        """Return a DeterminismCallback that records or verifies;
        its settings are in force when this returns.

        With a ``tolerance``, it compares numbers instead of bits: a sample of 4 MiB a step (or
        ``tensor_budget_mib``) from the tensors of the first two steps, or from those that
        ``keep_tensors`` and ``only_steps`` choose. The tolerance is "torch.testing", or a folder of
        ``det-callbacks check --numerics``.

        If given a function, it calls the function with ``follow`` and returns its result; the loop
        gets its ``TrainingRun`` from ``follow(model=..., optimizers=...)``. ``name`` distinguishes
        several runs of a test.
        """
        if train is not None and not callable(train):
            raise SelectionError(
                f"training_snapshot takes a function with a training loop, but got {train!r}. Pass "
                "all other arguments by name."
            )
        if ours := [one for one in _CHOSEN if one in arguments]:
            raise SelectionError(f"training_snapshot chooses {ours[0]} itself: omit it.")
        if unknown := [one for one in arguments if one not in _ARGUMENTS]:
            raise SelectionError(
                f"training_snapshot has no argument {unknown[0]}. It takes name, tolerance, "
                f"{', '.join(_ARGUMENTS)}."
            )
        if name is not None and (not name or Path(name).name != name or name.startswith(".")):
            raise SelectionError(f"name={name!r} is not a valid folder name: use a word.")
        if name in self._trainings or (self._trainings and None in (name, *self._trainings)):
            raise SelectionError("This test has several runs: give each a different name, name=...")
        reference = self._folder if name is None else self._folder / name
        if name is None and any(self._folder.glob("*/run.json")):
            raise SelectionError(
                f"{self._folder} holds references with names: pass name=..., or remove them."
            )
        if settings is not None:
            self._undo.enter_context(enforce_determinism(settings))
        settle(reference)
        is_there = (reference / MANIFEST).exists()
        is_recording = self._record == "all" or (self._record is not None and not is_there)
        if not is_recording and not is_there:
            raise ReferenceNotFoundError(
                f"This test has no reference in {reference}. Record one and commit it:\n"
                f"    {self.command}",
                str(reference),
            )
        folder = self._new_folder() / "run"
        self._trainings[name] = _Training(
            reference=reference, folder=folder, is_recording=is_recording, tolerance=tolerance
        )
        # two recordings are compared by their numbers
        is_to_record = is_recording or tolerance is not None
        if tolerance is not None:
            arguments = {**_NUMBERS, **arguments}
        arguments |= {
            "settings": settings,
            **({"mode": "record"} if is_to_record else {"current": folder}),
        }
        place = folder if is_to_record else reference
        if train is None:
            return DeterminismCallback(place, **arguments)
        return train(partial(TrainingRun, place, **arguments))

    def finish(self) -> dict[str, str]:
        """Compare or keep the runs of a test that passed; raise if one differs or did not end.

        Returns "matched", "recorded", "re-recorded" or "unchanged" for each reference.
        """
        if (unfinished := take_unfinished()) is not None:
            raise unfinished
        for training in self._trainings.values():
            _check(training)
        done: dict[str, str] = {}
        for training in self._trainings.values():
            done[str(training.reference)] = _keep(training) if training.is_recording else "matched"
        return done

    def close(self) -> None:
        take_unfinished()  # left by a test that failed
        self._undo.close()


def _check(training: _Training) -> None:
    """Raise if a run did not end, or differs by its verdict file:
    ``ddp_spawn`` returns no attributes.
    """
    is_recorded = training.is_recording or training.tolerance is not None
    done, file = ("recorded for", MANIFEST) if is_recorded else ("compared with", VERDICT_FILE)
    if not (training.folder / file).exists():
        raise NothingComparedError(
            f"No run completed, so nothing was {done} {training.reference}. Pass the callback to a "
            "Trainer (callbacks=[callback]) and call trainer.fit, or train in "
            "`with follow(model=..., optimizers=...) as run:`."
        )
    if is_recorded and (reason := Run.open(training.folder).incomplete_reason) is not None:
        raise NothingComparedError(f"The recording is incomplete, so it is not kept: {reason}")
    if training.is_recording:
        return
    if training.tolerance is None:
        verdict = Verdict.from_dict(json.loads(read_file(training.folder / VERDICT_FILE)))
    else:
        verdict = _compared(training)
    if not _agrees(verdict):
        raise divergence_error(verdict_lines(verdict), verdict)


def _compared(training: _Training) -> Verdict:
    """Return the verdict on a recording and its reference; it compares
    numbers if there is a tolerance.
    """
    if training.tolerance is None:
        return compare_runs(training.reference, training.folder)
    ours, theirs = (Run.open(path) for path in (training.reference, training.folder))
    steps = [
        {
            (segment, *run.rank(rank).steps(segment))
            for rank in run.ranks
            for segment in run.segments
        }
        for run in (ours, theirs)
    ]
    if steps[0] != steps[1]:
        raise NothingComparedError(
            f"The run has different steps from its reference {training.reference}, so some of "
            "their numbers cannot be compared. Train as many steps, or record the reference again."
        )
    tolerance = None if training.tolerance == "torch.testing" else training.tolerance
    return compare_runs(training.reference, training.folder, numerics=True, tolerance=tolerance)


def _agrees(verdict: Verdict) -> bool:
    """Return whether a run matches its reference, in bits, or in numbers if those were compared."""
    return (
        verdict.verdict == "match" if verdict.numerics is None else not verdict.numerics.num_beyond
    )


def _keep(training: _Training) -> str:
    """Move a recording to its place, unless the reference there is equal; return the outcome."""
    target = training.reference
    is_there = (target / MANIFEST).exists()
    if is_there:
        try:
            if _agrees(_compared(training)):
                return "unchanged"
        except DetCallbacksError:  # damaged, or recorded with a different selection: replace it
            pass
    # two sessions may record at once
    with FolderLock(target).hold(instead="run one session at a time"):
        with writing(target, instead="run the tests where the folder of the test file is writable"):
            shutil.rmtree(target / REPLACEMENT, ignore_errors=True)  # left by a killed session
            shutil.copytree(training.folder, target / REPLACEMENT)
        put_in_place(target)
    return "re-recorded" if is_there else "recorded"
