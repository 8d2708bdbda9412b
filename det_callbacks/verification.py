"""A run that is verified while it trains: the detector stores what differs, and at the end the judge reads it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from det_callbacks.compare.metrics import MetricComparison
from det_callbacks.compare.record import REPORT_FILE, TOGETHER, VERDICT_FILE, Stop, record_path
from det_callbacks.detector import JUDGING, StepDetector, write_step
from det_callbacks.errors import NotComparableError, RankError, SelectionError
from det_callbacks.judge import compare_runs, other_world_size, require_reference
from det_callbacks.runs.environment import compare_environments
from det_callbacks.runs.evidence import NondeterministicOp, Row
from det_callbacks.runs.files import replace_atomically
from det_callbacks.runs.manifest import Manifest
from det_callbacks.runs.metrics import Reading, Readings, read_metrics
from det_callbacks.runs.peers import ALONE, END_OF_FIT, Peers
from det_callbacks.runs.steps import StepTrace
from det_callbacks.runs.store import Run
from det_callbacks.runs.writer import RunWriter
from det_callbacks.verdict import Verdict

STORED_STEPS = 100
"""Diverging steps of a rank that are stored; each is as large as in a recording."""


def open_reference(
    path: Path,
    asked: Mapping[str, Any] = MappingProxyType({}),
    *,
    steps: str,
    peers: Peers = ALONE,
) -> Run:
    """Open the reference of a verification, which is traced with the reference's selection.

    Args:
        path: folder of the reference.
        asked: the fields of a Selection, ``replay`` and ``keep_tensors``, as far as this run asks for them; all else is
            taken over from the reference.
        steps: "all" or "common"; "all" demands a complete reference.
        peers: the processes that verify together; of the reference, only what this one compares with is opened.

    Raises:
        ReferenceNotFoundError: there is none.
        ReferenceFormatError: it is damaged, or incomplete, or holds the diverging steps of a verification only.
        SelectionError: it was recorded with another selection than this run asks for.
        NotComparableError: it is of another number of processes.
    """
    run = Run.open(path, ranks=(peers.rank,))
    if run.manifest.world_size != peers.world_size:
        text = (
            f"{other_world_size(run, peers.world_size)} Nothing was trained. Verify with as many processes, or record "
            f"a reference of {peers.world_size}."
        )
        raise NotComparableError(text, Verdict.refused(str(run.path), "", text))
    require_reference(run, steps)
    manifest = run.manifest
    known = {**asdict(run.manifest.selection), "replay": manifest.replay, "keep_tensors": manifest.keep_tensors}
    others = [name for name, value in asked.items() if _unordered(value) != _unordered(known[name])]
    if others:
        raise SelectionError(
            f"The reference {path} was recorded with {_shown(known, others)}, and this run asks for "
            f"{_shown(asked, others)}. Leave that out to take over the reference's, or record again."
        )
    for segment in run.segments if not peers.rank else ():
        read_metrics(run, segment)  # so that damage is told before anything is trained
    return run


def _unordered(value: Any) -> Any:
    return frozenset(value) if isinstance(value, tuple) else value


def _shown(values: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return arguments as they would be written."""
    shown = {name: list(value) if isinstance(value := values[name], tuple) else value for name in names}
    return ", ".join(f"{name}={value!r}" for name, value in shown.items())


class Verification(StepDetector):
    """Compares a run with a reference while it trains, and lets the judge say what differs.

    Args:
        reference: the reference, already opened.
        current: folder for the diverging steps and ``verdict.json``; one that an earlier verification made is replaced.
        manifest: selection, settings and environment of the current run.
        peers: the processes that verify together; each compares its own steps.
        steps: "all" or "common".

    Attributes:
        keep_tensors: keeps the tensors of a step that differs, before the step.
        differs_anywhere: whether any rank differed, at the last ``finish``.

    Raises:
        RunExistsError: ``current`` holds a recording, or something that is not ours.
    """

    def __init__(
        self,
        reference: Run,
        current: Path,
        *,
        manifest: Mapping[str, Any],
        peers: Peers = ALONE,
        steps: Literal["all", "common"] = "all",
    ) -> None:
        super().__init__(reference, peers.rank, steps=steps)
        self.current = current
        self.keep_tensors: Callable[[StepTrace, int], None] = lambda trace, step: None
        self.differs_anywhere = False
        self._peers = peers
        self._writer = RunWriter.create(current, manifest=manifest, peers=peers, purpose="verify")
        self._environment = compare_environments(reference.manifest.environment, self._writer.manifest.environment)
        self._metrics = MetricComparison(is_common=steps == "common")
        self._metrics.begin(0, self._readings(0))
        self._num_stored = 0

    @property
    def manifest(self) -> Manifest:
        """The content of run.json of the current run."""
        return self._writer.manifest

    @property
    def num_differing(self) -> int:
        """Sites, metrics and whole steps that differ so far on this rank."""
        return self.tally.num_differing + self._metrics.num_differing

    @property
    def has_divergence(self) -> bool:
        """Whether anything differed so far."""
        return super().has_divergence or self._metrics.num_differing > 0

    @property
    def num_segments(self) -> int:
        """Fits that the reference holds."""
        return sum(len(self._ranks.steps(segment)) > 0 for segment in self._ranks.segments)

    def put_nondeterministic_ops(self, ops: Sequence[NondeterministicOp]) -> None:
        """Keep the list of ops without a deterministic implementation that were called so far."""
        self._writer.put_nondeterministic_ops(ops)

    def set_replayed(self, replayed: Mapping[str, Any]) -> None:
        """Set what was put back from the reference, as the coverage shows it."""
        self.tally.replayed = {name: dict(entry) for name, entry in replayed.items()}

    def withdraw_verdict(self) -> None:
        """Take away what was written of a verdict that no longer holds: more is compared."""
        record_path(self.current, self.rank).unlink(missing_ok=True)
        if self._peers.rank == 0:
            for name in (VERDICT_FILE, REPORT_FILE):
                (self.current / name).unlink(missing_ok=True)

    def reopen(self, manifest: Mapping[str, Any]) -> None:
        """Be ready for the first fit after a test, in the environment of the fit."""
        self._writer.reopen(manifest)
        self._environment = compare_environments(self.reference.manifest.environment, self._writer.manifest.environment)

    def begin_fit(self, segment: int, *, is_resumed: bool = False, is_every_step: bool = True) -> None:
        """Start a fit; the verdict on the fits before it no longer holds."""
        self.withdraw_verdict()
        super().begin_fit(segment, is_resumed=is_resumed, is_every_step=is_every_step)
        if segment:
            self._metrics.begin(segment, self._readings(segment))
            self._writer.start_segment()

    def add(self, trace: StepTrace, *, step: int, epoch: int, is_whole: bool = True) -> bool:
        """Compare a step; see ``StepDetector.add``."""
        if self.is_resuming:
            self._writer.note_resumed(step)
        return super().add(trace, step=step, epoch=epoch, is_whole=is_whole)

    def store(self, trace: StepTrace, step: int, epoch: int, rows: Sequence[Row] | None) -> bool:
        """Store a step in the current run, if it is one of the first."""
        if self._num_stored >= STORED_STEPS and rows is None:
            return False
        self._num_stored += 1
        if rows:
            self._writer.put_evidence(rows)
        self.keep_tensors(trace, step)
        write_step(self._writer, trace.view(rank=self.rank, step=step, epoch=epoch, segment=self.segment))
        return True

    # what the module logs

    def _readings(self, segment: int) -> Readings:
        return Readings() if self.rank else read_metrics(self.reference, segment)

    def add_metrics(self, reading: Reading) -> bool:
        """Compare what the module logged, on rank 0; return whether it differs."""
        self._writer.put_reading(reading)
        return self._metrics.add(reading)

    def resume_metrics(self, reading: Reading, *, is_first: bool) -> None:
        """Leave out what a resumed fit may lack; ``is_first``: it begins after that, and had nothing before."""
        self._writer.put_reading(reading)
        self._metrics.resume(reading.step, is_first=is_first)
        if is_first:
            self.fit.metrics_since = reading.step

    @property
    def pending_calls(self) -> tuple[str, ...]:
        """The tests and validations outside of a fit that are still to come, as rank 0 knows."""
        return self._metrics.pending_calls

    # the end

    def end_fit(self) -> None:
        """Note which steps and metrics the fit ought to have had."""
        super().end_fit()
        self._metrics.end(with_calls=False)

    def finish(self, *, is_pending: bool = False, is_early: bool = False) -> Verdict:
        """Close the files, and return the judge's verdict on all ranks; all of them call it, after every fit.

        Args:
            is_pending: fits or tests of the reference have not run yet. They are missing in the verdict, and as long as
                nothing else differs it is not written.
            is_early: the run was stopped because it differs, so that its later steps are not missing.

        Raises:
            NothingComparedError: no step was compared.
            RankError: on the other ranks, when rank 0 could not judge.
        """

        def seal() -> bool:
            self._seal(TOGETHER if is_early else "")
            return self.has_divergence

        self.differs_anywhere = any(self._peers.gather(seal, task=END_OF_FIT))
        try:
            verdict = Verdict.from_dict(self._peers.broadcast(self._judge, task=JUDGING))
        except RankError as error:
            raise RankError(
                f"No verdict: {error} All ranks have closed their files, so that it can be had later: "
                f"det-callbacks diff {self.reference.path} {self.current}",
                error.rank,
                error.exit_code,
            ) from error
        if not is_pending or self.differs_anywhere:
            self.write(verdict)
        return verdict

    def stop(self, reason: str) -> Verdict | None:
        """Close the files: an exception ended the run, and the others may not be here.

        Returns:
            The verdict of one process that differs. Of several processes whoever asks later gets one.
        """
        self._seal(reason, complete=False)
        if not self.has_divergence or self._peers.world_size > 1:
            return None
        verdict = compare_runs(self.reference.path, self.current)
        self.write(verdict)
        return verdict

    def _judge(self) -> dict[str, Any]:
        return compare_runs(self.reference.path, self.current).to_dict()

    def _seal(self, reason: str, *, complete: bool = True) -> None:
        """Close the files of this rank; ``reason`` says why it was stopped, "" where it was not."""
        self._writer.close(complete=complete)
        last = max(self.fit.compared | self.fit.extra, default=-1)
        is_within = self.is_stopped_within
        stop = Stop(segment=self.segment, step=last, reason=reason, is_within=is_within) if reason else None
        self.write_record(self._writer, self._environment, stop)

    def write(self, verdict: Verdict) -> None:
        """Write a verdict into the current run's folder, once."""
        if self._peers.rank == 0:
            write_verdict(self.current, verdict)

    def close(self, *, complete: bool) -> None:
        """Close the current run's files; may be called more than once."""
        self._writer.close(complete=complete)


def write_verdict(folder: Path, verdict: Verdict) -> None:
    """Write a verdict's JSON into the folder of a verification, atomically."""
    replace_atomically(folder / VERDICT_FILE, json.dumps(verdict.to_dict(), indent=1).encode())


def free_folder(root: Path, *, kind: str = "verify") -> Path:
    """Return a folder below this one in which no verification (or what ``kind`` says) was written yet."""
    number = 0
    while (root / "determinism" / f"{kind}-{number:03d}").exists():
        number += 1
    return root / "determinism" / f"{kind}-{number:03d}"
