"""Which sidecar belongs to a checkpoint, and what is kept beside it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from det_callbacks.checkpoint.files import NEXT, OLD, RESUME, SIDECAR, Place
from det_callbacks.checkpoint.sidecar import Attachment, FileDigest, Resume, Sidecar
from det_callbacks.digest import digest_bytes
from det_callbacks.errors import CheckpointFormatError


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A sidecar, and where it lies.

    Attributes:
        sidecar: as it was read.
        place: of its file, links followed.
        fits: whether the checkpoint's bytes are the ones it is of.
    """

    sidecar: Sidecar
    place: Place
    fits: bool


def find_sidecar(checkpoint: Place, content: FileDigest | None) -> Found | None:
    """Return the sidecar of a checkpoint; None where none stands beside it.

    A save that was interrupted leaves up to three: the one in force, the next, and the one before. The first that fits
    the file's bytes counts; where none does, the first that is there.

    Args:
        checkpoint: the file, or folder.
        content: the file's; None for a folder, which fits what its files are compared with later.

    Raises:
        CheckpointFormatError: the one in force is damaged.
    """
    first: Found | None = None
    for place in _candidates(checkpoint):
        raw = place.read()
        if raw is None:
            continue
        try:
            sidecar = Sidecar.from_bytes(raw, place.shown)
        except CheckpointFormatError:
            if place.path.endswith(SIDECAR):
                raise
            continue  # torn by the kill that left it: it was not in force yet, or not any more
        found = Found(sidecar=sidecar, place=place, fits=sidecar.file == content)
        if found.fits:
            return found
        first = first or found
    return first


def read_attachments(found: Found) -> tuple[dict[str, bytes], list[str], list[str]]:
    """Return what rank 0 keeps beside a checkpoint by name, the names of missing files, and of damaged ones."""
    resume = found.sidecar.resume
    return ({}, [], []) if resume is None else read_files(resume_folder(found.place, resume), resume.files)


def read_files(folder: Place, files: Mapping[str, Attachment]) -> tuple[dict[str, bytes], list[str], list[str]]:
    """Return files of a folder by name, the names of missing ones, and of damaged ones."""
    contents: dict[str, bytes] = {}
    missing: list[str] = []
    damaged: list[str] = []
    for name, attachment in files.items():
        content = folder.inside(attachment.file).read()
        if content is None:
            missing.append(name)
        elif digest_of(content) != attachment.content:
            damaged.append(name)
        else:
            contents[name] = content
    return contents, missing, damaged


def resume_folder(sidecar: Place, resume: Resume) -> Place:
    """Return the folder of the files kept beside a checkpoint: by its name or, of a link, the name it was saved by."""
    own = sidecar.sibling(sidecar.name.partition(SIDECAR)[0] + RESUME)
    return own if own.exists() else sidecar.sibling(resume.folder)


def digest_of(content: bytes) -> FileDigest:
    """Return size and digest of bytes."""
    return FileDigest(size=len(content), digest=digest_bytes(content))


def _candidates(checkpoint: Place) -> Iterator[Place]:
    target = checkpoint.target()
    for base in (checkpoint,) if target is None else (checkpoint, target):
        for suffix in (SIDECAR, NEXT, OLD):
            place = base.beside(suffix)
            yield place.target() or place
