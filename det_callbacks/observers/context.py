"""ObserverContext: records observations in any script, or compares them with a reference."""

import os
import warnings
from pathlib import Path
from typing import Self

import msgspec

from det_callbacks.environment.capture import capture_environment
from det_callbacks.errors import (
    DivergenceError,
    DivergenceWarning,
    NotComparableError,
    NothingComparedError,
    ReferenceFormatError,
    TraceError,
)
from det_callbacks.internals.versions import newer_than_tested
from det_callbacks.observers.observations import REGISTRY, Observations
from det_callbacks.report.console import print_closing_line
from det_callbacks.runs.replacement import settle
from det_callbacks.runs.selection import Selection
from det_callbacks.runs.store import remove_verification
from det_callbacks.runs.writer import RunWriter
from det_callbacks.settings import settings_in_force
from det_callbacks.tensors.copies import TENSOR_BUDGET_MIB, TensorBudget, check_budget
from det_callbacks.tensors.files import REPLAY, SavedStep, StepWriter
from det_callbacks.tensors.replay import Replay
from det_callbacks.trace.recorder import Recorder
from det_callbacks.verdict import Divergence, Verdict
from det_callbacks.verify.verification import Verification, open_reference, write_step

MAX_MISMATCHES = 100
_RECORDED_BY = "ObserverContext"


class ObserverContext:
    """Record the observations of a ``with`` block as a run, or compare them with a recorded run.

    It records observations (``observe`` and its companions) anywhere in the block, and ops only
    between ``enable_hash_mode`` and ``disable_hash_mode``. It records one process:
    use a different name in each.

    Args:
        dump_dir: folder for runs.
        name: name of this run, and of its folder in ``dump_dir``.
        reference: folder of the run to compare with; None records a run.
        raise_on_mismatch: raise at the end of the first step that differs. Otherwise the block ends
            with a ``DivergenceWarning``.
        overwrite: when recording, replace an existing run. Comparisons are always replaced.
        tensor_budget_mib: when recording, MiB that
            ``observe_non_deterministic`` may save in a step.

    Attributes:
        verdict: the Verdict of a comparison, or None before its end, and when recording.
        mismatches: the first 100 differences from the reference, in completed steps.

    Raises:
        ValueError: the name is not a valid folder name.
        TraceError: another observer is active, on entry.
        RunExistsError, ReferenceNotFoundError, ReferenceFormatError: a run is in
            the way, missing or damaged.
        RunInUseError, WriteError: the folder cannot be written.
        DivergenceError, NotComparableError: with ``raise_on_mismatch``; ``.verdict`` has the place.
        NothingComparedError: nothing was observed, or nothing was compared (at the end).

    Examples:
        >>> with ObserverContext("runs", "first"):
        ...     _ = observe("x", torch.ones(2))
        >>> with ObserverContext("runs", "second", reference="runs/first") as observer:
        ...     _ = observe("x", torch.ones(2))
        >>> observer.verdict.verdict
        'match'
    """

    def __init__(
        self,
        dump_dir: str | os.PathLike[str],
        name: str,
        reference: str | os.PathLike[str] | None = None,
        raise_on_mismatch: bool = False,
        *,
        overwrite: bool = False,
        tensor_budget_mib: float = TENSOR_BUDGET_MIB,
    ) -> None:
        if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\\0"):
            raise ValueError(
                f"name={name!r} is not a valid folder name: use text without separators, and "
                "neither . nor .."
            )
        self.path = Path(dump_dir) / name
        self.reference = None if reference is None else Path(reference)
        self.raise_on_mismatch = raise_on_mismatch
        self.overwrite = overwrite
        self.tensor_budget_mib = check_budget(tensor_budget_mib)
        self.verdict: Verdict | None = None
        self.mismatches: tuple[Divergence, ...] = ()
        self._recorder = Recorder(Selection())
        self._observations = Observations(
            self._recorder, owner=f"the ObserverContext of {self.path}"
        )
        self._state = "new"
        self._error: DivergenceError | None = None
        self._writer: RunWriter | None = None
        self._verification: Verification | None = None
        self._replay = Replay()
        self._step = self._num_sites = 0

    def __enter__(self) -> Self:
        if self._state != "new":
            raise TraceError(
                f"The ObserverContext of {self.path} was already entered: make a new one."
            )
        REGISTRY.activate(self._observations)
        try:
            self._open_files()
            self._recorder.places.modules.open()
            self._recorder.phase = "forward"
            self._state = "open"
            self._begin_step()
        except BaseException:  # Ctrl-C too: Python does not call __exit__
            self._leave(complete=False)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._state != "open":
                if kind is None and self._error is not None:
                    raise self._error  # the block caught it
            elif kind is None:
                self._observations.region.leave_all()
                self._end_step(is_last=True)
                self._finish()
            elif self._verification is not None:
                self.verdict = self._verification.stop(kind.__name__)
        finally:
            self._leave(complete=False)

    def next_step(self) -> None:
        """End the current step and begin the next; without a call, the whole block is step 0.

        Call it at the start or end of a loop's body; an empty first or last step is dropped.

        Raises:
            DivergenceError, NotComparableError: the step differs, and ``raise_on_mismatch`` is set.
        """
        if self._state != "open":
            raise TraceError(
                f"The ObserverContext of {self.path} is not open: call this inside its with block."
            )
        if not self._step and not self._recorder.num_sites:
            return
        self._end_step(is_last=False)
        if (
            self.raise_on_mismatch
            and self._verification is not None
            and self._verification.has_divergence
        ):
            self._finish(is_early=True)
        self._step += 1
        self._begin_step()

    def _open_files(self) -> None:
        for line in newer_than_tested():
            print_closing_line(f"det_callbacks: {line}")
        manifest = {
            "selection": Selection().to_dict(),
            "settings": settings_in_force(),
            "environment": msgspec.to_builtins(capture_environment()),
            "recorded_by": _RECORDED_BY,
        }
        if self.reference is None:
            self._writer = writer = RunWriter.create(
                self.path, manifest=manifest, overwrite=self.overwrite
            )
            saving = StepWriter(writer.stream, REPLAY, run_id=writer.manifest.run_id)
            self._replay = Replay(saving, TensorBudget(self.tensor_budget_mib))
            return
        remove_verification(self.path)
        run = open_reference(self.reference, steps="all")
        if run.manifest.recorded_by != _RECORDED_BY:
            raise ReferenceFormatError(
                f"A Trainer's DeterminismCallback recorded {self.reference}, which has no "
                "observations to compare. Verify it with DeterminismCallback, or record a "
                "reference with ObserverContext.",
                str(self.reference),
            )
        self._verification = Verification(run, self.path, manifest=manifest)
        self._verification.begin_fit(0)

    def _begin_step(self) -> None:
        verification, saved = self._verification, None
        expected = None if verification is None else verification.expectation(self._step)
        if verification is not None and expected is not None:
            saved = SavedStep.of(verification.reference, rank=0, segment=0, step=self._step)
        self._recorder.places.modules.forget()
        self._recorder.begin(expected)
        self._replay.begin(saved)
        self._observations.begin(self._replay)

    def _end_step(self, *, is_last: bool) -> None:
        self._observations.end()
        num_sites = self._recorder.num_sites
        if is_last and not num_sites and self._step:
            self._recorder.abandon()
            return
        trace = self._recorder.finish()
        self._num_sites += num_sites
        if self._writer is not None:
            self._replay.write(self._step)
            write_step(self._writer, trace.view(rank=0, step=self._step, epoch=0, segment=0))
            return
        verification = self._verification
        assert verification is not None
        differs = verification.add(trace, step=self._step, epoch=0)
        self._replay.end_step(differs=differs)
        if differs and len(self.mismatches) < MAX_MISMATCHES:
            found = verification.differences(trace, step=self._step)
            self.mismatches = (*self.mismatches, *found)[:MAX_MISMATCHES]

    def _finish(self, *, is_early: bool = False) -> None:
        if self._verification is None:
            if not self._num_sites:
                raise NothingComparedError(
                    f"Nothing was observed, so {self.path} records nothing. Call observe inside "
                    "the block, or enable_hash_mode before the code to record."
                )
            self._leave(complete=True)
            return
        if not is_early:
            self._verification.end_fit()
        self._verification.tally.replayed = self._replay.to_dict()
        self.verdict = verdict = self._verification.finish(is_early=is_early)
        self._leave(complete=True)
        if verdict.verdict == "match":
            return
        if not self.mismatches and verdict.first_divergence is not None:
            self.mismatches = (verdict.first_divergence,)  # step that only one run has
        text = (
            f"{self.path} does not match the reference {self.reference}. {verdict.explanation} "
            f"{verdict.counts.sites_differing} of {verdict.counts.sites_compared} compared sites "
            f"differ; see {self.path / 'verdict.json'}."
        )
        if not self.raise_on_mismatch:
            warnings.warn(text, DivergenceWarning, stacklevel=3)
            return
        error_class = NotComparableError if verdict.verdict == "not_comparable" else DivergenceError
        self._error = error_class(text, verdict)
        raise self._error

    def _leave(self, *, complete: bool) -> None:
        """Close everything; the first call decides whether the run is complete."""
        self._state = "left"
        self._observations.abandon()
        self._recorder.places.modules.close()
        self._recorder.abandon()
        REGISTRY.deactivate(self._observations)
        if self._verification is not None:
            self._verification.close(complete=complete)
        if self._writer is not None and self._num_sites:
            self._writer.close(complete=complete)
            settle(self.path)  # nothing can follow in this run
        elif self._writer is not None:
            self._writer.discard()
