"""How much of each rank was compared, and where it first differs."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from det_callbacks.compare.collectives import FirstDifference, Order, describe_first
from det_callbacks.compare.record import FitRecord, RankRecord, Tally, record_path
from det_callbacks.compare.step import StepCounter, compare_steps
from det_callbacks.runs.files import damaged
from det_callbacks.runs.program import StepView
from det_callbacks.runs.store import Run
from det_callbacks.runs.stream import Fit
from det_callbacks.verdict import Divergence


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeSteps:
    """Steps of one fit of one rank that are in only one run."""

    rank: int
    segment: int
    kind: Literal["missing", "extra"]
    first: int
    last: int
    count: int

    @property
    def order(self) -> Order:
        """Sorts before the sites of the first step."""
        return (self.segment, self.first, -1, self.rank)

    def divergence(self) -> Divergence:
        """Return the first step as a divergence."""
        return Divergence(rank=self.rank, step=self.first, phase="other", kind=self.kind, segment=self.segment)


@dataclass(slots=True, kw_only=True)
class RankFindings:
    """The result of one rank; ``first`` is None if no site differs."""

    rank: int
    tally: Tally = field(default_factory=Tally)
    first: FirstDifference | None = None
    whole: list[WholeSteps] = field(default_factory=list)

    def add_whole(self, kind: Literal["missing", "extra"], segment: int, steps: Collection[int]) -> None:
        if steps:
            known = {"first": min(steps), "last": max(steps), "count": len(steps)}
            self.whole.append(WholeSteps(rank=self.rank, segment=segment, kind=kind, **known))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWalk:
    """Compares one rank of two runs at a time.

    Equal chains at a step prove that all steps up to it are equal, so bisection finds the first one that
    differs; earlier ones are counted and not read. Damage there goes unnoticed, but cannot turn a difference
    into a match. For a verification, the record has the result of all but the first differing step.
    """

    reference: Run
    current: Run
    is_common: bool  # only common steps are compared
    records: Mapping[int, RankRecord]  # if the current run is a verification

    def compare(self, rank: int) -> RankFindings:
        """Return the result of a rank; ReferenceFormatError if a file is damaged."""
        if rank in self.records:
            return self._verified(self.records[rank])
        reference, current = self.reference.rank(rank), self.current.rank(rank)
        found, counter = RankFindings(rank=rank), StepCounter()
        for segment in sorted({*reference.segments, *current.segments}):
            reference_fit, current_fit = reference.fit(segment), current.fit(segment)
            num_equal = num_equal_steps(reference_fit, current_fit)
            if num_equal:
                self._count_equal(found.tally, rank, segment, current_fit, num_equal)
            reference_steps = set(reference_fit.steps[num_equal:].tolist())
            current_steps = set(current_fit.steps[num_equal:].tolist())
            for step in sorted(reference_steps & current_steps):
                views = self.views(rank, segment, step)
                num_compared, num_differing = counter.count(*views)
                found.tally.count([step], views[1].program, num_compared)
                found.tally.num_differing += num_differing
                if found.first is None and num_differing:
                    found.first = describe_first(compare_steps(*views), self.before(segment, step))
            if not self.is_common:
                found.add_whole("missing", segment, reference_steps - current_steps)
                found.add_whole("extra", segment, current_steps - reference_steps)
        found.tally.num_differing += sum(one.count for one in found.whole)
        found.tally.reordered |= counter.reordered
        return found

    def _verified(self, record: RankRecord) -> RankFindings:
        """Return the result of a rank from its record and the steps that its verification stored."""
        rank, path = record.rank, record_path(self.current.path, record.rank)
        found = RankFindings(rank=rank)
        found.tally.add(record.tally)
        for fit in record.fits:
            stored = self.current.rank(rank).steps(fit.segment).tolist()
            if record.is_unfinished:  # a step is stored before the record has it
                stored = stored[: fit.num_stored]
            place = f"of fit {fit.segment}"
            if len(stored) != fit.num_stored:
                raise damaged(path, f"it has {fit.num_stored} stored steps {place}, but the run has {len(stored)}")
            found.add_whole("extra", fit.segment, fit.extra)
            step = next((step for step in stored if step in fit.differing), None)
            if found.first is None and step is not None:
                difference = compare_steps(*self.views(rank, fit.segment, step))
                if difference.num_differing:
                    before = self.before(fit.segment, step)
                    is_unrestored = before == "resumed" and bool(fit.unrestored)
                    found.first = describe_first(difference, before, is_unrestored=is_unrestored)
            if found.first is None and fit.differing:
                raise damaged(path, f"it says that step {min(fit.differing)} {place} differs, but no stored step does")
        stop = record.stopped
        for segment in self.reference.rank(rank).segments if record.steps == "all" else ():
            fit = record.fit(segment) or FitRecord(segment=segment)
            missing = fit.missing(self.reference.rank(rank).steps(segment).tolist())
            if stop is not None:
                missing = {step for step in missing if (segment, step) < (stop.segment, stop.step)}
            found.add_whole("missing", segment, missing)
            found.tally.num_differing += len(missing)
        return found

    def before(self, segment: int, step: int) -> Literal["resumed", "unrecorded", ""]:
        """Return what may have changed the state before a step."""
        runs = self.reference, self.current
        is_recorded = all(run.manifest.selection.selects_step(step - 1) for run in runs)
        is_resumed = any((segment, step) in run.resumed_steps for run in runs)
        if is_resumed:
            return "resumed"
        return "unrecorded" if step and not is_recorded else ""

    def views(self, rank: int, segment: int, step: int) -> tuple[StepView, StepView]:
        return self.reference.view(rank, segment, step), self.current.view(rank, segment, step)

    def _count_equal(self, tally: Tally, rank: int, segment: int, fit: Fit, num_equal: int) -> None:
        """Count the first steps of a fit; a step of each kind and the last step are opened."""
        known = fit[["program_ids", "layout_ids", "num_digests", "steps"]][:num_equal].tolist()
        kinds: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for *kind, step in known:
            kinds[tuple(kind)].append(step)
        self.views(rank, segment, known[-1][-1])
        for steps in kinds.values():
            program = self.views(rank, segment, steps[0])[1].program
            tally.count(steps, program, len(program) * len(steps))


def num_equal_steps(reference: Fit, current: Fit) -> int:
    """Return how many first steps are equal, by their chains."""
    num_common = min(len(reference.steps), len(current.steps))
    if not num_common:
        return 0
    is_same_step = reference.steps[:num_common] == current.steps[:num_common]
    num_same = int(np.argmin(np.append(is_same_step, False)))

    def has_diverged(index: int) -> bool:
        return bool(reference.chains[index] != current.chains[index])

    return bisect_left(range(num_same), True, key=has_diverged)
