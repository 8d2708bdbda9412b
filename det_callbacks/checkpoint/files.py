"""The files next to a checkpoint: a sidecar ``X.ckpt.digests.json``, and parts ``X.ckpt.resume/rank-00001.state``.

Each contains a digest of itself. Suffixes have no digit, because Lightning reads digits after
``hpc_ckpt_`` as a version.
"""

import errno
import json
import os
import sys
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
from det_callbacks.errors import CheckpointFormatError
from det_callbacks.runs.disk import make_folder, open_to_write, writing
from det_callbacks.runs.files import MAX_BYTES, read_file
from det_callbacks.settings.generators import GeneratorStates

SCHEMA = 1
SIDECAR = ".digests.json"
RESUME = ".resume"
ANOTHER_PLACE = "save checkpoints elsewhere (dirpath of ModelCheckpoint, default_root_dir of the Trainer)"

Content = TypeVar("Content")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    size: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """The digests of a checkpoint, written when it is saved."""

    id: str  # random identity of the save
    file: FileDigest  # digest of the file, or of all files of a folder
    entries: Entries  # by section and path; the files of a folder are in section "files"
    # "0/state/3" in the optimizers' states -> name
    parameters: Mapping[str, str] = field(default_factory=dict)
    run: Mapping[str, str | None] | None = None  # id, mode and reference of the run, if any
    step: int | None = None  # last completed training batch, from 0
    epoch: int | None = None  # from 0
    num_ranks: int = 0  # processes that saved a part for an exact resume
    det_callbacks_version: str = field(default_factory=lambda: version("det_callbacks"))
    schema: int = SCHEMA
    digest_version: int = DIGEST_VERSION


def read_sidecar(path: Path) -> Sidecar | None:
    place = beside(path, SIDECAR)
    return unseal(_read(place), place, Sidecar) if os.path.lexists(place) else None


def write_sidecar(path: Path, *, entries: Callable[[], Entries], **content: Any) -> None:
    """Write the sidecar of a complete checkpoint atomically; for a file, call ``entries``."""
    file, files = measure(path)
    _write(beside(path, SIDECAR), seal(Sidecar(file=file, entries=files or entries(), **content)))


def measure(path: Path) -> tuple[FileDigest, Entries | None]:
    """Return the digest of a file, or the digest of a folder with an entry for each file."""
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
    before_iteration: GeneratorStates
    before_first: GeneratorStates | None = None  # None before the first batch
    num_drawn: int = 0
    first_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The state of one process that Lightning's checkpoint omits; a line of JSON before the tensors."""

    id: str  # id of the save
    rank: int
    is_epoch_over: bool  # the epoch's data is exhausted
    # state before the next batch is loaded or, without a position, before the next epoch's hooks
    generators: GeneratorStates
    idle: tuple[str, ...] | None = None  # generators not used yet, or None if unknown
    position: DataPosition | None = None  # None if the next epoch had not begun
    values: Mapping[str, Any] = field(default_factory=dict)  # what loading must restore, by name
    # index -> state of a ReduceLROnPlateau, and its optimizer's learning rates
    plateaus: Mapping[str, tuple[dict[str, Any], list[float]]] = field(default_factory=dict)
    buckets: tuple[tuple[str, ...], ...] = ()  # of DDP; empty if they are those of a new DDP
    syncs_buffers: bool = True  # whether DDP's next forward pass broadcasts buffers
    problems: tuple[str, ...] = ()  # why an exact resume is impossible
    tensors: str = ""  # digest of the safetensors that follow
    schema: int = SCHEMA
    digest_version: int = DIGEST_VERSION


def part_path(path: Path, rank: int) -> Path:
    return beside(path, RESUME) / f"rank-{rank:05d}.state"


def write_part(path: Path, part: Part, tensors: Mapping[str, Tensor]) -> None:
    content = safetensors.torch.save(dict(tensors))
    _write(part_path(path, part.rank), seal(replace(part, tensors=_digest_of(content))) + content)


def read_part(path: Path, sidecar: Sidecar, rank: int) -> tuple[Part, dict[str, Tensor]] | None:
    """Return what a rank saved, or None if it is missing, or from a different save."""
    place = part_path(path, rank)
    if not os.path.lexists(place):
        return None
    line, end, content = _read(place, limit=sys.maxsize).partition(b"\n")
    part = unseal(line + end, place, Part)
    if part.tensors != _digest_of(content):
        raise _damaged(place, "its tensors do not match their digest")
    return (part, safetensors.torch.load(content)) if (part.id, part.rank) == (sidecar.id, rank) else None


def _digest_of(content: bytes) -> str:
    return format_digest(digest_bytes(content))


def seal(content: Any) -> bytes:
    plain = msgspec.to_builtins(content)
    return _encode({**plain, "digest": _digest_of(_encode(plain))})


def unseal(raw: bytes, path: Path, kind: type[Content]) -> Content:
    """Return the sealed content; raise ``CheckpointFormatError`` if it is damaged, or has another version."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        content = None
    plain = {**content} if isinstance(content, dict) else {}
    plain.pop("digest", None)
    # the digest first: a flipped bit in the version is damage
    if seal(plain) != raw:
        raise _damaged(path, "its content does not match its digest")
    for name, known in (("schema", SCHEMA), ("digest_version", DIGEST_VERSION)):
        if plain.get(name) != known:
            raise CheckpointFormatError(
                f"{path} has {name} {plain.get(name)!r}, but this version of det_callbacks reads {known}. Use the "
                "version that saved the checkpoint, or save it again.",
                str(path),
            )
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise _damaged(path, f"its structure is not that of a {kind.__name__.lower()} ({error})") from error


def _encode(content: Mapping[str, Any]) -> bytes:
    """Return one line; indentation takes 20 times as long, and msgspec writes no 128-bit ints."""
    return json.dumps(content).encode() + b"\n"


def _damaged(path: Path, what: str) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"{path} is damaged: {what}. Nothing was loaded. Restore this file from a copy, or delete it and resume with "
        'resume="plain", which does not need it.',
        str(path),
    )


def is_remote(path: str | Path) -> bool:
    """Return whether a path is a URL; checkpoints there get no digests."""
    return "://" in str(path)


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _read(path: Path, limit: int = MAX_BYTES) -> bytes:
    try:
        _refuse_link(path.parent)
        return read_file(path, limit)
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error


def _refuse_link(folder: Path) -> None:
    """Raise OSError for a link in the place of our folder next to a checkpoint; others are the user's."""
    if folder.name.endswith(RESUME) and folder.is_symlink():
        raise OSError(errno.ELOOP, f"{folder} is a link to {os.readlink(folder)}")


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically and durably; its temporary name has no digit."""
    make_folder(path.parent, instead=ANOTHER_PLACE)
    temporary = beside(path, ".tmp")
    with writing(path, instead=ANOTHER_PLACE):
        _refuse_link(path.parent)
        with open_to_write(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
