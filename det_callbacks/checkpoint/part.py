"""What each rank saves beside a checkpoint for an exact resume: ``X.ckpt.resume/rank-00001.state``.

A file is a line of JSON with a digest of itself, and tensors in the safetensors format.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from det_callbacks.checkpoint.files import (
    RESUME,
    SCHEMA,
    FileDigest,
    Sidecar,
    beside,
    damaged,
    seal,
    unseal,
    write_atomically,
)
from det_callbacks.digest import DIGEST_VERSION, digest_bytes, format_digest
from det_callbacks.rng import GeneratorStates


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """How the batches of an epoch were drawn so far.

    Attributes:
        before_iteration: generators when the loader began to be iterated over.
        before_first: generators before the first batch was drawn; None where none was.
        num_drawn: batches drawn from the loader.
        first_digest: of the first batch, in hexadecimal; empty before it.
    """

    before_iteration: GeneratorStates
    before_first: GeneratorStates | None = None
    num_drawn: int = 0
    first_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """The state that Lightning's checkpoint leaves out, of one process.

    Attributes:
        is_epoch_over: the data of the epoch was used up when the checkpoint was saved.
        generators: just before the next batch is drawn; where ``position`` is None, before the hooks of the next epoch.
        position: in the data from which the next batch is drawn; None where the next epoch had not begun.
        accumulates: batches whose gradients are added up; a callback may change it at an epoch's start.
        values: name -> digest of a parameter or buffer, or text of an optimizer's option, when the checkpoint was
            saved: what loading it has to bring back.
        plateaus: number -> state of a ReduceLROnPlateau.
        buckets: names of the parameters in each of DDP's buckets; empty where a new DDP module makes the right ones.
        syncs_buffers: whether DDP's next forward pass sends rank 0's buffers to the others.
        problems: why a resumed run cannot be the same run, as sentences; empty when it can.
    """

    is_epoch_over: bool
    generators: GeneratorStates
    position: DataPosition | None = None
    accumulates: int = 1
    values: Mapping[str, Any] = field(default_factory=dict)
    plateaus: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    buckets: tuple[tuple[str, ...], ...] = ()
    syncs_buffers: bool = True
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The line of JSON of one rank: which save it belongs to, the state, and a digest of the tensors that follow."""

    id: str
    rank: int
    num_ranks: int
    state: ResumeState
    tensors: FileDigest
    schema: int = SCHEMA
    digest_version: int = DIGEST_VERSION


def part_path(path: Path, rank: int) -> Path:
    """Return where a rank saves what belongs to a checkpoint."""
    return beside(path, RESUME) / f"rank-{rank:05d}.state"


def write_part(path: Path, state: ResumeState, tensors: Mapping[str, Tensor], **whose: Any) -> None:
    """Write what a rank saves beside a checkpoint, atomically, in place of what it saved before.

    Args:
        path: of the checkpoint.
        state: to go on from.
        tensors: name -> tensor on the host.
        whose: ``id``, ``rank`` and ``num_ranks`` of the part.
    """
    content = safetensors.torch.save(dict(tensors)) if tensors else b""
    part = Part(**whose, state=state, tensors=_digest_of(content))
    write_atomically(part_path(path, part.rank), seal(part) + content)


def read_part(path: Path, sidecar: Sidecar, rank: int) -> tuple[ResumeState, dict[str, Tensor]] | None:
    """Return the state and tensors that a rank saved; None where they are missing, or belong to another save.

    Raises:
        CheckpointFormatError: the file is truncated, damaged, or of another version.
    """
    place = part_path(path, rank)
    if not place.exists():
        return None
    line, end, content = place.read_bytes().partition(b"\n")
    part = unseal(line + end, str(place), Part)
    if part.tensors != _digest_of(content):
        raise damaged(str(place), "its tensors are not what their digest says")
    if (part.id, part.rank, part.num_ranks) != (sidecar.id, rank, sidecar.num_ranks):
        return None
    return part.state, safetensors.torch.load(content) if content else {}


def _digest_of(content: bytes) -> FileDigest:
    return FileDigest(size=len(content), digest=format_digest(digest_bytes(content)))
