"""Opening the reference of a verification: it has to be one that this run can be compared with."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from det_callbacks.compare.verdict_builder import VerdictBuilder
from det_callbacks.errors import NotComparableError, ReferenceFormatError, SelectionError
from det_callbacks.runs.metrics import read_metrics
from det_callbacks.runs.peers import ALONE, Peers, count_processes
from det_callbacks.runs.selection import Selection
from det_callbacks.runs.store import Run


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


def _other_world_size(run: Run, world_size: int) -> NotComparableError:
    builder = VerdictBuilder(str(run.path), "")
    builder.refuse(
        f"The reference {run.path} ran on {count_processes(run.world_size)} and this run has {world_size}: each sees "
        "other batches, so no step of one is a step of the other. Nothing was trained. Verify with as many processes, "
        f"or record a reference of {world_size}"
    )
    verdict = builder.finish()
    return NotComparableError(verdict.explanation, verdict)


def _unordered(value: Any) -> Any:
    return frozenset(value) if isinstance(value, tuple) else value


def _shown(values: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return arguments as they would be written."""
    shown = {name: list(value) if isinstance(value := values[name], tuple) else value for name in names}
    return ", ".join(f"{name}={value!r}" for name, value in shown.items())
