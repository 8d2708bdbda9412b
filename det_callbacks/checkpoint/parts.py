"""What the ranks other than 0 keep beside a checkpoint: each in a folder of its own, into which nobody else writes.

    X.ckpt.resume/rank-00001/<save>.part.json   which files belong to that save of the checkpoint, and their digests
    X.ckpt.resume/rank-00001/<name>.<id>        the files

Rank 0's files stand in ``X.ckpt.resume/`` itself; the sidecar names them, and says how many ranks there are. A part
belongs to a checkpoint when it is named after the save that the sidecar is of: what other saves left is no part of it.
Each rank writes its part before the save returns on it, and keeps the part before until the one after, so that a kill
between two ranks leaves the earlier checkpoint with all of its parts, or the new one without one of them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from det_callbacks.checkpoint.files import PARTIAL, RESUME, Place
from det_callbacks.checkpoint.reading import Found, read_attachments, read_files, resume_folder
from det_callbacks.checkpoint.saving import new_id, put_attachment, rank_folder
from det_callbacks.checkpoint.sealed import UnknownVersionError, seal, unseal
from det_callbacks.checkpoint.sidecar import Attachment, attachments_of
from det_callbacks.errors import CheckpointFormatError

SCHEMA = 1

KEPT_SAVES = 2
"""Parts of one checkpoint that a rank keeps: that of the save under way, and that of the checkpoint in place."""

_SUFFIX = ".part.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The files of one rank that belong to one save.

    Attributes:
        id: of the save.
        rank: whose files they are, at least 1.
        num_ranks: that saved.
        number: counts the parts of this rank beside the checkpoint; the latest has the largest.
        files: name -> file.
    """

    id: str
    rank: int
    num_ranks: int
    number: int
    files: Mapping[str, Attachment]

    def to_bytes(self) -> bytes:
        """Return the content of the file: JSON with a digest of itself."""
        content: dict[str, Any] = {
            "schema": SCHEMA,
            "id": self.id,
            "rank": self.rank,
            "num_ranks": self.num_ranks,
            "number": self.number,
            "files": {name: attachment.to_dict() for name, attachment in self.files.items()},
        }
        return seal(content)

    @classmethod
    def from_bytes(cls, raw: bytes, path: str) -> "Part":
        """Read a file's content.

        Args:
            raw: the content.
            path: of the file, for messages.

        Raises:
            CheckpointFormatError: it is truncated, damaged, or of another version.
        """
        try:
            content = unseal(raw, {"schema": SCHEMA})
            return cls(
                id=str(content["id"]),
                rank=int(content["rank"]),
                num_ranks=int(content["num_ranks"]),
                number=int(content["number"]),
                files=attachments_of(content["files"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"has {error}" if isinstance(error, UnknownVersionError) else f"is damaged: {error}"
            raise CheckpointFormatError(
                f"{path} {what}. The checkpoint itself is not; resume from another one, or with "
                'resume="plain", which leaves generators and data to Lightning.',
                path,
            ) from error


def put_part(place: Place, *, id: str, rank: int, num_ranks: int, attachments: Mapping[str, bytes]) -> None:
    """Write the files of a rank that belong to a save.

    Args:
        place: the checkpoint.
        id: of the save.
        rank: of this process, at least 1.
        num_ranks: that save.
        attachments: name -> content.
    """
    folder = _folder(place.beside(RESUME), rank)
    parts = _parts_in(folder)
    part = Part(
        id=id,
        rank=rank,
        num_ranks=num_ranks,
        number=max((one.number for one in parts), default=0) + 1,
        files={name: put_attachment(folder, name, content, new_id()) for name, content in attachments.items()},
    )
    _write(folder, part)
    _tidy(folder, [*(one for one in parts if one.id != id), part])


def amend_part(place: Place, *, id: str, rank: int, files: Mapping[str, bytes]) -> bool:
    """Add files to a rank's part, or replace them, all at once; return False where the part is gone.

    Args:
        place: the checkpoint.
        id: of the save.
        rank: of this process, at least 1.
        files: name -> content.
    """
    folder = _folder(place.beside(RESUME), rank)
    parts = _parts_in(folder)
    part = next((one for one in parts if one.id == id), None)
    if part is None:
        return False
    added = {name: put_attachment(folder, name, content, new_id()) for name, content in files.items()}
    amended = replace(part, files={**part.files, **added})
    _write(folder, amended)
    _tidy(folder, [*(one for one in parts if one.id != id), amended])
    return True


def remove_part(place: Place, *, rank: int) -> None:
    """Remove what a rank keeps beside a checkpoint."""
    _folder(place.beside(RESUME), rank).remove()


def read_part(found: Found, rank: int) -> tuple[dict[str, bytes], list[str], list[str]] | None:
    """Return a rank's files by name, the names of missing ones, and of damaged ones; None where it has no part.

    Args:
        found: the sidecar of the checkpoint.
        rank: at least 1.

    Raises:
        CheckpointFormatError: the list of its files is damaged.
    """
    resume = found.sidecar.resume
    if resume is None:
        return None
    folder = _folder(resume_folder(found.place, resume), rank)
    place = folder.inside(found.sidecar.id + _SUFFIX)
    raw = place.read()
    if raw is None:
        return None
    part = Part.from_bytes(raw, place.shown)
    if (part.id, part.rank, part.num_ranks) != (found.sidecar.id, rank, resume.num_ranks):
        return None  # copied from elsewhere
    return read_files(folder, part.files)


def read_kept(found: Found, ranks: Iterable[int] | None = None) -> tuple[dict[str, bytes], list[str], list[str]]:
    """Return what rank 0 and other ranks keep beside a checkpoint: contents, missing and damaged, by name.

    Args:
        found: the sidecar of the checkpoint.
        ranks: which others; all of them by default.

    Raises:
        CheckpointFormatError: the list of a rank's files is damaged.
    """
    contents, missing, damaged = read_attachments(found)
    num_ranks = 1 if found.sidecar.resume is None else found.sidecar.resume.num_ranks
    for rank in range(1, num_ranks) if ranks is None else ranks:
        if not 0 < rank < num_ranks:
            continue
        part = read_part(found, rank)
        if part is None:
            missing.append(f"the part of rank {rank}")
            continue
        contents |= part[0]
        missing += part[1]
        damaged += part[2]
    return contents, missing, damaged


def copy_parts(found: Found, place: Place) -> None:
    """Write the parts of a checkpoint once more, beside a copy of it."""
    num_ranks = 1 if found.sidecar.resume is None else found.sidecar.resume.num_ranks
    for rank in range(1, num_ranks):
        part = read_part(found, rank)
        if part is not None and not part[1] and not part[2]:
            put_part(place, id=found.sidecar.id, rank=rank, num_ranks=num_ranks, attachments=part[0])


def _folder(resume: Place, rank: int) -> Place:
    return resume.inside(rank_folder(rank))


def _write(folder: Place, part: Part) -> None:
    temporary = folder.inside(part.id + PARTIAL)
    temporary.write(part.to_bytes())
    temporary.rename(folder.inside(part.id + _SUFFIX))


def _parts_in(folder: Place) -> list[Part]:
    """Return the parts of a folder, the earliest first; what is damaged is none."""
    parts = []
    for name in folder.files():
        raw = folder.inside(name).read() if name.endswith(_SUFFIX) else None
        if raw is not None:
            try:
                parts.append(Part.from_bytes(raw, name))
            except CheckpointFormatError:
                continue  # it is about to be replaced
    return sorted(parts, key=lambda part: part.number)


def _tidy(folder: Place, parts: list[Part]) -> None:
    """Remove what belongs to none of the latest parts."""
    kept = set()
    for part in parts[-KEPT_SAVES:]:
        kept |= {part.id + _SUFFIX, *(attachment.file for attachment in part.files.values())}
    for name in folder.files():
        if name not in kept:
            folder.inside(name).remove()
