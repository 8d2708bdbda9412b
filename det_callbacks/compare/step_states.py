"""What became of each step of a fit, site by site: a second pass over two runs, for a report that shows all of them.

A verdict describes the first steps that differ and counts the rest; here every step that differs is looked into. Steps
are read one at a time. What agrees by its chains is not read again.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from det_callbacks.compare.align import Alignment, align
from det_callbacks.compare.changes import Changes, find_changes
from det_callbacks.compare.origin import OriginFinder
from det_callbacks.compare.ranks import num_equal_steps
from det_callbacks.compare.record import FitRecord
from det_callbacks.runs.program import Site, StepView
from det_callbacks.runs.store import Run

Outcome = Literal["equal", "differs", "missing", "extra", "unkept", "unknown"]
"""What became of a step.

equal, differs: both runs have it, or a verification compared it and says so.
missing, extra: only the reference, or only the current run, has it.
unkept: a verification found that it differs, and did not keep it, so that nobody knows in what.
unknown: a verification kept nothing of it and does not say that it compared it.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SiteDifferences:
    """How the sites of one step differ.

    Attributes:
        reference: the step as the reference has it.
        current: the same step of the current run.
        alignment: which of their sites belong together; a row below is one of its rows.
        changes: what differs, and in what.
        rows: int64, rows that differ, ascending.
        origins: bool by entry of ``rows``: an op with nothing it read differing.
        sources: bool likewise: something that entered the step here (a batch, a weight, a generator).
        unproven: bool likewise: nothing that it read differs, and that it starts there cannot be proven all the same.
    """

    reference: StepView
    current: StepView
    alignment: Alignment
    changes: Changes
    rows: np.ndarray
    origins: np.ndarray
    sources: np.ndarray
    unproven: np.ndarray

    def places(self, row: int) -> tuple[int, int]:
        """Return the positions of a row in the reference and in the current step, -1 where there is none."""
        return int(self.alignment.reference[row]), int(self.alignment.current[row])

    def site(self, row: int) -> Site:
        """Return the site of a row: that of the current step, where it has one."""
        left, right = self.places(row)
        return self.current.program.sites[right] if right >= 0 else self.reference.program.sites[left]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOutcome:
    """What became of one step.

    Attributes:
        step: training batch.
        outcome: see ``Outcome``.
        program_id: of the side that has it, the current run's where both do.
        run: which run the program is in.
        sites: how they differ; None unless both sides are there and differ.
    """

    step: int
    outcome: Outcome
    program_id: int
    run: Run
    sites: SiteDifferences | None = None


def walk_outcomes(
    reference: Run, current: Run, rank: int, segment: int, compared: Mapping[int, FitRecord]
) -> Iterator[StepOutcome]:
    """Yield what became of each step of a fit, in order.

    A step that agrees by its chain costs nothing, one that differs some 5 milliseconds at 5,000 sites of one program,
    and 10 to 20 microseconds a site where the programs differ.

    Args:
        reference: the run that is compared with.
        current: the run that is compared; a verification's has its diverging steps only.
        rank: process.
        segment: fit.
        compared: what a verification says that it compared, by fit.

    Raises:
        ReferenceFormatError: a file is damaged.
    """
    ours, theirs = reference.rank(rank).fit(segment), current.rank(rank).fit(segment)
    num_equal = num_equal_steps(ours, theirs) if current.keeps == "all" else 0
    at_ours = {int(step): index for index, step in enumerate(ours.steps)}
    at_theirs = {int(step): index for index, step in enumerate(theirs.steps)}
    known = compared.get(segment)
    for step in sorted({*at_ours, *at_theirs}):
        left, right = at_ours.get(step, -1), at_theirs.get(step, -1)
        if right < 0:
            program_id = int(ours.program_ids[left])
            outcome = _outcome_without_current(step, keeps=current.keeps, known=known)
            yield StepOutcome(step=step, outcome=outcome, program_id=program_id, run=reference)
            continue
        program_id = int(theirs.program_ids[right])
        if left < 0:
            yield StepOutcome(step=step, outcome="extra", program_id=program_id, run=current)
            continue
        sites = None
        if left >= num_equal:
            sites = differing_sites(reference.view(rank, segment, step), current.view(rank, segment, step))
        yield StepOutcome(
            step=step,
            outcome="equal" if sites is None else "differs",
            program_id=program_id,
            run=current,
            sites=sites,
        )


def first_difference(
    reference: Run, current: Run, rank: int, segment: int, compared: Mapping[int, FitRecord]
) -> int | None:
    """Return the first step of a fit that differs or that only one run has, from the chains; None where none does.

    Reads no digests. Of a verification's folder it is the first step that it kept or says to differ.
    """
    ours, theirs = reference.rank(rank).fit(segment), current.rank(rank).fit(segment)
    if current.keeps != "all":
        known = compared.get(segment)
        named = [] if known is None else [first for first, _ in known.differing]
        return min([*named, *theirs.steps[:1].tolist()], default=None)
    num_equal = num_equal_steps(ours, theirs)
    return min([*ours.steps[num_equal:][:1].tolist(), *theirs.steps[num_equal:][:1].tolist()], default=None)


def differing_sites(reference: StepView, current: StepView) -> SiteDifferences | None:
    """Return how the sites of a step differ, the first argument as the reference has it; None when they do not."""
    alignment = align(reference, current)
    changes = find_changes(reference, current, alignment)
    if not changes.kinds:
        return None
    rows = np.fromiter(changes.kinds, dtype=np.int64, count=len(changes.kinds))
    origins, sources, unproven = (np.zeros(len(rows), dtype=bool) for _ in range(3))
    finder = OriginFinder(reference, current, alignment, changes)
    for index, row in enumerate(changes.kinds):
        if not finder.has_differing_input(row):  # few rows do not
            is_origin = finder.is_origin(row)
            origins[index], unproven[index] = is_origin is True, is_origin is None
            sources[index] = finder.is_source(row)
    return SiteDifferences(
        reference=reference,
        current=current,
        alignment=alignment,
        changes=changes,
        rows=rows,
        origins=origins,
        sources=sources,
        unproven=unproven,
    )


def _outcome_without_current(step: int, *, keeps: str, known: FitRecord | None) -> Outcome:
    if keeps == "all":
        return "missing"
    if known is None:
        return "unknown"
    if known.is_equal(step):
        return "equal"
    return "unkept" if known.differs(step) else "unknown"
