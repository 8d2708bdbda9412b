"""The sidecar of a checkpoint, ``X.ckpt.digests.json``: digests of what was saved. And how files beside it are written.

Every file holds a digest of itself, so that a flipped bit is damage and never another content. None of the names that
are added to a checkpoint's own holds a digit, since Lightning takes every digit after ``hpc_ckpt_`` in a folder's
listing as a version, and none ends in ``.ckpt``.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from det_callbacks.checkpoint.entries import Entries, Entry
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
        file: the checkpoint's bytes; of a folder those of all its files.
        entries: section (a key of the checkpoint) -> path in it -> entry; of a folder its files, in section "files".
        run: id, mode and reference of the run it belongs to; None outside one.
        step: the last training batch that was done, counted from 0; None before the first.
        epoch: under way, counted from 0.
        num_ranks: processes that saved a part for an exact resume; 0 where none did.
    """

    id: str
    file: FileDigest
    entries: Entries
    run: Mapping[str, str | None] | None = None
    step: int | None = None
    epoch: int | None = None
    num_ranks: int = 0
    det_callbacks_version: str = field(default_factory=lambda: version("det_callbacks"))
    schema: int = SCHEMA
    digest_version: int = DIGEST_VERSION


def read_sidecar(path: Path) -> Sidecar | None:
    """Return the sidecar of a checkpoint; None where none stands beside it.

    Raises:
        CheckpointFormatError: it is truncated, damaged, or of another version.
    """
    place = beside(path, SIDECAR)
    return unseal(place.read_bytes(), str(place), Sidecar) if place.exists() else None


def write_sidecar(path: Path, *, entries: Callable[[], Entries], **content: Any) -> None:
    """Write the sidecar of a checkpoint that is whole, atomically; reads the file, or the files of the folder.

    Args:
        path: of the checkpoint.
        entries: returns those of the checkpoint; called where it is a file.
        content: further attributes of the sidecar.
    """
    file, files = measure(path)
    write_atomically(beside(path, SIDECAR), seal(Sidecar(file=file, entries=files or entries(), **content)))


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
    plain = {key: value for key, value in content.items() if key != "digest"} if isinstance(content, dict) else {}
    # the digest first: a flipped bit in a version is damage and not a foreign version
    if _encode({**plain, "digest": format_digest(digest_bytes(_encode(plain)))}) != raw:
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
    return json.dumps(content).encode() + b"\n"


def damaged(path: str, what: str) -> CheckpointFormatError:
    """Return the error of a file beside a checkpoint that cannot be read."""
    is_part = Path(path).parent.name.endswith(RESUME)
    other = (
        'resume with resume="plain", which does without it' if is_part else "delete it to use the checkpoint unchecked"
    )
    return CheckpointFormatError(
        f"{path} is damaged: {what}. The checkpoint beside it was not looked at, and nothing was loaded; restore this "
        f"file from a copy, or {other}.",
        path,
    )


# files


def is_remote(path: str | Path) -> bool:
    """Return whether a path is a URL: what lies behind it has no digests beside it."""
    return "://" in str(path)


def beside(path: Path, suffix: str) -> Path:
    """Return the path whose name is this one's and the suffix."""
    return path.with_name(path.name + suffix)


def resolved(path: str | Path) -> Path:
    """Return a path with links followed, so that ``last.ckpt`` has what stands beside the checkpoint it leads to."""
    return Path(os.path.realpath(path))


def measure(path: Path) -> tuple[FileDigest, Entries | None]:
    """Return size and digest of a file, and None; of a folder those of all its files, and each of them as an entry."""
    if path.is_file():
        size, digest = digest_file(path)
        return FileDigest(size=size, digest=format_digest(digest)), None
    files = {}
    for one in sorted(one for one in path.rglob("*") if one.is_file()):
        size, digest = digest_file(one)
        entry = Entry(kind="file", type="file", digest=format_digest(digest), shape=(size,))
        files[one.relative_to(path).as_posix()] = entry
    total = sum(sum(entry.shape or ()) for entry in files.values())
    return FileDigest(size=total, digest=format_digest(digest_bytes(repr(files).encode()))), {"files": files}


def remove_beside(path: Path) -> None:
    """Remove everything of ours that stands beside a checkpoint; never what a link leads to."""
    beside(path, SIDECAR).unlink(missing_ok=True)
    folder = beside(path, RESUME)
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)  # another rank may write its own part of it at the same time


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file durably under another name, without a digit in it, and give it its own when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = beside(path, ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
