"""What a rank keeps beside a checkpoint for an exact resume: one file, ``X.ckpt.resume/rank-00001.state``.

Its first line is JSON with a digest of itself: the save that it belongs to, the state, and the digest of what follows,
tensors in the safetensors format.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from det_callbacks.checkpoint.sidecar import (
    RESUME,
    FileDigest,
    Sidecar,
    beside,
    damaged,
    read_bytes,
    seal,
    unseal,
    write_atomically,
)
from det_callbacks.digest import digest_bytes

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank keeps of one save.

    Attributes:
        id: of the save.
        rank: whose it is.
        num_ranks: that saved.
        state: plain data, as JSON holds it.
        tensors: name -> tensor on the host.
    """

    id: str
    rank: int
    num_ranks: int
    state: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        content = safetensors.torch.save(dict(self.tensors)) if self.tensors else b""
        head = {"schema": SCHEMA, "id": self.id, "rank": self.rank, "num_ranks": self.num_ranks, "state": self.state}
        tensors = FileDigest(size=len(content), digest=digest_bytes(content))
        return seal({**head, "tensors": tensors.to_dict()}) + content

    @classmethod
    def from_bytes(cls, raw: bytes, path: str) -> "Part":
        """Read a file's content; ``path`` is of the file, for messages.

        Raises:
            CheckpointFormatError: it is truncated, damaged, or of another version.
        """
        line, end, content = raw.partition(b"\n")
        head = unseal(line + end, path, schema=SCHEMA)
        try:
            if FileDigest.from_dict(head["tensors"]) != FileDigest(size=len(content), digest=digest_bytes(content)):
                raise ValueError("its tensors are not what their digest says")
            return cls(
                **{name: head[name] for name in ("id", "rank", "num_ranks", "state")},
                tensors=safetensors.torch.load(content) if content else {},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(path, str(error)) from error


def part_path(path: Path, rank: int) -> Path:
    """Return where a rank keeps what belongs to a checkpoint."""
    return beside(path, RESUME) / f"rank-{rank:05d}.state"


def write_part(path: Path, part: Part) -> None:
    """Write what a rank keeps beside a checkpoint, atomically, in place of what it kept of an earlier save."""
    write_atomically(part_path(path, part.rank), part.to_bytes())


def holds_part(path: Path, rank: int, id: str) -> bool:
    """Return whether what a rank keeps beside a checkpoint is of a save."""
    try:
        with part_path(path, rank).open("rb") as file:
            return f'"id": "{id}"'.encode() in file.readline()
    except FileNotFoundError:
        return False


def read_part(path: Path, sidecar: Sidecar, rank: int) -> Part | None:
    """Return what a rank keeps of a checkpoint; None where it is missing, or belongs to another save.

    Raises:
        CheckpointFormatError: it is damaged.
    """
    place = part_path(path, rank)
    raw = read_bytes(place)
    part = None if raw is None else Part.from_bytes(raw, str(place))
    is_its = part is not None and (part.id, part.rank, part.num_ranks) == (sidecar.id, rank, sidecar.num_ranks)
    return part if is_its else None


def missing_parts(path: Path, sidecar: Sidecar) -> tuple[str, ...]:
    """Return the names of what ranks kept beside a checkpoint that is not there any more; reads all of it.

    Raises:
        CheckpointFormatError: something of it is damaged.
    """
    ranks = [rank for rank in range(sidecar.num_ranks) if read_part(path, sidecar, rank) is None]
    return tuple(f"the part of rank {rank}" for rank in ranks)
