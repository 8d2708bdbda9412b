"""Compares a checkpoint with the digests next to it before it is loaded."""

from pathlib import Path

from det_callbacks.checkpoint.check import compare_saved
from det_callbacks.checkpoint.files import Sidecar, read_sidecar
from det_callbacks.checkpoint.messages import mismatch_text
from det_callbacks.errors import CheckpointMismatchError


def require_saved(place: Path) -> Sidecar | None:
    """Return the sidecar of a checkpoint, if any; raise
    ``CheckpointMismatchError`` if it does not match.
    """
    sidecar = read_sidecar(place)
    if sidecar is not None and not (report := compare_saved(place, sidecar)).equal:
        names = tuple(entry.name for entry in report.entries)
        raise CheckpointMismatchError(mismatch_text(report), report.path, names)
    return sidecar


def unchecked_line(path: str | Path) -> str:
    return f"det_callbacks: {path} was loaded unchecked: it has no digests next to it"
