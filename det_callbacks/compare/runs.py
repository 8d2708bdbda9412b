"""Comparing two recorded runs: which steps are there, and what the verdict on them is."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from det_callbacks.compare.answer import EvidenceFinder
from det_callbacks.compare.batches import find_batch
from det_callbacks.compare.compared import read_compared
from det_callbacks.compare.evidence import RunEvidence
from det_callbacks.compare.metrics import MetricComparison
from det_callbacks.compare.next_recording import with_next_recording
from det_callbacks.compare.numbers import KeptNumbers, KeptRun
from det_callbacks.compare.processes import choose_jobs, compare_in_processes
from det_callbacks.compare.verdict_builder import VerdictBuilder
from det_callbacks.compare.walk import RankWalk
from det_callbacks.errors import NothingComparedError, ReferenceFormatError, SelectionError
from det_callbacks.runs.environment import compare_environments, digested_on
from det_callbacks.runs.metrics import read_metrics
from det_callbacks.runs.selection import Selection
from det_callbacks.runs.store import Run
from det_callbacks.verdict import Verdict

SMALL_BYTES = 256 * 2**20
"""Two runs whose steps take less than this together are read whole: it takes a second or less."""

CHAINS_NOTE = (
    "Steps before the first difference were compared by their chains, and their digests were not read again "
    "(check_files=True, det-callbacks diff --check-files: reads all)"
)

_SELECTION_KEYS = ("level", "modules", "phases")


def compare_runs(
    reference: str | Path,
    current: str | Path,
    *,
    steps: Literal["all", "common"] = "all",
    check_files: bool | None = None,
    jobs: int | None = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Verdict:
    """Compare a recorded run with its reference, bit for bit.

    Both runs are read as a stream, one step at a time; of each step some 60 bytes are kept. Up to the first difference
    of a rank, which is found in the chains by bisection, steps are counted and not compared; from there on each is
    read, checked against its chain and compared: 200 microseconds for a step of 4,000 sites of one program. What the
    chains prove, and what is trusted with them, stands in ``compare/walk.py``.

    Args:
        reference: folder of the reference.
        current: folder of the run to compare. Of one that kept its diverging steps only (a verification's), only those
            are compared.
        steps: "all" demands exactly the reference's steps: another one, or one that is not there, is a divergence.
            "common" compares the steps that both runs have.
        check_files: True reads every step of both runs and checks it against its chain, at memory speed, so that a
            damaged file is an error wherever it is damaged; False only the last equal step and those after it, and
            says so in the explanation. None does the first with runs of less than 256 MiB together.
        jobs: processes that compare ranks, of some 400 MB and 5 s each to start. None takes one where that is faster,
            else one a core. Above 1, a script that calls this needs ``if __name__ == "__main__":``, as with all of
            multiprocessing.
        progress: called with the number of steps looked at so far, and that of all.

    Returns:
        The verdict; the ``exit_code`` of the command line is its own. Runs of another number of processes are
        ``not_comparable`` and are not looked into.

    Raises:
        ReferenceNotFoundError: there is no run at one of the paths.
        ReferenceFormatError: a file of a run is damaged, or the reference is incomplete and ``steps`` is "all".
        SelectionError: the runs recorded other modules, phases or another level.
        NothingComparedError: the runs have no step in common, or no site.
        WorkerError: a process ended before it had compared its rank.
        ValueError: ``steps`` is another word, or ``jobs`` is not at least 1.

    Example:
        >>> compare_runs("refs/run1", "runs/today").verdict  # doctest: +SKIP
        'match'
    """
    if steps not in ("all", "common"):
        raise ValueError(f'steps must be "all" or "common"; got {steps!r}.')
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, or None; got {jobs}.")
    ours, theirs = (Run.open(path, check_steps=False) for path in (reference, current))
    builder = _begin_verdict(ours, theirs, reference, current)
    if ours.world_size != theirs.world_size:
        return builder.finish()
    if theirs.keeps != "all" and theirs.is_complete:
        builder.set_agreeing(theirs.ranks)  # a rank without a step of its own agreed
    is_partial = _check_completeness(ours, theirs, builder, reference, steps)
    is_common = is_partial or steps == "common"
    if check_files is None:
        check_files = sum(run.rank(rank).num_bytes for run in (ours, theirs) for rank in run.ranks) < SMALL_BYTES
    walk = RankWalk(reference=ours, current=theirs, is_common=is_common, check_files=check_files)
    if not check_files and any(map(walk.has_equal_steps, ours.ranks)):
        builder.note(CHAINS_NOTE)
    num_common = _compare_ranks(walk, builder, jobs, progress)
    # last: merging wants ranks that are new
    _compare_metrics(builder, ours, theirs, counts_missing=not is_common, counts_extra=steps == "all")
    for rank in ours.ranks if is_partial else ():
        for whole in (one for done in read_compared(theirs.path, rank).values() for one in done.whole):
            builder.add_whole(whole)
    # of steps alone, none in common is no comparison; a verification says what it found
    if not num_common and not (builder.has_divergence if is_partial else builder.tally.num_metrics):
        if theirs.keeps != "all":
            raise NothingComparedError(
                f"Nothing was compared: {current} was written by a verification, which keeps its diverging steps only, "
                "and it kept none. What it found stands in its verdict.json; to compare all steps, record that "
                "training too."
            )
        raise NothingComparedError(
            f"Nothing was compared: the reference {reference} ({_shown_steps(ours)}) and {current} "
            f"({_shown_steps(theirs)}) have no step in common. That is no match. Check that they are recordings of the "
            "same training, and with the same every_n_steps."
        )
    builder.measure(KeptNumbers.of(ours, KeptRun.of(theirs, "the current run")))
    return with_next_recording(builder.finish(), ours.selection)


def _begin_verdict(ours: Run, theirs: Run, reference: str | Path, current: str | Path) -> VerdictBuilder:
    """Return a builder that knows all of two runs but their steps; it refuses runs of another number of processes.

    Raises:
        ReferenceFormatError: a run does not say what was recorded, or where.
        SelectionError: the runs recorded other modules, phases or another level.
    """
    builder = VerdictBuilder(str(reference), str(current))
    builder.set_batches(partial(find_batch, ours))
    builder.set_evidence(EvidenceFinder(RunEvidence(ours), RunEvidence(theirs)))
    here = theirs.environment
    builder.set_environment(compare_environments(ours.environment, here))
    builder.tally.digested_on.update(digested_on(here))
    if ours.world_size != theirs.world_size:
        builder.refuse(
            f"The reference ran on {ours.world_size} process{'es' * (ours.world_size != 1)} and this run on "
            f"{theirs.world_size}: each sees other batches, so no step of one is a step of the other"
        )
        return builder
    _require_same_selection(ours.selection, theirs.selection, reference, current)
    builder.set_world_size(ours.world_size)
    return builder


def _compare_ranks(
    walk: RankWalk, builder: VerdictBuilder, jobs: int | None, progress: Callable[[int, int], None] | None
) -> int:
    """Compare all ranks into a builder; return how many steps both runs have."""
    ranks = walk.reference.ranks
    total = sum(map(walk.num_steps, ranks))
    num_done = 0

    def report(count: int) -> None:
        nonlocal num_done
        num_done += count
        if progress is not None:
            progress(num_done, total)

    num_jobs = choose_jobs(jobs, walk)
    parts = (
        (walk.compare(rank, builder.part(), report) for rank in ranks)
        if num_jobs == 1
        else compare_in_processes(walk, builder.part(), num_jobs, report)
    )
    num_common = 0
    for part, count in parts:
        builder.merge(part)
        num_common += count
    return num_common


def _compare_metrics(
    builder: VerdictBuilder, ours: Run, theirs: Run, *, counts_missing: bool, counts_extra: bool
) -> None:
    for segment in sorted({*ours.segments, *theirs.segments}):
        current = read_metrics(theirs, segment)
        comparison = MetricComparison(
            read_metrics(ours, segment), segment=segment, counts_missing=counts_missing, counts_extra=counts_extra
        )
        for step in current.resumed:
            comparison.resume(step)
        for reading in current.by_key.values():
            comparison.add(reading, builder)
        comparison.end(builder)


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


def _require_same_selection(ours: Selection, theirs: Selection, reference: str | Path, current: str | Path) -> None:
    one, other = ours.to_dict(), theirs.to_dict()
    differing = [name for name in _SELECTION_KEYS if one[name] != other[name]]
    if differing:
        shown = "; ".join(f"{name}: {one[name]!r} and {other[name]!r}" for name in differing)
        raise SelectionError(
            f"The reference {reference} and {current} did not record the same: {shown}. Nothing was compared. "
            f"Record the current run with the reference's {', '.join(differing)}."
        )


def _shown_steps(run: Run) -> str:
    ranges = [run.rank(rank).steps(segment) for rank in run.ranks for segment in run.rank(rank).segments]
    ends = [int(end) for known in ranges if len(known) for end in (known[0], known[-1])]
    return f"steps {min(ends)} to {max(ends)}" if ends else "no step"
