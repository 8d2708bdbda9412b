"""The files beside a checkpoint ``X.ckpt``: its digests, and what each rank saves for an exact resume.

``X.ckpt.digests.json`` is the sidecar: what the checkpoint was when it was saved. ``X.ckpt.resume/rank-00001.state`` is
the part of a rank: a line of JSON, then tensors in the safetensors format. Both hold a digest of themselves, so that a
flipped bit is damage and never another content. None of the names that are added to a checkpoint's own holds a digit,
since Lightning takes every digit after ``hpc_ckpt_`` in a folder's listing as a version, and none ends in ``.ckpt``.
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import safetensors.torch
from torch import Tensor

from det_callbacks.checkpoint.entries import Entries, Entry
from det_callbacks.checkpoint.state import ResumeState
from det_callbacks.digest import DIGEST_VERSION, digest_bytes, digest_file, format_digest
from det_callbacks.errors import CheckpointFormatError

SCHEMA = 1
SIDECAR = ".digests.json"
RESUME = ".resume"

Content = TypeVar("Content")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """Size in bytes and digest of a file, in hexadecimal."""

    size: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """Digests of one save of a checkpoint.

    Attributes:
        id: random identity of the save, hexadecimal.
        file: the checkpoint's bytes; None where it is a folder.
        entries: section (a key of the checkpoint) -> path in it -> entry; of a folder its files, in section "files".
        run: id, mode and reference of the run it belongs to; None outside one.
        step: the last training batch that was done, counted from 0; None before the first.
        epoch: under way, counted from 0.
        num_ranks: processes that saved a part for an exact resume; 0 where none did.
    """

    id: str
    file: FileDigest | None
    entries: Entries
    run: Mapping[str, str | None] | None = None
    step: int | None = None
    epoch: int | None = None
    num_ranks: int = 0
    det_callbacks_version: str = field(default_factory=lambda: version("det_callbacks"))
    schema: int = SCHEMA
    digest_version: int = DIGEST_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank saved with a checkpoint for an exact resume, but for tensors.

    Attributes:
        id: of the save.
        rank: that saved it.
        num_ranks: that saved.
        state: to go on from.
        tensors: the bytes that follow in the file.
    """

    id: str
    rank: int
    num_ranks: int
    state: ResumeState
    tensors: FileDigest
    schema: int = SCHEMA
    digest_version: int = DIGEST_VERSION


# the sidecar


def read_sidecar(path: Path) -> Sidecar | None:
    """Return the sidecar of a checkpoint; None where none stands beside it.

    Raises:
        CheckpointFormatError: it is truncated, damaged, or of another version.
    """
    place = beside(path, SIDECAR)
    raw = _read_bytes(place)
    return None if raw is None else unseal(raw, str(place), Sidecar)


def write_sidecar(path: Path, *, entries: Callable[[], Entries], **content: Any) -> None:
    """Write the sidecar of a checkpoint that is whole, atomically; reads the file, or the files of the folder, once.

    Args:
        path: of the checkpoint.
        entries: returns those of the checkpoint; called where it is a file.
        content: further attributes of the sidecar.
    """
    is_folder = path.is_dir()
    found = {"files": digest_folder(path)} if is_folder else entries()
    sidecar = Sidecar(file=None if is_folder else digest_path(path), entries=found, **content)
    _write_atomically(beside(path, SIDECAR), seal(sidecar))


# the parts of the ranks


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
    _write_atomically(part_path(path, part.rank), seal(part) + content)


def has_part(path: Path, rank: int, id: str) -> bool:
    """Return whether what a rank saved beside a checkpoint is of a save."""
    try:
        with part_path(path, rank).open("rb") as file:
            return f'"id": "{id}"'.encode() in file.readline()
    except FileNotFoundError:
        return False


def read_part(path: Path, sidecar: Sidecar, rank: int) -> tuple[ResumeState, dict[str, Tensor]] | None:
    """Return the state and tensors that a rank saved; None where they are missing, or belong to another save.

    Raises:
        CheckpointFormatError: the file is truncated, damaged, or of another version.
    """
    place = part_path(path, rank)
    raw = _read_bytes(place)
    if raw is None:
        return None
    line, end, content = raw.partition(b"\n")
    part = unseal(line + end, str(place), Part)
    if part.tensors != _digest_of(content):
        raise damaged(str(place), "its tensors are not what their digest says")
    if (part.id, part.rank, part.num_ranks) != (sidecar.id, rank, sidecar.num_ranks):
        return None
    return part.state, safetensors.torch.load(content) if content else {}


def missing_parts(path: Path, sidecar: Sidecar) -> tuple[str, ...]:
    """Return the names of the ranks' parts that are not there any more; reads all that are.

    Raises:
        CheckpointFormatError: one of them is damaged.
    """
    ranks = [rank for rank in range(sidecar.num_ranks) if read_part(path, sidecar, rank) is None]
    return tuple(f"the part of rank {rank}" for rank in ranks)


# JSON with a digest of itself


def seal(content: Any) -> bytes:
    """Return one line of JSON of a dataclass, with a digest of itself; equal content has equal bytes."""
    plain = msgspec.to_builtins(content)
    return _encode({**plain, "digest": format_digest(digest_bytes(_encode(plain)))})


def unseal(raw: bytes, path: str, kind: type[Content]) -> Content:
    """Return what was sealed; ``path`` is of the file, for messages.

    Raises:
        CheckpointFormatError: it is truncated, damaged, something else, or of another version.
    """
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise damaged(path, "it is empty" if not raw else f"it is not JSON ({error})") from error
    if not isinstance(content, dict) or "schema" not in content:
        raise damaged(path, "it is none of the files that stand beside a checkpoint")
    # The digest first: a flipped bit in a version is damage and not a foreign version.
    plain = {key: value for key, value in content.items() if key != "digest"}
    if content.get("digest") != format_digest(digest_bytes(_encode(plain))) or _encode(content) != raw:
        raise damaged(path, "its content is not what its digest says")
    for name, known in (("schema", SCHEMA), ("digest_version", DIGEST_VERSION)):
        if plain.get(name) != known:
            raise CheckpointFormatError(
                f"{path} has {name} {plain.get(name)!r}, and this version of det_callbacks reads {known}. The "
                "checkpoint itself was not looked at. Use the version that saved it, or save it again.",
                path,
            )
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise damaged(path, f"its structure is not that of a {kind.__name__.lower()} ({error})") from error


def _encode(content: Mapping[str, Any]) -> bytes:
    """Return one line: indented, 10,000 entries would take 20 times as long. msgspec writes no ints of 128 bits."""
    return json.dumps(content, allow_nan=False).encode() + b"\n"


def damaged(path: str, what: str) -> CheckpointFormatError:
    """Return the error of a file beside a checkpoint that cannot be read."""
    return CheckpointFormatError(
        f"{path} is damaged: {what}. The checkpoint beside it was not looked at, and nothing was loaded; restore this "
        "file from a copy, or delete it to use the checkpoint unchecked.",
        path,
    )


# files


def new_id() -> str:
    """Return the random identity of a save; drawn from the operating system, so no generator moves."""
    return uuid.UUID(bytes=os.urandom(16), version=4).hex


def is_remote(path: str | Path) -> bool:
    """Return whether a path is a URL: what lies behind it has no digests beside it."""
    return "://" in str(path)


def beside(path: Path, suffix: str) -> Path:
    """Return the path whose name is this one's and the suffix."""
    return path.with_name(path.name + suffix)


def resolved(path: str | Path) -> Path:
    """Return a path with links followed, so that ``last.ckpt`` has what stands beside the checkpoint it leads to."""
    return Path(os.path.realpath(path))


def digest_path(path: Path) -> FileDigest:
    """Return size and digest of a file."""
    size, digest = digest_file(path)
    return FileDigest(size=size, digest=format_digest(digest))


def digest_folder(folder: Path) -> dict[str, Entry]:
    """Return an entry for each file of a folder, by its name relative to it; the shape is its size in bytes."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = digest_path(path)
        entry = Entry(kind="file", type="file", digest=content.digest, shape=(content.size,))
        found[path.relative_to(folder).as_posix()] = entry
    return found


def remove_beside(path: Path) -> None:
    """Remove everything of ours that stands beside a checkpoint; never what a link leads to."""
    beside(path, SIDECAR).unlink(missing_ok=True)
    folder = beside(path, RESUME)
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)  # another rank may write its own part of it at the same time


def _digest_of(content: bytes) -> FileDigest:
    return FileDigest(size=len(content), digest=format_digest(digest_bytes(content)))


def _read_bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _write_atomically(path: Path, content: bytes) -> None:
    """Write a file durably under another name, without a digit in it, and give it its own when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = beside(path, ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
