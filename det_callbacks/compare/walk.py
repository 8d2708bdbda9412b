"""Walking through the steps of one rank of two runs."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from det_callbacks.compare.verdict_builder import VerdictBuilder
from det_callbacks.runs.store import Fit, Run

_SECONDS_A_STEP = 2e-4
"""Of two runs' step of 4,000 sites each, read and compared."""
_SECONDS_AN_ALIGNED_SITE = 2e-5
"""Of either step, where their programs differ."""
_SECONDS_A_BYTE = 1e-9

Report = Callable[[int], None]
"""Called with a number of steps that were looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWalk:
    """Compares one rank of two runs at a time.

    Two runs agree up to a step exactly when their chains at it agree, so the first step that differs is found by
    bisection, and what lies before it is counted and not compared. What is proven by that, and what is trusted:

    * The chains at the last equal step are compared with the digests there, on both sides. They hold what was written
      to either file up to there: an equal pair cannot come from other steps, but by a collision of 64 bits.
    * Every step from the first difference on is read and compared with its chain.
    * With ``check_files`` every step of both files is. Without it, digests that were damaged after they were written,
      before the last equal step, are not noticed; they cannot turn a difference into a match.

    Attributes:
        reference: the run that is compared with.
        current: the run that is compared.
        is_common: only steps that both have are looked at.
        check_files: whether every step is read.
    """

    reference: Run
    current: Run
    is_common: bool
    check_files: bool

    def compare(self, rank: int, part: VerdictBuilder, report: Report) -> tuple[VerdictBuilder, int]:
        """Add the steps of a rank to an empty builder; return it, and how many steps both runs have.

        Raises:
            ReferenceFormatError: a file is damaged.
        """
        ours, theirs = self.reference.rank(rank), self.current.rank(rank)
        if self.check_files:
            for run in (ours, theirs):
                run.check_steps()
        num_common = 0
        for segment in sorted({*ours.segments, *theirs.segments}):
            num_common += self._compare_fit(part, rank, segment, report)
        return part, num_common

    def num_steps(self, rank: int) -> int:
        """Return how many steps are reported for a rank."""
        runs = self.reference.rank(rank), self.current.rank(rank)
        segments = {segment for run in runs for segment in run.segments}
        return sum(len(np.union1d(*(run.steps(segment) for run in runs))) for segment in segments)

    def has_equal_steps(self, rank: int) -> bool:
        """Return whether steps of a rank are counted as equal by their chains."""
        runs = self.reference.rank(rank), self.current.rank(rank)
        return any(num_equal_steps(*(run.fit(segment) for run in runs)) > 1 for segment in runs[0].segments)

    def estimate(self, rank: int) -> float:
        """Return about how many seconds a rank will take, by what was measured on one core of an AMD EPYC."""
        runs = self.reference.rank(rank), self.current.rank(rank)
        seconds = sum(run.num_bytes for run in runs) * _SECONDS_A_BYTE if self.check_files else 0.0
        for segment in {segment for run in runs for segment in run.segments}:
            ours, theirs = (run.fit(segment) for run in runs)
            _, left, right = np.intersect1d(ours.steps, theirs.steps, assume_unique=True, return_indices=True)
            is_left = left >= num_equal_steps(ours, theirs)
            left, right = left[is_left], right[is_left]
            is_other = ours.program_ids[left] != theirs.program_ids[right]
            num_sites = int(ours.num_digests[left][is_other].sum() + theirs.num_digests[right][is_other].sum())
            seconds += len(left) * _SECONDS_A_STEP + num_sites * _SECONDS_AN_ALIGNED_SITE
        return seconds

    def _compare_fit(self, part: VerdictBuilder, rank: int, segment: int, report: Report) -> int:
        ours, theirs = self.reference.rank(rank).fit(segment), self.current.rank(rank).fit(segment)
        num_equal = num_equal_steps(ours, theirs)
        if num_equal:
            self._add_equal(part, rank, segment, theirs, num_equal)
            report(num_equal)
        num_common = num_equal
        in_ours, in_theirs = set(ours.steps[num_equal:].tolist()), set(theirs.steps[num_equal:].tolist())
        first = int(ours.steps[0]) if len(ours.steps) else None
        resumed = self.reference.resumed_steps | self.current.resumed_steps
        for step in sorted(in_ours | in_theirs):
            if step in in_ours and step in in_theirs:
                num_common += 1
                part.add_step(
                    self.reference.view(rank, segment, step),
                    self.current.view(rank, segment, step),
                    is_first=step == first,
                    is_resumed=(segment, step) in resumed,
                )
            elif not self.is_common:
                (part.add_missing_step if step in in_ours else part.add_extra_step)(rank, step, segment)
            report(1)
        return num_common

    def _add_equal(self, part: VerdictBuilder, rank: int, segment: int, fit: Fit, num_equal: int) -> None:
        """Count the first steps of a fit; each kind of step is opened once, and the last one of all."""
        kinds = np.stack((fit.program_ids, fit.layout_ids, fit.num_digests.astype(np.uint64)), axis=1)[:num_equal]
        _, firsts, kind_of = np.unique(kinds, axis=0, return_index=True, return_inverse=True)
        for run in (self.reference, self.current):
            for index in {*firsts.tolist(), num_equal - 1}:
                run.view(rank, segment, int(fit.steps[index]))
        for kind, first in enumerate(firsts.tolist()):
            steps = fit.steps[:num_equal][kind_of.ravel() == kind].tolist()
            part.add_equal_steps(rank, segment, steps, self.current.program(int(fit.program_ids[first])))


def num_equal_steps(ours: Fit, theirs: Fit) -> int:
    """Return how many steps from the first on are equal, by their chains."""
    num_common = min(len(ours.steps), len(theirs.steps))
    if not num_common:
        return 0
    num_same = int(np.argmin(np.append(ours.steps[:num_common] == theirs.steps[:num_common], False)))
    return bisect_left(range(num_same), True, key=lambda index: bool(ours.chains[index] != theirs.chains[index]))
