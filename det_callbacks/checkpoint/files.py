"""The files next to a checkpoint: a sidecar ``X.ckpt.digests.json``, and parts
``X.ckpt.resume/rank-00001.state``.

Each contains a digest of itself. Suffixes have no digit, because Lightning reads digits after
``hpc_ckpt_`` as a version.
"""

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import safetensors.torch
import torch
from torch import Tensor

from det_callbacks.digest.components import digest_tensors
from det_callbacks.digest.host import DIGEST_VERSION, digest_bytes, digest_file, format_digest
from det_callbacks.errors import CheckpointFormatError, DetCallbacksError
from det_callbacks.runs.files import MAX_BYTES, make_folder, open_to_write, read_file, writing
from det_callbacks.settings.generators import GeneratorStates

MAX_FLAT = 1000
"""Longer containers of plain values become one entry."""

Entries = Mapping[str, Mapping[str, "Entry"]]

SCHEMA = 1
SIDECAR = ".digests.json"
RESUME = ".resume"
ANOTHER_PLACE = (
    "save checkpoints elsewhere (dirpath of ModelCheckpoint, default_root_dir of the Trainer)"
)

Content = TypeVar("Content")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    kind: str  # "tensor", "value" (plain), "file" (of a folder) or "opaque"
    type: str  # dtype ("float32") or type
    digest: str | None = None  # digest of a row-major tensor or an encoded value, or None if opaque
    shape: tuple[int, ...] | None = None


def entries_of(checkpoint: Mapping[Any, Any]) -> dict[str, dict[str, Entry]]:
    """Return the entries of a checkpoint by section (top-level key) and path;
    reads every tensor once.
    """
    leaves = list(walk(checkpoint))
    digests = iter(_digests([value for _, _, value in leaves if isinstance(value, Tensor)]))
    found: dict[str, dict[str, Entry]] = {}
    for section, path, value in leaves:
        found.setdefault(section, {})[path] = _entry(value, digests)
    return found


def walk(checkpoint: Mapping[Any, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield section, path and value of each entry; the path is "" if the section
    itself is a value.
    """
    for key, value in checkpoint.items():
        for path, leaf in _leaves(value, (id(checkpoint),)):
            yield _key(key), path, leaf


def _leaves(value: Any, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    if id(value) in above:
        yield "", object()  # a container that holds itself is opaque
        return
    is_walked = False
    if isinstance(value, dict | list | tuple) and value:
        is_named = isinstance(value, dict) or any(
            isinstance(inner, dict | list | tuple) for inner in value
        )
        is_walked = (is_named and len(value) <= MAX_FLAT) or encode_plain(value) is None
    if not is_walked:
        yield "", value
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        for path, leaf in _leaves(inner, (*above, id(value))):
            yield (f"{_key(key)}/{path}" if path else _key(key)), leaf


def _key(key: Any) -> str:
    """Return a key as part of a path; text that looks like a number is quoted."""
    if not isinstance(key, str):
        return repr(key) if encode_plain(key) is not None else f"<{type(key).__qualname__}>"
    name = key.replace("~", "~0").replace("/", "~1")
    return repr(name) if name.lstrip("-").isdigit() or not name else name


def _entry(value: Any, digests: Iterator[str | None]) -> Entry:
    if isinstance(value, Tensor):
        digest, name = next(digests), str(value.dtype).removeprefix("torch.")
        if digest is None:
            return Entry(kind="opaque", type=f"{type(value).__qualname__} {name} without data")
        shape = (value.size(0),) if value.is_nested else tuple(value.shape)
        return Entry(kind="tensor", type=name, digest=digest, shape=shape)
    # an empty OrderedDict equals an empty dictionary
    kind, encoded = (
        "dict" if isinstance(value, dict) else type(value).__qualname__,
        encode_plain(value),
    )
    if encoded is None:
        return Entry(kind="opaque", type=kind)
    return Entry(kind="value", type=kind, digest=format_digest(digest_bytes(encoded)))


def _digests(tensors: list[Tensor]) -> list[str | None]:
    """Return the digests, or None for tensors without data."""
    try:
        return [format_digest(digest) for digest in digest_tensors(tensors)]
    except (TypeError, DetCallbacksError):
        return (
            [None]
            if len(tensors) == 1
            else [digest for tensor in tensors for digest in _digests([tensor])]
        )


_ATOMS = (bool, int, float, complex, str, bytes, bytearray, type(None), torch.dtype, torch.device)


def encode_plain(value: Any) -> bytes | None:
    """Return bytes that identify a plain value and its type, or None for other objects."""
    try:
        return _text(value).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError):  # huge integers raise ValueError
        return None


def _text(value: Any) -> str:
    if type(value) in _ATOMS:
        return repr(value)
    if isinstance(value, dict):
        return f"dict({', '.join(_text(one) for item in value.items() for one in item)})"
    if isinstance(value, set | frozenset):
        return f"set({', '.join(sorted(map(_text, value)))})"
    if not isinstance(value, list | tuple):
        raise TypeError(f"{type(value)} is not a plain value")
    return f"{'list' if isinstance(value, list) else 'tuple'}({', '.join(map(_text, value))})"


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
    """The state of one process that Lightning's checkpoint omits;
    a line of JSON before the tensors.
    """

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
    return (
        (part, safetensors.torch.load(content))
        if (part.id, part.rank) == (sidecar.id, rank)
        else None
    )


def _digest_of(content: bytes) -> str:
    return format_digest(digest_bytes(content))


def seal(content: Any) -> bytes:
    plain = msgspec.to_builtins(content)
    return _encode({**plain, "digest": _digest_of(_encode(plain))})


def unseal(raw: bytes, path: Path, kind: type[Content]) -> Content:
    """Return the sealed content; raise ``CheckpointFormatError`` if it is damaged,
    or has another version.
    """
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
                f"{path} has {name} {plain.get(name)!r}, but this version of det_callbacks reads "
                f"{known}. Use the version that saved the checkpoint, or save it again.",
                str(path),
            )
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise _damaged(
            path, f"its structure is not that of a {kind.__name__.lower()} ({error})"
        ) from error


def _encode(content: Mapping[str, Any]) -> bytes:
    """Return one line; indentation takes 20 times as long, and msgspec writes no 128-bit ints."""
    return json.dumps(content).encode() + b"\n"


def _damaged(path: Path, what: str) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"{path} is damaged: {what}. Nothing was loaded. Restore this file from a copy, or delete "
        'it and resume with resume="plain", which does not need it.',
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
    """Raise OSError for a link in the place of our folder next to a checkpoint;
    others are the user's.
    """
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
