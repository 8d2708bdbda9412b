"""Writing what stands beside a checkpoint so that a kill at any moment leaves nothing that misleads.

1. ``begin_save`` removes the sidecar of the checkpoint that is about to be replaced, and writes what rank 0 keeps;
2. Lightning saves the checkpoint in its own way;
3. ``end_save`` reads it back and writes the new sidecar, atomically: it is there only when all the rest is.

A kill in between leaves a checkpoint without digests, which is loaded with a line.
"""

import os
import uuid
from pathlib import Path

from det_callbacks.checkpoint.entries import Entries
from det_callbacks.checkpoint.files import RESUME, SIDECAR, beside, digest_folder, digest_path, remove, write_atomically
from det_callbacks.checkpoint.parts import put_part, rank_folder
from det_callbacks.checkpoint.sidecar import SaveContext, Sidecar


def new_id() -> str:
    """Return the random identity of a save; drawn from the operating system, so no generator moves."""
    return uuid.UUID(bytes=os.urandom(16), version=4).hex


def begin_save(path: Path, *, id: str, context: SaveContext) -> None:
    """Take the sidecar away, and write the files of rank 0 that belong to the save; what other ranks keep stays."""
    beside(path, SIDECAR).unlink(missing_ok=True)
    folder = beside(path, RESUME)
    if not context.attachments:
        remove(folder)
        return
    put_part(path, id=id, rank=0, num_ranks=context.num_ranks, files=context.attachments)
    ranks = {rank_folder(rank) for rank in range(context.num_ranks)}
    for left in folder.iterdir():
        if left.name not in ranks:
            remove(left)


def end_save(path: Path, *, id: str, entries: Entries, context: SaveContext) -> None:
    """Write the sidecar of a checkpoint that is there; reads the file, or the files of the folder, once.

    Args:
        path: of the checkpoint.
        id: of the save.
        entries: of the checkpoint; none of a folder.
        context: when it is saved, and what was written beside it.
    """
    is_folder = path.is_dir()
    sidecar = Sidecar(
        id=id,
        file=None if is_folder else digest_path(path),
        files=digest_folder(path) if is_folder else {},
        entries=entries,
        context=context,
        num_ranks=context.num_ranks if context.attachments else 0,
    )
    write_atomically(beside(path, SIDECAR), sidecar.to_bytes())


def remove_beside(path: Path) -> None:
    """Remove everything of ours that stands beside a checkpoint."""
    for suffix in (SIDECAR, RESUME):
        remove(beside(path, suffix))
