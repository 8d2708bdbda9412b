"""Writing a checkpoint and its sidecar so that a kill at any moment leaves a pair that agrees.

A checkpoint that is written here takes five steps, each of which is atomic on a disk:

1. the checkpoint goes to ``X.ckpt.partial``, what is kept beside it to ``X.ckpt.resume/``, under names of its own;
2. the new sidecar goes to ``X.ckpt.digests.json.next``;
3. the sidecar in force becomes ``.old``;
4. the checkpoint comes into place;
5. ``.next`` becomes the sidecar in force, and what belonged to the earlier save goes.

Before step 4 the earlier checkpoint has its sidecar in force or as ``.old``, after it the new one has its own as
``.next`` or in force. Of a checkpoint that others write the digest is known only once it is there: its earlier sidecar
steps aside before, so that a kill leaves one without a sidecar that fits, which is noticed, and never with one that
only seems to.
"""

import io
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import torch

from det_callbacks.checkpoint.entries import Entries
from det_callbacks.checkpoint.files import NEXT, OLD, PARTIAL, RANKS, RESUME, SIDECAR, Place
from det_callbacks.checkpoint.reading import Found, digest_of, find_sidecar, resume_folder
from det_callbacks.checkpoint.sidecar import Attachment, Resume, SaveContext, Sidecar, safe_name
from det_callbacks.checkpoint.stream import DigestingWriter
from det_callbacks.errors import CheckpointFormatError


def new_id() -> str:
    """Return the random identity of a save; drawn from the operating system, so no generator moves."""
    return uuid.UUID(bytes=os.urandom(16), version=4).hex


def save_file(
    checkpoint: Mapping[str, object], place: Place, *, id: str, entries: Entries, context: SaveContext
) -> None:
    """Write a checkpoint as ``torch.save`` does, and its sidecar.

    Args:
        checkpoint: what is saved.
        place: where to.
        id: of the save.
        entries: of the checkpoint.
        context: when it is saved, and what is kept beside it.
    """
    place.make_parent()
    settle(place)
    partial = place.beside(PARTIAL)

    def fill(writer: DigestingWriter) -> None:
        torch.save(checkpoint, writer)  # type: ignore[arg-type]  # write and flush are what it uses (torch 2.13)

    buffer = io.BytesIO()
    try:
        if place.is_local:
            content = partial.stream(fill)
        else:
            writer = DigestingWriter(buffer)
            fill(writer)
            content = writer.digest()
        resume = _put_attachments(place, context.attachments, id, num_ranks=context.num_ranks)
        sidecar = Sidecar(id=id, file=content, entries=entries, context=context, resume=resume)
        place.beside(NEXT).write(sidecar.to_bytes())
        step_aside(place)
        if place.is_local:
            partial.rename(place)
        else:
            place.upload(buffer.getvalue())
    except BaseException:  # Ctrl-C too: what was begun is taken away, and it is raised again
        if place.is_local:
            partial.remove()
        settle(place)
        raise
    _put_in_force(place, sidecar)


def put_sidecar(place: Place, sidecar: Sidecar, attachments: Mapping[str, bytes]) -> None:
    """Write the sidecar of a checkpoint that is there already."""
    num_ranks = sidecar.context.num_ranks if sidecar.resume is None else sidecar.resume.num_ranks
    resume = _put_attachments(place, attachments, sidecar.id, num_ranks=num_ranks)
    sidecar = replace(sidecar, resume=resume)
    place.beside(NEXT).write(sidecar.to_bytes())
    _put_in_force(place, sidecar)


def step_aside(place: Place) -> None:
    """Rename the sidecar in force, if there is one, to ``.old``: the checkpoint that it is of is about to go."""
    main = place.beside(SIDECAR)
    if place.is_local or main.exists():  # a local link to nothing is renamed too
        with suppress(FileNotFoundError):  # there was none
            main.rename(place.beside(OLD))


def settle(place: Place) -> None:
    """Put in force what a save that was interrupted left beside a checkpoint, and remove the rest of it.

    Reads the checkpoint only where something was left.
    """
    place.beside(PARTIAL).remove()
    left = [place.beside(suffix) for suffix in (NEXT, OLD)]
    if not any(leftover.exists() for leftover in left):
        return
    if place.exists() and not place.is_folder():
        with suppress(CheckpointFormatError):  # a damaged one stays in force, for a reader to refuse
            found = find_sidecar(place, place.digest())
            if found is not None and found.fits and found.place.path in [leftover.path for leftover in left]:
                found.place.rename(place.beside(SIDECAR))
    for leftover in left:
        leftover.remove()


def amend(place: Place, *, id: str, files: Mapping[str, bytes]) -> bool:
    """Add files to those kept beside a checkpoint, or replace them; return False where another save has its place.

    A reader sees the files before or the files after, never a mixture.

    Args:
        place: the checkpoint.
        id: of the save that is meant.
        files: name -> content.
    """
    main = place.beside(SIDECAR)
    raw = main.read()
    if raw is None or not place.exists():
        return False
    sidecar = Sidecar.from_bytes(raw, main.shown)
    if sidecar.id != id:
        return False
    folder = place.beside(RESUME)
    kept = sidecar.resume or Resume(folder=folder.name, files={})
    added = {name: put_attachment(folder, name, content, new_id()) for name, content in files.items()}
    amended = replace(sidecar, resume=replace(kept, folder=folder.name, files={**kept.files, **added}))
    place.beside(NEXT).write(amended.to_bytes())
    _put_in_force(place, amended)
    return True


def remove_beside(place: Place) -> None:
    """Remove everything of ours that stands beside a checkpoint; what a link leads to stays."""
    for suffix in (SIDECAR, NEXT, OLD, PARTIAL, RESUME, RANKS):
        place.beside(suffix).remove()


def link_beside(target: Place, link: Place) -> Found | None:
    """Give a link to a checkpoint, or a copy of it, the checkpoint's sidecar; return that where it was copied.

    Args:
        target: the checkpoint.
        link: local; a symbolic link gets a link to the sidecar, so that what is added to it later holds for both.
    """
    sidecar, its_target = link.beside(SIDECAR), target.beside(SIDECAR)
    if os.path.islink(link.path):
        remove_beside(link)
        os.symlink(os.path.relpath(its_target.path, os.path.dirname(link.path) or "."), sidecar.path)
        return None
    settle(link)
    raw = its_target.read()
    if raw is None:
        return None
    original = Sidecar.from_bytes(raw, its_target.shown)
    attachments = {}
    if original.resume is not None:
        folder = resume_folder(its_target, original.resume)
        for name, attachment in original.resume.files.items():
            content = folder.inside(attachment.file).read()
            if content is not None and digest_of(content) == attachment.content:
                attachments[name] = content
    put_sidecar(link, original, attachments)
    return Found(sidecar=original, place=its_target, fits=True)


def _put_in_force(place: Place, sidecar: Sidecar) -> None:
    place.beside(NEXT).rename(place.beside(SIDECAR))
    place.beside(OLD).remove()
    folder, resume = place.beside(RESUME), sidecar.resume
    if resume is None:
        folder.remove()
        return
    kept = {attachment.file for attachment in resume.files.values()}
    ranks = {rank_folder(rank) for rank in range(1, resume.num_ranks)}
    for name in folder.files():
        first, _, inner = name.partition("/")
        if first not in (ranks if inner else kept):  # what other ranks of this run keep is theirs
            folder.inside(first).remove()


def _put_attachments(place: Place, attachments: Mapping[str, bytes], id: str, *, num_ranks: int) -> Resume | None:
    if not attachments:
        return None
    folder = place.beside(RESUME)
    files = {safe_name(name): put_attachment(folder, name, content, id) for name, content in attachments.items()}
    return Resume(folder=folder.name, files=files, num_ranks=num_ranks)


def rank_folder(rank: int) -> str:
    """Return the name of the folder of a rank other than 0 among what is kept beside a checkpoint."""
    return f"rank-{rank:05d}"


def put_attachment(folder: Place, name: str, content: bytes, id: str) -> Attachment:
    """Write a file under a name of its own, so that the one it replaces stays whole until nobody needs it."""
    file = f"{safe_name(name)}.{id}"
    folder.make_folder()
    folder.inside(file).write(content)
    return Attachment(file=file, content=digest_of(content))
