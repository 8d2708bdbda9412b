"""The files beside a checkpoint: its sidecar ``X.ckpt.digests.json``, and its parts ``X.ckpt.resume/rank-00001.state``.

Every file holds a digest of itself, so that a flipped bit is damage and never another content. What is appended to a
checkpoint's name holds no digit, since Lightning takes every digit after ``hpc_ckpt_`` in a listing as a version.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import safetensors.torch
from torch import Tensor

from det_callbacks.checkpoint.entries import Entries, Entry
from det_callbacks.digest.host import DIGEST_VERSION, digest_bytes, digest_file, format_digest
from det_callbacks.environment.rng import GeneratorStates
from det_callbacks.errors import CheckpointFormatError
from det_callbacks.runs.disk import make_folder, writing

SCHEMA = 1
SIDECAR = ".digests.json"
RESUME = ".resume"
ANOTHER_PLACE = "save checkpoints elsewhere (dirpath of ModelCheckpoint, default_root_dir of the Trainer)"

Content = TypeVar("Content")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """Size in bytes and digest of a file, in hexadecimal."""

    size: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """Digests of one save of a checkpoint."""

    id: str  # random identity of the save, hexadecimal
    file: FileDigest  # of the checkpoint's bytes; of a folder those of all its files
    entries: Entries  # by section, a key of the checkpoint, and path in it; of a folder its files, in section "files"
    parameters: Mapping[str, str] = field(default_factory=dict)  # of "0/state/3" in the optimizers' states: its name
    run: Mapping[str, str | None] | None = None  # id, mode and reference of the run it belongs to; None outside one
    step: int | None = None  # the last training batch that was done, counted from 0; None before the first
    epoch: int | None = None  # under way, counted from 0
    num_ranks: int = 0  # processes that saved a part for an exact resume; 0 where none did
    det_callbacks_version: str = field(default_factory=lambda: version("det_callbacks"))
    schema: int = SCHEMA
    digest_version: int = DIGEST_VERSION


def read_sidecar(path: Path) -> Sidecar | None:
    """Return the sidecar of a checkpoint; None where none stands beside it."""
    place = beside(path, SIDECAR)
    return unseal(place.read_bytes(), place, Sidecar) if place.exists() else None


def write_sidecar(path: Path, *, entries: Callable[[], Entries], **content: Any) -> None:
    """Write the sidecar of a checkpoint that is whole, atomically; ``entries`` is called where it is a file."""
    file, files = measure(path)
    _write(beside(path, SIDECAR), seal(Sidecar(file=file, entries=files or entries(), **content)))


def measure(path: Path) -> tuple[FileDigest, Entries | None]:
    """Return size and digest of a file, and None; of a folder those of all its files, and each of them as an entry."""
    if path.is_file():
        size, digest = digest_file(path)
        return FileDigest(size=size, digest=format_digest(digest)), None
    files, total = {}, 0
    for one in sorted(one for one in path.rglob("*") if one.is_file()):
        size, digest = digest_file(one)
        total += size
        entry = Entry(kind="file", type="file", digest=format_digest(digest), shape=(size,))
        files[one.relative_to(path).as_posix()] = entry
    return FileDigest(size=total, digest=_digest_of(repr(files).encode())), {"files": files}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """How the batches of an epoch were drawn so far."""

    before_iteration: GeneratorStates  # when the loader began to be iterated over
    before_first: GeneratorStates | None = None  # before the first batch was drawn; None where none was
    num_drawn: int = 0  # batches drawn from the loader
    first_digest: str = ""  # of the first batch, in hexadecimal; empty before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The state of one process that Lightning's checkpoint leaves out; the line of JSON before the tensors."""

    id: str  # of the save
    rank: int
    is_epoch_over: bool  # the data of the epoch was used up
    # just before the next batch is drawn; where there is no position, before the hooks of the next epoch
    generators: GeneratorStates
    idle: tuple[str, ...] | None = None  # those that nothing had drawn from; None where that is not known
    position: DataPosition | None = None  # from which the next batch is drawn; None where the next epoch had not begun
    values: Mapping[str, Any] = field(default_factory=dict)  # what loading has to bring back, by name
    # number -> state of a ReduceLROnPlateau, and the learning rates of its optimizer
    plateaus: Mapping[str, tuple[dict[str, Any], list[float]]] = field(default_factory=dict)
    buckets: tuple[tuple[str, ...], ...] = ()  # of DDP; empty where a new DDP module makes the right ones
    syncs_buffers: bool = True  # whether DDP's next forward pass sends rank 0's buffers to the others
    problems: tuple[str, ...] = ()  # why a resumed run cannot be the same run, as sentences
    tensors: str = ""  # digest of what follows: tensors in the safetensors format
    schema: int = SCHEMA
    digest_version: int = DIGEST_VERSION


def part_path(path: Path, rank: int) -> Path:
    """Return where a rank saves what belongs to a checkpoint."""
    return beside(path, RESUME) / f"rank-{rank:05d}.state"


def write_part(path: Path, part: Part, tensors: Mapping[str, Tensor]) -> None:
    """Write what a rank saves beside a checkpoint, atomically."""
    content = safetensors.torch.save(dict(tensors))
    _write(part_path(path, part.rank), seal(replace(part, tensors=_digest_of(content))) + content)


def read_part(path: Path, sidecar: Sidecar, rank: int) -> tuple[Part, dict[str, Tensor]] | None:
    """Return what a rank saved; None where it is missing, or belongs to another save."""
    place = part_path(path, rank)
    if not place.exists():
        return None
    line, end, content = place.read_bytes().partition(b"\n")
    part = unseal(line + end, place, Part)
    if part.tensors != _digest_of(content):
        raise _damaged(place, "its tensors are not what their digest says")
    return (part, safetensors.torch.load(content)) if (part.id, part.rank) == (sidecar.id, rank) else None


def _digest_of(content: bytes) -> str:
    return format_digest(digest_bytes(content))


def seal(content: Any) -> bytes:
    """Return one line of JSON of a dataclass, with a digest of itself; equal content has equal bytes."""
    plain = msgspec.to_builtins(content)
    return _encode({**plain, "digest": _digest_of(_encode(plain))})


def unseal(raw: bytes, path: Path, kind: type[Content]) -> Content:
    """Return what was sealed; raises ``CheckpointFormatError`` where it is damaged, or of another version."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        content = None
    plain = {**content} if isinstance(content, dict) else {}
    plain.pop("digest", None)
    # the digest first: a flipped bit in a version is damage and not a foreign version
    if seal(plain) != raw:
        raise _damaged(path, "its content is not what its digest says")
    for name, known in (("schema", SCHEMA), ("digest_version", DIGEST_VERSION)):
        if plain.get(name) != known:
            raise CheckpointFormatError(
                f"{path} has {name} {plain.get(name)!r}, and this version of det_callbacks reads {known}. The "
                "checkpoint itself was not looked at. Use the version that saved it, or save it again.",
                str(path),
            )
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise _damaged(path, f"its structure is not that of a {kind.__name__.lower()} ({error})") from error


def _encode(content: Mapping[str, Any]) -> bytes:
    """Return one line: indented, 10,000 entries would take 20 times as long. msgspec writes no ints of 128 bits."""
    return json.dumps(content).encode() + b"\n"


def _damaged(path: Path, what: str) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"{path} is damaged: {what}. Nothing was loaded; restore this file from a copy, or delete it and resume with "
        'resume="plain", which does without it.',
        str(path),
    )


def is_remote(path: str | Path) -> bool:
    """Return whether a path is a URL: what lies behind it has no digests beside it."""
    return "://" in str(path)


def beside(path: Path, suffix: str) -> Path:
    """Return the path whose name is this one's and the suffix."""
    return path.with_name(path.name + suffix)


def _write(path: Path, content: bytes) -> None:
    """Write a file durably under another name, without a digit in it, and give it its own when it is whole."""
    make_folder(path.parent, instead=ANOTHER_PLACE)
    temporary = beside(path, ".tmp")
    with writing(path, instead=ANOTHER_PLACE):
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
