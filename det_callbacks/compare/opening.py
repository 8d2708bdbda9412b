"""Opening the reference of a verification: it has to be one that this run can be compared with."""

from dataclasses import fields
from pathlib import Path

from det_callbacks.compare.verdict_builder import VerdictBuilder
from det_callbacks.errors import NotComparableError, ReferenceFormatError, SelectionError
from det_callbacks.trace.peers import ALONE, Peers, count_processes
from det_callbacks.trace.selection import Selection
from det_callbacks.trace.store import Run


def open_reference(
    path: Path,
    selection: Selection,
    *,
    steps: str,
    peers: Peers = ALONE,
    alternative: str = ', or compare only what is there with steps="common"',
) -> tuple[Run, Selection]:
    """Open the reference of a verification; return it with the selection to record with, which is its own.

    Args:
        path: folder of the reference.
        selection: what this run asks for; what is at its default is taken over from the reference.
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
    try:
        recorded = Selection.from_dict(run.manifest.get("selection", {}))
    except SelectionError as error:
        raise ReferenceFormatError(f"{path / 'run.json'}: {error} Record the run again.", str(path)) from error
    if not _may_take_over(selection, recorded):
        raise SelectionError(
            f"The reference {path} was recorded with {_shown(recorded)}, and this run asks for {_shown(selection)}. "
            "Leave these arguments out to take over the reference's, or record again."
        )
    return run, recorded


def _other_world_size(run: Run, world_size: int) -> NotComparableError:
    builder = VerdictBuilder(str(run.path), "")
    builder.refuse(
        f"The reference {run.path} ran on {count_processes(run.world_size)} and this run has {world_size}: each sees "
        "other batches, so no step of one is a step of the other. Nothing was trained. Verify with as many processes, "
        f"or record a reference of {world_size}"
    )
    verdict = builder.finish()
    return NotComparableError(verdict.explanation, verdict)


def _may_take_over(asked: Selection, recorded: Selection) -> bool:
    """Return whether each value that is asked for is the reference's, or the default, which is as good as none."""
    default = Selection()
    names = [field.name for field in fields(Selection)]
    return all(getattr(asked, name) in (getattr(default, name), getattr(recorded, name)) for name in names)


def _shown(selection: Selection) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in selection.to_dict().items())
