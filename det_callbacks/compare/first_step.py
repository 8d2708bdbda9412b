"""The first step that differs between two runs, by their chains: no other step is read.

Two runs agree up to a step exactly when their chains at it agree, so what was recorded at the cheapest level for a
whole training says where to look with the dearest one.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from det_callbacks.compare.numbers import KeptNumbers, KeptRun
from det_callbacks.compare.runs import begin_verdict
from det_callbacks.compare.step import compare_steps
from det_callbacks.compare.verdict_builder import VerdictBuilder
from det_callbacks.compare.walk import num_equal_steps
from det_callbacks.errors import NothingComparedError, ReferenceFormatError, SelectionError
from det_callbacks.trace.store import Fit, Run
from det_callbacks.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """Where a rank first differs.

    Attributes:
        segment: fit.
        step: training batch.
        rank: process.
        last_equal: the recorded step before it, which agrees; None where there is none.
    """

    segment: int
    step: int
    rank: int
    last_equal: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """The first step that differs, and what of it.

    Attributes:
        ranks: those that differ, each with its first step, in the order (fit, step, rank); () where all agree.
        num_equal: steps that agree by their chains, of all ranks together.
        last_equal: the last of them; None where there is none.
        longer: the run that goes on where the other ends, and agrees up to there; None where both end alike.
        verdict: on the first differing step of each rank; None where all agree. ``not_comparable`` where the machine
            differs so that it can change bits, or the runs are of another number of processes.
    """

    ranks: tuple[RankStep, ...]
    num_equal: int
    last_equal: int | None
    longer: str | None
    verdict: Verdict | None

    @property
    def exit_code(self) -> int:
        """0 no step differs, 1 one does, 3 not comparable."""
        return 0 if self.verdict is None else self.verdict.exit_code


def find_first_step(ours: Run, theirs: Run, reference: str | Path, current: str | Path) -> FirstStep:
    """Find the first step that differs, of each rank.

    A bisection of the chains: a few microseconds, and two steps to read a rank. Where chains differ and the steps do
    not (of one the epoch, or a program that recorded less is another one), the steps after it are read one by one.

    Args:
        ours: the reference, opened.
        theirs: the run that is compared with it: a recording of the same steps, or the folder of a verification, whose
            first step is the first that differs.
        reference: name of the one, as it was given.
        current: of the other.

    Raises:
        ReferenceFormatError: a file is damaged, or the reference is the folder of a verification.
        SelectionError: the runs recorded other modules, phases, levels or steps.
        NothingComparedError: they have no step in common.
    """
    if ours.keeps != "all":
        raise ReferenceFormatError(
            f"{reference} is no reference: a verification wrote it, and kept its diverging steps only. Name the run "
            "that was recorded first, and this one second.",
            str(reference),
        )
    builder = begin_verdict(ours, theirs, reference, current)
    if ours.world_size != theirs.world_size:
        return FirstStep(ranks=(), num_equal=0, last_equal=None, longer=None, verdict=builder.finish())
    search = _Search(ours, theirs, builder)
    found = [step for rank in ours.ranks if rank in theirs.ranks if (step := search.find(rank)) is not None]
    if not found and not search.num_equal:
        raise NothingComparedError(
            f"{reference} and {current} have no step in common, so nothing was compared. That is no match. Check that "
            "they are recordings of the same training."
        )
    if not found and theirs.keeps != "all" and not theirs.is_complete:
        raise NothingComparedError(
            f"{current} holds no diverging step, and the verification that wrote it was stopped: {current} is no proof "
            "that the runs agree. Verify again, or record this training and compare the two recordings."
        )
    builder.set_agreeing({*ours.ranks} - {step.rank for step in found})
    builder.measure(KeptNumbers.of(ours, KeptRun.of(theirs, "the current run")))
    found.sort(key=lambda step: (step.segment, step.step, step.rank))
    return FirstStep(
        ranks=tuple(found),
        num_equal=search.num_equal,
        last_equal=found[0].last_equal if found else search.last_equal,
        longer=None if found else search.longer(str(reference), str(current)),
        verdict=builder.finish() if found else None,
    )


class _Search:
    """Looks for the first difference of one rank after the other, and adds it to a builder."""

    def __init__(self, ours: Run, theirs: Run, builder: VerdictBuilder) -> None:
        self._ours, self._theirs, self._builder = ours, theirs, builder
        self._lengths = (0, 0)
        self._resumed = ours.resumed_steps | theirs.resumed_steps
        self.num_equal = 0
        self.last_equal: int | None = None

    def longer(self, reference: str, current: str) -> str | None:
        """Return the name of the run that has more steps."""
        ours, theirs = self._lengths
        return None if ours == theirs or self._theirs.keeps != "all" else reference if ours > theirs else current

    def find(self, rank: int) -> RankStep | None:
        """Return where a rank first differs, None where it agrees as far as both go."""
        ours, theirs = self._ours.rank(rank), self._theirs.rank(rank)
        look = self._look if self._theirs.keeps == "all" else self._look_at_kept
        for segment in sorted({*ours.segments, *theirs.segments}):
            fits = ours.fit(segment), theirs.fit(segment)
            self._lengths = (self._lengths[0] + len(fits[0].steps), self._lengths[1] + len(fits[1].steps))
            if (found := look(rank, segment, *fits)) is not None:
                return found
        return None

    def _look(self, rank: int, segment: int, ours: Fit, theirs: Fit) -> RankStep | None:
        num_equal = num_equal_steps(ours, theirs)
        for index in range(num_equal, min(len(ours.steps), len(theirs.steps))):
            step = int(ours.steps[index])
            if step != theirs.steps[index]:
                raise SelectionError(
                    f"{self._ours.path} and {self._theirs.path} did not record the same steps: after {index} that are "
                    f"the same, the first has step {step} and the second step {int(theirs.steps[index])} (fit "
                    f"{segment}, rank {rank}). Chains tell of equal steps only: compare what both have with "
                    "det-callbacks diff --steps common, or record both with the same every_n_steps."
                )
            if self._differs(rank, segment, step, is_first=index == 0):
                self._count(ours.steps[:index])
                return RankStep(
                    segment=segment, step=step, rank=rank, last_equal=int(ours.steps[index - 1]) if index else None
                )
        self._count(ours.steps[: len(theirs.steps)])
        return None

    def _look_at_kept(self, rank: int, segment: int, ours: Fit, kept: Fit) -> RankStep | None:
        """Look into a verification: it counted equal steps and kept those that differ."""
        if not len(kept.steps):
            self._count(ours.steps)
            return None
        step = int(kept.steps[0])
        before = ours.steps[ours.steps < step]
        self._count(before)
        if step not in ours.steps:
            self._builder.add_extra_step(rank, step, segment)
        elif not self._differs(rank, segment, step, is_first=not len(before)):
            raise ReferenceFormatError(
                f"{self._theirs.path} holds step {step} of rank {rank} as a diverging one, and it is that of "
                f"{self._ours.path}: it was verified against another run. Name the reference that it was verified "
                "against.",
                str(self._theirs.path),
            )
        return RankStep(segment=segment, step=step, rank=rank, last_equal=int(before[-1]) if len(before) else None)

    def _differs(self, rank: int, segment: int, step: int, *, is_first: bool) -> bool:
        views = [run.view(rank, segment, step) for run in (self._ours, self._theirs)]
        if not compare_steps(*views, limit=1).num_differing:
            return False
        self._builder.add_step(*views, is_first=is_first, is_resumed=(segment, step) in self._resumed)
        return True

    def _count(self, steps: np.ndarray | Iterable[int]) -> None:
        known = list(steps)
        self.num_equal += len(known)
        if known:
            self.last_equal = int(known[-1])
