"""The checkpoint of a run from which one of its steps is soonest reached."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from det_callbacks.checkpoint.files import SIDECAR
from det_callbacks.checkpoint.sidecar import Sidecar
from det_callbacks.errors import CheckpointFormatError

MAX_FOLDERS = 5_000
"""Folders that are looked into, which takes a second or two."""

_LEFT_OUT = frozenset({"node_modules", "__pycache__", "programs", "layouts", "replay"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint of a run, and the last step that had been done when it was saved."""

    path: str
    step: int


def nearest_checkpoint(run_id: str, *, before: int, folders: Iterable[str | Path]) -> FoundCheckpoint | None:
    """Return the last checkpoint that a run saved before a step began; None where there is none.

    Checkpoints are known by the digests beside them, which say what run and step they are of; their own bytes are not
    read. Those of sharded strategies, and damaged ones, are passed over: nothing is claimed of them. A resume checks
    all of it.

    Args:
        run_id: of the run.
        before: the step to reach.
        folders: looked through with the folders in them, hidden ones and environments left out, up to
            ``MAX_FOLDERS`` of each.
    """
    best: FoundCheckpoint | None = None
    for path in dict.fromkeys(sidecar for folder in folders for sidecar in _sidecars(Path(folder))):
        checkpoint = path.with_name(path.name.removesuffix(SIDECAR))
        try:
            sidecar = Sidecar.from_bytes(path.read_bytes(), str(path))
        except (CheckpointFormatError, FileNotFoundError):
            continue
        context = sidecar.context
        is_of_run = context.run is not None and context.run.get("id") == run_id
        if not is_of_run or context.step is None or context.step >= before or not checkpoint.is_file():
            continue
        if best is None or context.step > best.step:
            best = FoundCheckpoint(path=str(checkpoint), step=context.step)
    return best


def _sidecars(folder: Path) -> Iterator[Path]:
    for count, (root, folders, files) in enumerate(os.walk(folder)):
        if count == MAX_FOLDERS:
            return
        if "pyvenv.cfg" in files:
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _LEFT_OUT)
        yield from (Path(root, name) for name in sorted(files) if name.endswith(SIDECAR))
