"""What two runs must have in common to be compared."""

from det_callbacks.errors import ReferenceFormatError, SelectionError
from det_callbacks.runs.store import HOW_TO_CONTINUE, Run


def require_equal_selections(reference: Run, current: Run) -> None:
    """Raise SelectionError if the runs recorded different modules, phases or levels."""
    reference_selection = reference.manifest.selection.to_dict()
    current_selection = current.manifest.selection.to_dict()
    differing = [
        name
        for name in ("level", "modules", "phases")
        if reference_selection[name] != current_selection[name]
    ]
    if differing:
        shown = "; ".join(
            f"{name}: {reference_selection[name]!r} and {current_selection[name]!r}"
            for name in differing
        )
        raise SelectionError(
            f"{reference.path} and {current.path} were recorded with different arguments "
            f"({shown}), so nothing was compared. Record the current run with the reference's "
            f"{', '.join(differing)}."
        )


def other_world_size(reference: Run, world_size: int) -> str:
    """Return the message on a run whose number of processes is not the reference's."""
    before = reference.manifest.world_size
    return (
        f"The reference {reference.path} has a world size of {before} and this run has "
        f"{world_size}, so their steps use different batches and cannot be compared. Use {before} "
        f"processes, or record a reference with {world_size}."
    )


def require_reference(run: Run, steps: str) -> None:
    """Raise ReferenceFormatError unless the run can be a reference, for all or for common steps."""
    if run.keeps != "all":
        raise ReferenceFormatError(
            f"{run.path} cannot be a reference: a verification wrote it, and kept only its "
            "diverging steps. Pass the folder of a recording.",
            str(run.path),
        )
    if not run.is_complete and steps == "all":
        raise ReferenceFormatError(
            f"The reference {run.path} is incomplete: {run.incomplete_reason} Continue the "
            f'recording from a checkpoint (mode="record"; {HOW_TO_CONTINUE}), record it again, or '
            'compare the steps that it has with steps="common" (det-callbacks: --steps common).',
            str(run.path),
        )
