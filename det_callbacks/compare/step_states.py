"""What became of each step of a fit, site by site: a second pass over two runs, for a report that shows all of them.

A verdict describes the first steps that differ and counts the rest; here every step that differs is looked into. Steps
are read one at a time. What agrees by its chains is not read again.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from det_callbacks.compare.differences import SiteDifferences
from det_callbacks.compare.ranks import num_equal_steps
from det_callbacks.compare.record import FitRecord
from det_callbacks.compare.step import differing_sites
from det_callbacks.runs.store import Run

Outcome = Literal["equal", "differs", "missing", "extra", "unkept", "unknown"]
"""What became of a step.

equal, differs: both runs have it, or a verification compared it and says so.
missing, extra: only the reference, or only the current run, has it.
unkept: a verification found that it differs, and did not keep it, so that nobody knows in what.
unknown: a verification kept nothing of it and does not say that it compared it.
"""


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
            sites = sites if sites is not None and sites.kinds else None
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


def _outcome_without_current(step: int, *, keeps: str, known: FitRecord | None) -> Outcome:
    if keeps == "all":
        return "missing"
    if known is None:
        return "unknown"
    if known.is_equal(step):
        return "equal"
    return "unkept" if known.differs(step) else "unknown"
