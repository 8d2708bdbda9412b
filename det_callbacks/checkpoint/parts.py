"""What each rank keeps beside a checkpoint, in a folder of its own into which nobody else writes.

    X.ckpt.resume/rank-00001/<save>.part.json   which files belong to that save of the checkpoint, and their digests
    X.ckpt.resume/rank-00001/<name>.<id>        the files

A part belongs to a checkpoint when it is named after the save that the sidecar is of: what other saves left is no part
of it. Until the sidecar is replaced, a rank keeps the part of the save that it is of.
"""

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from det_callbacks.checkpoint.files import RESUME, SIDECAR, beside, read_bytes, remove, write_atomically
from det_callbacks.checkpoint.sealed import UnknownVersionError, seal, unseal
from det_callbacks.checkpoint.sidecar import Attachment, FileDigest, Sidecar, attachments_of, safe_name
from det_callbacks.digest import digest_bytes
from det_callbacks.errors import CheckpointFormatError

SCHEMA = 1

_SUFFIX = ".part.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The files of one rank that belong to one save.

    Attributes:
        id: of the save.
        rank: whose files they are.
        num_ranks: that saved.
        files: name -> file.
    """

    id: str
    rank: int
    num_ranks: int
    files: Mapping[str, Attachment]

    def to_bytes(self) -> bytes:
        """Return the content of the file: JSON with a digest of itself."""
        content: dict[str, Any] = {
            "schema": SCHEMA,
            "id": self.id,
            "rank": self.rank,
            "num_ranks": self.num_ranks,
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
                files=attachments_of(content["files"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"has {error}" if isinstance(error, UnknownVersionError) else f"is damaged: {error}"
            raise CheckpointFormatError(
                f"{path} {what}. The checkpoint itself is not; resume from another one, or with "
                'resume="plain", which leaves generators and data to Lightning.',
                path,
            ) from error


def rank_folder(rank: int) -> str:
    """Return the name of the folder of a rank among what is kept beside a checkpoint."""
    return f"rank-{rank:05d}"


def put_part(path: Path, *, id: str, rank: int, num_ranks: int, files: Mapping[str, bytes]) -> None:
    """Write the files of a rank that belong to a save.

    Args:
        path: of the checkpoint.
        id: of the save.
        rank: of this process.
        num_ranks: that save.
        files: name -> content.
    """
    folder = _folder(path, rank)
    folder.mkdir(parents=True, exist_ok=True)
    _write(path, folder, Part(id=id, rank=rank, num_ranks=num_ranks, files=_put_files(folder, files)))


def amend_part(path: Path, *, id: str, rank: int, files: Mapping[str, bytes]) -> bool:
    """Add files to a rank's part, or replace them, all at once; return False where the part is gone.

    Args:
        path: of the checkpoint.
        id: of the save.
        rank: of this process.
        files: name -> content.
    """
    folder = _folder(path, rank)
    place = folder / f"{id}{_SUFFIX}"
    raw = read_bytes(place)
    if raw is None:
        return False
    part = Part.from_bytes(raw, str(place))
    _write(path, folder, replace(part, files={**part.files, **_put_files(folder, files)}))
    return True


def remove_part(path: Path, *, rank: int) -> None:
    """Remove what a rank keeps beside a checkpoint."""
    remove(_folder(path, rank))


def read_parts(
    path: Path, sidecar: Sidecar, ranks: Iterable[int] | None = None
) -> tuple[dict[str, bytes], list[str], list[str]]:
    """Return what ranks keep beside a checkpoint: contents by name, and the names of what is missing and damaged.

    Args:
        path: of the checkpoint.
        sidecar: of it.
        ranks: which; all of them by default.

    Raises:
        CheckpointFormatError: the list of a rank's files is damaged.
    """
    contents: dict[str, bytes] = {}
    missing: list[str] = []
    damaged: list[str] = []
    for rank in range(sidecar.num_ranks) if ranks is None else sorted(ranks):
        if rank >= sidecar.num_ranks:
            continue
        folder = _folder(path, rank)
        place = folder / f"{sidecar.id}{_SUFFIX}"
        raw = read_bytes(place)
        part = None if raw is None else Part.from_bytes(raw, str(place))
        if part is None or (part.id, part.rank, part.num_ranks) != (sidecar.id, rank, sidecar.num_ranks):
            missing.append(f"the part of rank {rank}")  # or it was copied from elsewhere
            continue
        for name, attachment in part.files.items():
            content = read_bytes(folder / attachment.file)
            if content is None:
                missing.append(name)
            elif _digest_of(content) != attachment.content:
                damaged.append(name)
            else:
                contents[name] = content
    return contents, missing, damaged


def _folder(path: Path, rank: int) -> Path:
    return beside(path, RESUME) / rank_folder(rank)


def _put_files(folder: Path, files: Mapping[str, bytes]) -> dict[str, Attachment]:
    """Write files under names of their own, so that those they replace stay whole until nobody needs them."""
    found = {}
    for name, content in files.items():
        file = f"{safe_name(name)}.{uuid.uuid4().hex}"
        write_atomically(folder / file, content)
        found[name] = Attachment(file=file, content=_digest_of(content))
    return found


def _write(path: Path, folder: Path, part: Part) -> None:
    """Write a rank's part, and remove what belongs neither to it nor to the save that the sidecar is of."""
    write_atomically(folder / f"{part.id}{_SUFFIX}", part.to_bytes())
    parts = [part, *_in_force(path, folder)]
    kept = {file for one in parts for file in (one.id + _SUFFIX, *(it.file for it in one.files.values()))}
    for left in folder.iterdir():
        if left.name not in kept:
            left.unlink(missing_ok=True)


def _in_force(path: Path, folder: Path) -> list[Part]:
    """Return the rank's part of the save that the sidecar is of; none where something is damaged or gone."""
    raw = read_bytes(beside(path, SIDECAR))
    try:
        part = None if raw is None else read_bytes(folder / f"{Sidecar.from_bytes(raw, str(path)).id}{_SUFFIX}")
        return [] if part is None else [Part.from_bytes(part, str(folder))]
    except CheckpointFormatError:
        return []


def _digest_of(content: bytes) -> FileDigest:
    return FileDigest(size=len(content), digest=digest_bytes(content))
