"""The detector: steps are compared with a reference's as soon as they end, and those that differ are stored.

It says nothing about a difference but that there is one. What it means is found by the judge, in what was stored.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np

from det_callbacks.compare.differences import num_leading_sites
from det_callbacks.compare.evidence import BATCH, from_batch_start
from det_callbacks.compare.record import FitRecord, RankRecord, Stop, Tally, write_record
from det_callbacks.compare.step import StepCounter, compare_steps, reached_part
from det_callbacks.runs.evidence import UNSEEN_WRITE, Row
from det_callbacks.runs.program import StepView
from det_callbacks.runs.steps import Expectation, StepTrace
from det_callbacks.runs.store import Run
from det_callbacks.runs.writer import RunWriter
from det_callbacks.verdict import Divergence, EnvironmentDifference

JUDGING = "judging the two runs"
"""The task in which the other ranks wait for rank 0."""


class StepDetector:
    """Compares the steps of one process with a reference's; whoever inherits it stores those that differ.

    An equal step of the same program costs one comparison of two arrays.

    Args:
        reference: opened.
        rank: of this process.
        steps: "all", or "common": steps that the reference has not are left out.

    Attributes:
        tally: what was compared so far, but metrics.
        fit: what was compared of the fit under way.
        is_resuming: the next step is the first one after a checkpoint was restored.
        is_stopped_within: of the last step only what it had reached was compared.
    """

    def __init__(self, reference: Run, rank: int, *, steps: Literal["all", "common"] = "all") -> None:
        self.reference = reference
        self.rank = rank
        self.tally = Tally()
        self.fit = FitRecord(segment=0)
        self.is_resuming = self.is_stopped_within = False
        self._steps = steps
        self._ranks = reference.rank(rank)
        self._fits: list[FitRecord] = []
        self._known: frozenset[int] = frozenset()
        self._view: StepView | None = None
        self._rows: list[Row] = []
        self._lasting: dict[str, Row] = {}
        self._is_explained = self._lacks_steps = False
        self._counter = StepCounter()

    def store(self, trace: StepTrace, step: int, epoch: int, rows: Sequence[Row] | None) -> bool:
        """Store a step; return False where it was left out.

        Args:
            trace: of the step.
            step: training batch.
            epoch: counted from 0.
            rows: the evidence that explains the first step that differs, which is not to be left out; None of others.
        """
        raise NotImplementedError

    def begin_fit(self, segment: int, *, is_resumed: bool = False, is_every_step: bool = True) -> None:
        """Start a fit.

        Args:
            segment: its number.
            is_resumed: it goes on from a checkpoint, and what comes before its first step is not missing.
            is_every_step: no step is left out, so that its first step says how the checkpoint was restored.
        """
        self.fit = FitRecord(segment=segment, is_resumed=is_resumed)
        self._fits.append(self.fit)
        self.is_resuming = is_resumed and is_every_step
        self._known = frozenset(self._ranks.steps(segment).tolist() if segment in self._ranks.segments else ())
        self._rows.clear()
        self._lasting.clear()

    @property
    def segment(self) -> int:
        """Number of the fit under way."""
        return self.fit.segment

    @property
    def has_steps(self) -> bool:
        """Whether this fit had a step so far."""
        return bool(self.fit.compared or self.fit.extra)

    @property
    def has_divergence(self) -> bool:
        """Whether anything differed so far."""
        return self._lacks_steps or self.tally.num_differing > 0

    def holds(self, step: int) -> bool:
        """Return whether the reference has a step of this fit."""
        return step in self._known

    def compare_state(self, step: int, digest_state: Callable[[], Mapping[str, int]]) -> None:
        """Note which restored state is not what the reference ended the step before with.

        Nothing is done at level "op", whose steps record what they read, nor where the reference lacks that step.
        """
        if self.reference.manifest.selection.level != "op" and step - 1 in self._known:
            before = self.reference.view(self.rank, self.fit.segment, step - 1)
            self.fit.unrestored = _find_unrestored(before, digest_state())

    def expectation(self, step: int) -> Expectation | None:
        """Return what the reference had in a step, None when it has no such step."""
        return Expectation.of(self._reference_step(step).record.digests) if step in self._known else None

    def chain(self, step: int) -> int | None:
        """Return the chain at a step, which is the reference's as long as nothing differs; None after that."""
        return None if self.has_divergence or step not in self._known else self._ranks.chain(self.fit.segment, step)

    def put_evidence(self, rows: Iterable[Row]) -> None:
        """Take what explains the step that ends, as long as it may be the first that differs."""
        if not self._is_explained:
            self._rows.extend(rows)

    def so_far(self, trace: StepTrace, *, step: int, is_whole: bool = False) -> tuple[Divergence, ...]:
        """Return how a step that the reference has differs, without counting it.

        Args:
            trace: of the step.
            step: training batch.
            is_whole: the step has ended, so that what the reference has and it has not is missing.
        """
        if step not in self._known:
            return ()
        current = trace.view(rank=self.rank, step=step, segment=self.fit.segment)
        reference = self._reference_step(step)
        return compare_steps(reference if is_whole else reached_part(reference, current), current).divergences

    def add(self, trace: StepTrace, *, step: int, epoch: int, is_whole: bool = True) -> bool:
        """Compare a step; return whether it differs.

        Args:
            trace: of the step.
            step: training batch.
            epoch: counted from 0.
            is_whole: False for a step that was stopped: only what it had reached is compared.
        """
        fit, self.is_resuming, self.is_stopped_within = self.fit, False, not is_whole
        if step not in self._known:
            if self._steps == "common":
                return False
            fit.extra.add(step)
            self.tally.num_differing += 1
            fit.num_stored += self.store(trace, step, epoch, None)
            return True
        fit.compared.add(step)
        num_compared, num_differing = self._compare(self._reference_step(step), trace, is_whole=is_whole)
        self.tally.count([step], trace.program, num_compared)
        if not num_differing:
            # settings of loaders and hooks of callbacks hold until they are noted again
            self._lasting.update((row.name, row) for row in self._rows if row.text and row.point != BATCH)
            self._rows = [*from_batch_start(row for row in self._rows if row.step == step)]
            return False
        self.tally.num_differing += num_differing
        fit.differing.add(step)
        rows = None if self._is_explained else (*self._lasting.values(), *self._rows)
        self._is_explained = True
        fit.num_stored += self.store(trace, step, epoch, rows)
        return True

    def _compare(self, reference: StepView, trace: StepTrace, *, is_whole: bool) -> tuple[int, int]:
        """Return how many sites were compared, and how many differ."""
        record = reference.record
        is_same = record.program_id == trace.program.id and record.layout_id == trace.layout_id
        if is_same and np.array_equal(record.digests, trace.digests):
            return len(trace.digests), 0
        current = trace.view(rank=self.rank, step=record.step, segment=record.segment)
        return self._counter.count(reference if is_whole else reached_part(reference, current), current)

    def _reference_step(self, step: int) -> StepView:
        known = self._view
        if known is None or (known.record.segment, known.record.step) != (self.fit.segment, step):
            known = self._view = self.reference.view(self.rank, self.fit.segment, step)
        return known

    def end_fit(self) -> None:
        """Note whether the fit lacks steps that it ought to have had."""
        self._lacks_steps |= self._steps == "all" and bool(self.fit.missing(self._known))

    def write_record(
        self, writer: RunWriter, environment: tuple[EnvironmentDifference, ...] = (), stop: Stop | None = None
    ) -> None:
        """Write what was compared, beside the steps that were stored; ``environment`` is how it differs."""
        record = RankRecord(
            run_id=writer.manifest.run_id,
            reference_id=self.reference.manifest.run_id,
            rank=self.rank,
            steps=self._steps,
            fits=tuple(self._fits),
            tally=self.tally,
            environment=environment,
            stopped=stop,
        )
        write_record(writer.path, record)


def write_step(writer: RunWriter, view: StepView) -> None:
    """Store a step, with what tells the judge which of its sites are no origins for sure."""
    record = view.record
    writer.put_program(view.program)
    writer.put_layout(view.layout)
    writer.append(record.step, record.epoch, record.program_id, record.layout_id, record.digests)
    writer.put_values(record.step, view.read_values())
    if view.unseen_writes:
        writer.put_evidence([Row(record.step, UNSEEN_WRITE, "site", at) for at in sorted(view.unseen_writes)])
    writer.flush_evidence()


def _find_unrestored(before: StepView, state: Mapping[str, int]) -> tuple[str, ...]:
    """Return the names of parameters, buffers and optimizer state that differ, or that only one side has.

    Levels below "op" do not record what a step reads, so that only this tells state that came out of a checkpoint with
    other bits from a step that computed something else. Something between the two steps may have changed it too.

    Args:
        before: the reference's step before the one that the run resumes with.
        state: name -> digest, or the 64 bits of a number, as the resumed run finds them.
    """
    first = num_leading_sites(before.program)
    left = {
        site.name: int(digest)
        for site, digest in zip(before.program.sites[first:], before.record.digests[first:], strict=True)
        if site.phase == "state" and site.role == "named" and site.name is not None
    }
    changed = [name for name, bits in state.items() if left.get(name) != bits]
    # beside the state the step recorded what training_step returned; state of an optimizer is of a parameter
    missing = [name for name in left if name not in state and " of " in name and name.rpartition(" of ")[2] in state]
    return (*changed, *missing)
