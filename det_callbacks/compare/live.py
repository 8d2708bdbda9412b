"""Verifying a run while it trains: each step is compared with the reference's as soon as it ended."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from det_callbacks.compare.answer import EvidenceFinder
from det_callbacks.compare.batches import find_batch
from det_callbacks.compare.compared import ComparedSteps, ranges_of, write_compared
from det_callbacks.compare.evidence import LiveEvidence, RunEvidence
from det_callbacks.compare.metrics import MetricComparison
from det_callbacks.compare.next_recording import with_next_recording
from det_callbacks.compare.numbers import KeptNumbers, KeptRun
from det_callbacks.compare.partial import empty_step, reached_part
from det_callbacks.compare.rank_findings import RankFindings
from det_callbacks.compare.rank_verdicts import verdict_of_ranks
from det_callbacks.compare.step import compare_steps
from det_callbacks.compare.traced import add_traced_step, compare_restored
from det_callbacks.compare.verdict_builder import VerdictBuilder
from det_callbacks.runs.environment import Environment, compare_environments, digested_on
from det_callbacks.runs.evidence import UNSEEN_WRITE, NondeterministicOp, Row
from det_callbacks.runs.files import MANIFEST, PROGRAMS, rank_folder
from det_callbacks.runs.manifest import read_manifest
from det_callbacks.runs.metrics import Reading, Readings, read_metrics
from det_callbacks.runs.peers import ALONE, END_OF_FIT, Peers
from det_callbacks.runs.program import StepView
from det_callbacks.runs.steps import Expectation, StepTrace
from det_callbacks.runs.store import Run
from det_callbacks.runs.writer import RunWriter
from det_callbacks.verdict import Counts, Divergence, Verdict

KEPT_STEPS = 100
"""Diverging steps that a verify run keeps; each is as large as in a recording."""

VERDICT_FILE = "verdict.json"
REPORT_FILE = "report.html"


class Verification:
    """Compares the steps of one process with a reference.

    Args:
        reference: the reference, already opened.
        current: folder for the diverging steps and ``verdict.json``; one that an earlier verification made is replaced.
        manifest: selection, settings and environment of the current run.
        peers: the processes that verify together; each compares its own steps.
        steps: "all" or "common".

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
        steps: str = "all",
    ) -> None:
        rank = peers.rank
        self.reference = reference
        self.current = current
        self._steps = steps
        self.rank = rank
        self._ranks = reference.rank(rank)
        self._known: dict[int, frozenset[int]] = {}
        self._is_resumed = False
        self._done: dict[int, list[int]] = {}
        self._differing: dict[int, list[int]] = {}
        self._builder = VerdictBuilder(str(reference.path), str(current))
        self._builder.set_batches(partial(find_batch, reference))
        self._evidence = LiveEvidence(rank)
        self._builder.set_evidence(EvidenceFinder(RunEvidence(reference), self._evidence))
        here = Environment.from_dict(manifest["environment"])
        self._builder.set_environment(compare_environments(reference.environment, here))
        self._builder.tally.digested_on.update(digested_on(here))
        if peers.world_size > 1:
            self._builder.set_world_size(peers.world_size)
        self._peers = peers
        self._selection = reference.selection
        is_ours = peers.do(lambda: _is_of_verification(current), task=f"looking into {current}")
        self._writer = RunWriter.create(
            current, manifest=manifest, peers=peers, purpose="verify", keeps="diverging", overwrite=is_ours
        )
        self._measure = KeptNumbers.of(reference, KeptRun.written(current, self.run_id))
        self.keep_tensors: Callable[[StepTrace, int], None] = lambda trace, step: None
        """Keeps the tensors of a step that differs, before the step."""
        self._metrics = self._metrics_of(0)
        self._judged = self._builder
        self._view: StepView | None = None
        self._num_kept = 0
        self.num_steps = 0
        self.differs_anywhere = False
        """Whether any rank differed, at the last ``finish``."""

    @property
    def has_divergence(self) -> bool:
        """Whether anything differed so far on this rank."""
        return self._builder.has_divergence

    @property
    def counts(self) -> Counts:
        """How much was compared so far on this rank."""
        return self._builder.counts

    @property
    def run_id(self) -> str:
        """Random identity of the current run."""
        return self._writer.run_id

    def chain(self, segment: int, step: int) -> int | None:
        """Return the chain at a step, which is the reference's as long as nothing differs; None after that."""
        return None if self.has_divergence or step not in self._known[segment] else self._ranks.chain(segment, step)

    @property
    def num_segments(self) -> int:
        """Fits that the reference holds."""
        return sum(len(self._ranks.steps(segment)) > 0 for segment in self._ranks.segments)

    def put_nondeterministic_ops(self, ops: Sequence[NondeterministicOp]) -> None:
        """Keep the list of ops without a deterministic implementation that were called so far."""
        self._writer.put_nondeterministic_ops(ops)

    def put_evidence(self, rows: Sequence[Row]) -> None:
        """Take what explains the step that ends."""
        self._evidence.add(rows)

    def withdraw_verdict(self) -> None:
        """Take away what was written of a verdict that no longer holds: more is compared."""
        if self._writer.is_leader:
            for name in (VERDICT_FILE, REPORT_FILE):
                (self.current / name).unlink(missing_ok=True)

    def begin_segment(self, segment: int, *, is_resumed: bool = False) -> None:
        """Start a fit; the verdict on the fits before it no longer holds.

        Args:
            segment: fit.
            is_resumed: it goes on from a checkpoint, so that its first step says whether that was restored.
        """
        self.withdraw_verdict()
        self._is_resumed = is_resumed
        known = self._ranks.steps(segment) if segment in self._ranks.segments else ()
        self._evidence.begin_segment()
        self._known[segment] = frozenset(int(step) for step in known)
        self._done[segment], self._differing[segment] = [], []
        if segment:
            self._end_metrics()
            self._metrics = self._metrics_of(segment)
            self._writer.start_segment()
        else:
            self._writer.reopen()

    def is_resuming(self, segment: int) -> bool:
        """Return whether the next step is the first one after a checkpoint was restored."""
        return self._is_resumed and not self._done[segment]

    def has_steps(self, segment: int) -> bool:
        """Return whether a fit had a step so far."""
        return bool(self._done[segment])

    def compare_state(self, segment: int, step: int, digest_state: Callable[[], Mapping[str, int]]) -> None:
        """Compare the restored state with what the reference ended the step before with, for the explanation."""
        compare_restored(self._builder, self.reference, self.rank, segment, step, digest_state)

    def expectation(self, segment: int, step: int) -> Expectation | None:
        """Return what the reference had in a step, None when it has no such step."""
        if step not in self._known[segment]:
            return None
        self._view = self.reference.view(self.rank, segment, step)
        return Expectation.of(self._view.record.digests, self._view.program)

    def set_replayed(self, replayed: Mapping[str, Any]) -> None:
        """Set what was put back from the reference, as the coverage shows it."""
        self._builder.set_replayed(replayed)

    def so_far(self, trace: StepTrace, *, segment: int, step: int, is_whole: bool = False) -> tuple[Divergence, ...]:
        """Return how a step differs, without counting it; one that the reference does not have is extra.

        Args:
            trace: of the step.
            segment: fit.
            step: training batch.
            is_whole: the step has ended, so that what the reference has and it has not is missing.
        """
        current = trace.view(rank=self.rank, step=step, segment=segment)
        reference = empty_step(current) if step not in self._known[segment] else self._reference_step(segment, step)
        if not is_whole:
            reference = reached_part(reference, current)
        return compare_steps(reference, current).divergences

    def add(self, trace: StepTrace, *, segment: int, step: int, epoch: int, is_whole: bool = True) -> bool:
        """Compare a step; return whether it differs.

        Args:
            trace: of the step.
            segment: fit.
            step: training batch.
            epoch: counted from 0.
            is_whole: False for a step that was stopped: only what it had reached is compared.
        """
        is_resumed = self.is_resuming(segment)
        if is_resumed:
            self._writer.note_resumed(step)
        self._done[segment].append(step)
        if step not in self._known[segment]:
            if self._steps == "common":
                return False
            self._builder.add_extra_step(self.rank, step, segment)
            self._keep(trace, step, epoch)
            return True
        reference = self._reference_step(segment, step)
        if not is_whole:
            reference = reached_part(reference, trace.view(rank=self.rank, step=step, segment=segment))
        self.num_steps += 1
        differs = add_traced_step(self._builder, reference, trace, epoch=epoch, is_resumed=is_resumed)
        if rows := self._evidence.end_step(segment, step, differs=differs):
            self._writer.put_evidence(rows)
        if differs:
            self._differing[segment].append(step)
            self._keep(trace, step, epoch)
        return differs

    def end_segment(self, segment: int, *, is_resumed: bool) -> None:
        """Count the steps of the reference that this fit did not have as missing.

        Args:
            segment: the fit that ended.
            is_resumed: it began in the middle, so that earlier steps are not missing.
        """
        if self._steps == "common":
            return
        self._end_metrics(with_calls=False)
        done = self._done[segment]
        first = min(done) if is_resumed and done else 0
        for step in sorted(self._known[segment].difference(done)):
            if step >= first:
                self._builder.add_missing_step(self.rank, step, segment)

    # what the module logs

    def _metrics_of(self, segment: int) -> MetricComparison:
        is_all = self._steps == "all"
        readings = Readings() if self.rank else read_metrics(self.reference, segment)
        return MetricComparison(
            readings, segment=segment, counts_missing=is_all, counts_extra=is_all, put=self._writer.put_reading
        )

    def add_metrics(self, reading: Reading) -> bool:
        """Compare what the module logged, on rank 0; return whether it differs."""
        self._writer.put_reading(reading)
        return self._metrics.add(reading, self._builder)

    def resume_metrics(self, reading: Reading, *, is_first: bool) -> None:
        """Leave out what a resumed fit may lack; ``is_first``: it begins after that, and had nothing before."""
        self._writer.put_reading(reading)
        self._metrics.resume(reading.step)
        if is_first:
            self._metrics.leave_out(before=reading.step)

    def _end_metrics(self, *, with_calls: bool = True) -> None:
        if self.rank == 0:
            self._metrics.end(self._builder, with_calls=with_calls)

    @property
    def pending_calls(self) -> tuple[str, ...]:
        """The tests and validations outside of a fit that are still to come, as rank 0 knows."""
        return self._metrics.pending_calls

    def finish(self, *, pending: int = 0) -> Verdict:
        """Write the verdict on all ranks and return it; it may be called after every fit, by all ranks.

        Args:
            pending: fits and calls of the reference that have not run yet: they are missing, and nothing is written as
                long as nothing else differs.

        Raises:
            NothingComparedError: no step was compared.
            RankError: on another rank.
        """
        builder = self._judged = self._builder_with(pending)
        builder.measure(self._measure)
        if self._peers.world_size == 1:
            verdict, self.differs_anywhere = builder.finish(), self.has_divergence
        else:
            told = self._peers.agree(
                lambda: [builder.findings(self.rank, has_steps=bool(self._done)).to_dict(), self.has_divergence],
                task=END_OF_FIT,
            )
            verdict = verdict_of_ranks(
                [RankFindings.from_dict(found) for found, _ in told],
                world_size=self._peers.world_size,
                reference=str(self.reference.path),
                current=str(self.current),
            )
            self.differs_anywhere = any(differs for _, differs in told)
        verdict = with_next_recording(verdict, self._selection)
        if not pending or self.differs_anywhere:
            self.write(verdict)
        return verdict

    def finish_alone(self) -> Verdict:
        """Write the verdict on the steps of this rank, where the others do not come to the end of the fit any more."""
        self._judged = self._builder
        self._judged.measure(self._measure)
        verdict = with_next_recording(self._judged.finish(), self._selection)
        if self._peers.world_size == 1:
            self.write(verdict)
        else:
            write_verdict(self.current / rank_folder(self.rank) / VERDICT_FILE, verdict)
        return verdict

    def _builder_with(self, pending: int) -> VerdictBuilder:
        """Return the builder, in which what is pending of the reference counts as missing."""
        builder = self._builder
        if pending and self._steps == "all":
            builder = builder.copy()
            for segment in self._ranks.segments[len(self._done) :]:
                for step in self._ranks.steps(segment):
                    builder.add_missing_step(self.rank, int(step), segment)
            if self.rank == 0:
                self._metrics.pending(builder)
        return builder

    def write_unfinished(self, verdict: Verdict) -> None:
        """Write a verdict on what never came."""
        self._end_metrics()
        self.write(verdict)

    def write(self, verdict: Verdict) -> None:
        """Write a verdict into the current run's folder, once."""
        if self._writer.is_leader:
            write_verdict(self.current / VERDICT_FILE, verdict)

    def note_compared(self) -> None:
        """Keep which steps this rank compared (those that are equal are not in its folder), and what one run lacks."""
        whole = self._judged.whole
        steps = [
            ComparedSteps(
                segment=segment,
                compared=ranges_of(self._done.get(segment, ()), known),
                differing=ranges_of(self._differing.get(segment, ()), known),
                whole=tuple(one for one in whole if one.segment == segment),
            )
            for segment in sorted({*self._done, *(one.segment for one in whole)})
            for known in (self._ranks.steps(segment).tolist(),)
        ]
        write_compared(self.current, self.rank, steps)

    def close(self, *, complete: bool) -> None:
        """Close the current run's files."""
        self._writer.close(complete=complete)

    def _reference_step(self, segment: int, step: int) -> StepView:
        known = self._view
        if known is None or (known.record.segment, known.record.step) != (segment, step):
            known = self.reference.view(self.rank, segment, step)
        return known

    def _keep(self, trace: StepTrace, step: int, epoch: int) -> None:
        if self._num_kept == KEPT_STEPS:
            return
        self._num_kept += 1
        self.keep_tensors(trace, step)
        self._writer.put_program(trace.program)
        self._writer.put_layout(trace.layout)
        self._writer.append(step, epoch, trace.program.id, trace.layout_id, trace.digests)
        if trace.unseen_writes:
            self._writer.put_evidence([Row(step, UNSEEN_WRITE, "site", at) for at in sorted(trace.unseen_writes)])
            self._writer.flush_evidence()


def free_folder(root: Path, *, kind: str = "verify") -> Path:
    """Return a folder below this one in which no verification (or what ``kind`` says) was written yet."""
    number = 0
    while (root / "determinism" / f"{kind}-{number:03d}").exists():
        number += 1
    return root / "determinism" / f"{kind}-{number:03d}"


def _is_of_verification(folder: Path) -> bool:
    """Return whether an earlier verification wrote a folder; one that was refused at its start left a verdict only."""
    if not (folder / MANIFEST).is_file():
        return (folder / VERDICT_FILE).is_file() and not (folder / PROGRAMS).exists()
    return read_manifest(folder).purpose == "verify"


def write_verdict(path: Path, verdict: Verdict) -> None:
    """Write a verdict's JSON atomically."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(verdict.to_dict(), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
