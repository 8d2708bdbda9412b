"""Opening what is compared: two runs have to be such that one can be the reference of the other."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from det_callbacks.compare.record import RankRecord, read_record
from det_callbacks.errors import NotComparableError, ReferenceFormatError, SelectionError
from det_callbacks.runs.metrics import read_metrics
from det_callbacks.runs.peers import ALONE, Peers, count_processes
from det_callbacks.runs.selection import Selection
from det_callbacks.runs.store import Run
from det_callbacks.verdict import Verdict


def open_reference(
    path: Path,
    asked: Mapping[str, Any] = MappingProxyType({}),
    *,
    steps: str,
    peers: Peers = ALONE,
    alternative: str = ', or compare only what is there with steps="common"',
) -> tuple[Run, Selection]:
    """Open the reference of a verification; return it with the selection to record with, which is its own.

    Args:
        path: folder of the reference.
        asked: the fields of a Selection, ``replay`` and ``keep_tensors``, as far as this run asks for them; all else is
            taken over from the reference.
        steps: "all" or "common"; "all" demands a complete reference.
        peers: the processes that verify together; of the reference, only what this one compares with is opened.
        alternative: what else the message about an incomplete one advises.

    Raises:
        ReferenceNotFoundError: there is none.
        ReferenceFormatError: it is damaged, or incomplete, or holds the diverging steps of a verification only.
        SelectionError: it was recorded with another selection than this run asks for.
        NotComparableError: it is of another number of processes.
    """
    run = Run.open(path, ranks=(peers.rank,))
    if run.keeps != "all":
        raise ReferenceFormatError(
            f"{path} is no reference: a verification wrote it, and kept its diverging steps only. Name the run that "
            "was recorded.",
            str(path),
        )
    if run.world_size != peers.world_size:
        raise _other_world_size(run, peers.world_size)
    if not run.is_complete and steps == "all":
        raise ReferenceFormatError(
            f"The reference {path} is incomplete: {run.incomplete_reason} Record it again{alternative}.",
            str(path),
        )
    manifest = run.manifest
    known = {**asdict(run.selection), "replay": manifest.replay, "keep_tensors": manifest.keep_tensors}
    others = [name for name, value in asked.items() if _unordered(value) != _unordered(known[name])]
    if others:
        raise SelectionError(
            f"The reference {path} was recorded with {_shown(known, others)}, and this run asks for "
            f"{_shown(asked, others)}. Leave that out to take over the reference's, or record again."
        )
    for segment in run.segments if not peers.rank else ():
        read_metrics(run, segment)  # so that damage is told before anything is trained
    return run, run.selection


def read_records(ours: Run, theirs: Run) -> dict[int, RankRecord]:
    """Return the record of each rank of a verification.

    Raises:
        ReferenceFormatError: one is missing or damaged, or the reference is another one now.
    """
    records = {rank: read_record(theirs, rank) for rank in theirs.ranks}
    others = {record.reference_id for record in records.values()} - {ours.run_id}
    if others:
        raise ReferenceFormatError(
            f"{theirs.path} was verified against another reference ({', '.join(sorted(others))}) than {ours.path} "
            f"holds now ({ours.run_id}): it was recorded anew since. Nothing is said about them. Verify again.",
            str(ours.path),
        )
    return records


def require_same_selection(*runs: Run) -> None:
    """Raise SelectionError where two runs did not record the same."""
    ours, theirs = (run.selection.to_dict() for run in runs)
    differing = [name for name in ("level", "modules", "phases") if ours[name] != theirs[name]]
    if differing:
        shown = "; ".join(f"{name}: {ours[name]!r} and {theirs[name]!r}" for name in differing)
        raise SelectionError(
            f"The reference {runs[0].path} and {runs[1].path} did not record the same: {shown}. Nothing was compared. "
            f"Record the current run with the reference's {', '.join(differing)}."
        )


def check_completeness(ours: Run, theirs: Run, steps: str) -> list[str]:
    """Return what is to be said of runs that are incomplete."""
    notes = []
    if ours.keeps != "all":
        raise ReferenceFormatError(
            f"{ours.path} is no reference: a verification wrote it, and kept its diverging steps only. Name the run "
            "that was recorded first, and this one second.",
            str(ours.path),
        )
    if not ours.is_complete:
        if steps == "all":
            raise ReferenceFormatError(
                f"The reference {ours.path} is incomplete: {ours.incomplete_reason} What it holds up to there can be "
                'compared with steps="common" (det-callbacks diff --steps common); for all of it, record it again.',
                str(ours.path),
            )
        notes.append(f"The reference is incomplete, and was compared up to there: {ours.incomplete_reason}")
    if not theirs.is_complete and theirs.keeps == "all":
        notes.append(f"The current run is incomplete: {theirs.incomplete_reason}")
    if steps == "common":
        notes.append("Only steps that both runs have were compared")
    return notes


def shown_steps(run: Run) -> str:
    """Return which steps a run has."""
    ranges = [run.rank(rank).steps(segment) for rank in run.ranks for segment in run.rank(rank).segments]
    ends = [int(end) for known in ranges if len(known) for end in (known[0], known[-1])]
    return f"steps {min(ends)} to {max(ends)}" if ends else "no step"


def _other_world_size(run: Run, world_size: int) -> NotComparableError:
    text = (
        f"The reference {run.path} ran on {count_processes(run.world_size)} and this run has {world_size}: each sees "
        "other batches, so no step of one is a step of the other. Nothing was trained. Verify with as many processes, "
        f"or record a reference of {world_size}."
    )
    return NotComparableError(text, Verdict.refused(str(run.path), "", text))


def _unordered(value: Any) -> Any:
    return frozenset(value) if isinstance(value, tuple) else value


def _shown(values: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return arguments as they would be written."""
    shown = {name: list(value) if isinstance(value := values[name], tuple) else value for name in names}
    return ", ".join(f"{name}={value!r}" for name, value in shown.items())
