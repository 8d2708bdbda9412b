"""Comparing two recorded runs: which steps are there, and what the verdict on them is."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from det_callbacks.compare.batches import find_batch
from det_callbacks.compare.live import reference_environment
from det_callbacks.compare.verdict_builder import VerdictBuilder
from det_callbacks.environment import compare_environments
from det_callbacks.errors import NothingComparedError, ReferenceFormatError, SelectionError
from det_callbacks.trace.store import RankRun, Run
from det_callbacks.verdict import Verdict

_SELECTION_KEYS = ("level", "modules", "phases")


def compare_runs(
    reference: str | Path,
    current: str | Path,
    *,
    steps: Literal["all", "common"] = "all",
    progress: Callable[[int, int], None] | None = None,
) -> Verdict:
    """Compare a recorded run with its reference, bit for bit.

    Both runs are read as a stream, one step at a time; memory does not grow with their length. Each step of both is
    read and checked against its chain (at memory speed, some 100 microseconds a step); up to the first difference,
    which is found in the chains by bisection, nothing else happens to it.

    Args:
        reference: folder of the reference.
        current: folder of the run to compare. Of one that kept its diverging steps only (a verification's), only those
            are compared.
        steps: "all" demands exactly the reference's steps: another one, or one that is not there, is a divergence.
            "common" compares the steps that both runs have.
        progress: called with the number of steps looked at so far, and that of all.

    Returns:
        The verdict; the ``exit_code`` of the command line is its own. Runs of another number of processes are
        ``not_comparable`` and are not looked into.

    Raises:
        ReferenceNotFoundError: there is no run at one of the paths.
        ReferenceFormatError: a file of a run is damaged, or the reference is incomplete and ``steps`` is "all".
        SelectionError: the runs recorded other modules, phases or another level.
        NothingComparedError: the runs have no step in common, or no site.
        ValueError: ``steps`` is another word.

    Example:
        >>> compare_runs("refs/run1", "runs/today").verdict  # doctest: +SKIP
        'match'
    """
    if steps not in ("all", "common"):
        raise ValueError(f'steps must be "all" or "common"; got {steps!r}.')
    ours, theirs = Run.open(reference), Run.open(current)
    builder = VerdictBuilder(str(reference), str(current))
    builder.set_batches(partial(find_batch, ours))
    builder.set_environment(compare_environments(reference_environment(ours), reference_environment(theirs)))
    if ours.world_size != theirs.world_size:
        builder.refuse(
            f"The reference ran on {ours.world_size} process{'es' * (ours.world_size != 1)} and this run on "
            f"{theirs.world_size}: each sees other batches, so no step of one is a step of the other"
        )
        return builder.finish()
    _require_same_selection(ours.manifest, theirs.manifest, reference, current)
    builder.set_world_size(ours.world_size)
    builder.set_weight_loads(
        *(tuple(load for rank in run.ranks for load in run.weight_loads(rank)) for run in (ours, theirs))
    )
    is_partial = _check_completeness(ours, theirs, builder, reference, steps)
    _Comparison(ours, theirs, builder, steps="common" if is_partial else steps, progress=progress).run()
    return builder.finish()


def _check_completeness(ours: Run, theirs: Run, builder: VerdictBuilder, reference: str | Path, steps: str) -> bool:
    """Say what is incomplete; return whether the current run holds a part of its steps on purpose."""
    if ours.keeps != "all":
        raise ReferenceFormatError(
            f"{reference} is no reference: a verification wrote it, and kept its diverging steps only. Name the run "
            "that was recorded first, and this one second.",
            str(reference),
        )
    if not ours.is_complete:
        if steps == "all":
            raise ReferenceFormatError(
                f"The reference {reference} is incomplete: {ours.incomplete_reason} What it holds up to there can be "
                'compared with steps="common" (det-callbacks diff --steps common); for all of it, record it again.',
                str(reference),
            )
        builder.note(f"The reference is incomplete, and was compared up to there: {ours.incomplete_reason}")
    if not theirs.is_complete:
        builder.note(f"The current run is incomplete: {theirs.incomplete_reason}")
    if theirs.keeps != "all":
        builder.note("The current run kept its diverging steps only; only those were compared")
        return True
    if steps == "common":
        builder.note("Only steps that both runs have were compared")
    return False


class _Comparison:
    """Walks through the steps of two runs."""

    def __init__(
        self,
        reference: Run,
        current: Run,
        builder: VerdictBuilder,
        *,
        steps: str,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._reference = reference
        self._current = current
        self._builder = builder
        self._is_common = steps == "common"
        self._progress = progress
        self._resumed = reference.resumed_steps | current.resumed_steps
        self._num_done = 0
        self._num_common = 0
        self._total = 0

    def run(self) -> None:
        fits = sorted(
            {
                (rank, segment)
                for run in (self._reference, self._current)
                for rank in run.ranks
                for segment in run.rank(rank).segments
            }
        )
        self._total = sum(len(np.union1d(*self._steps(rank, segment))) for rank, segment in fits)
        for rank, segment in fits:
            self._compare_fit(rank, segment)
        if not self._num_common:
            raise NothingComparedError(
                f"Nothing was compared: the reference {self._reference.path} ({_shown_steps(self._reference)}) and "
                f"{self._current.path} ({_shown_steps(self._current)}) have no step in common. That is no match. "
                "Check that they are recordings of the same training, and with the same every_n_steps."
            )

    def _steps(self, rank: int, segment: int) -> tuple[np.ndarray, np.ndarray]:
        left, right = (
            run.rank(rank).steps(segment)
            if rank in run.ranks and segment in run.rank(rank).segments
            else np.empty(0, dtype=np.int64)
            for run in (self._reference, self._current)
        )
        return left, right

    def _compare_fit(self, rank: int, segment: int) -> None:
        ours, theirs = self._steps(rank, segment)
        equal = self._num_equal(rank, segment, ours, theirs)
        in_ours, in_theirs = set(ours.tolist()), set(theirs.tolist())
        first = int(ours[0]) if len(ours) else None
        for number, step in enumerate(np.union1d(ours, theirs).tolist()):
            if step in in_ours and step in in_theirs:
                self._compare_step(rank, segment, step, is_known_equal=number < equal, is_first=step == first)
            elif not self._is_common:
                (self._builder.add_missing_step if step in in_ours else self._builder.add_extra_step)(
                    rank, step, segment
                )
            self._num_done += 1
            if self._progress is not None:
                self._progress(self._num_done, self._total)

    def _compare_step(self, rank: int, segment: int, step: int, *, is_known_equal: bool, is_first: bool) -> None:
        self._num_common += 1
        # Also where its chain says that the step is equal, it is read on both sides: a damaged file is no match.
        reference, current = (run.view(rank, segment, step) for run in (self._reference, self._current))
        if is_known_equal:
            self._builder.add_equal_step(current)
        else:
            is_resumed = (segment, step) in self._resumed
            self._builder.add_step(reference, current, is_first=is_first, is_resumed=is_resumed)

    def _num_equal(self, rank: int, segment: int, ours: np.ndarray, theirs: np.ndarray) -> int:
        """Return how many steps from the first on are equal, by their chains."""
        num_common = min(len(ours), len(theirs))
        if not num_common:
            return 0
        num_same = int(np.argmin(np.append(ours[:num_common] == theirs[:num_common], False)))
        left, right = self._reference.rank(rank), self._current.rank(rank)
        return bisect_left(
            range(num_same), True, key=lambda index: _chains_differ(left, right, segment, int(ours[index]))
        )


def _chains_differ(reference: RankRun, current: RankRun, segment: int, step: int) -> bool:
    return reference.chain(segment, step) != current.chain(segment, step)


def _require_same_selection(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], reference: str | Path, current: str | Path
) -> None:
    for manifest, path in ((ours, reference), (theirs, current)):
        if not isinstance(manifest.get("selection"), dict):
            raise ReferenceFormatError(
                f"{path}: run.json does not say what was recorded, so nothing can be compared. Record the run again.",
                str(path),
            )
    selections = [manifest["selection"] for manifest in (ours, theirs)]
    differing = [key for key in _SELECTION_KEYS if selections[0].get(key) != selections[1].get(key)]
    if differing:
        shown = "; ".join(f"{key}: {selections[0].get(key)!r} and {selections[1].get(key)!r}" for key in differing)
        raise SelectionError(
            f"The reference {reference} and {current} did not record the same: {shown}. Nothing was compared. "
            f"Record the current run with the reference's {', '.join(differing)}."
        )


def _shown_steps(run: Run) -> str:
    ranges = [run.rank(rank).steps(segment) for rank in run.ranks for segment in run.rank(rank).segments]
    ends = [int(end) for known in ranges if len(known) for end in (known[0], known[-1])]
    return f"steps {min(ends)} to {max(ends)}" if ends else "no step"
