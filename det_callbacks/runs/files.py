"""The names of a run's files, how these are opened, and the error for a damaged file.

A run may come from somebody else: a link in it may lead anywhere, and a size in it may be any number. So nothing
follows a link in a run's folder, and sizes are compared with limits before anything of that size is read.
"""

import errno
import os
import re
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import pyarrow as pa

from det_callbacks.digest.host import digest_bytes, format_digest
from det_callbacks.errors import ReferenceFormatError

FORMAT_VERSION = 2

MANIFEST = "run.json"
PROGRAMS = "programs"
SITES = "sites"
LAYOUTS = "layouts"
SOURCES = "sources"
NONDETERMINISTIC_FILE = "nondeterministic_ops.json"

MAX_ROWS = 2_000_000
"""Sites of a step, and rows of a table: ten times the rows of all programs that a recorder keeps (call_graph.py)."""
MAX_VALUES = 16 * MAX_ROWS
"""Values in all columns of a table, or of a record batch of evidence."""
MAX_BYTES = 1 << 28
"""Bytes of a JSON file or of a line, and of the text in a table or in a record batch."""

LOCK_FILE = ".lock"

# Folders in a run's folder with its replacement: until it may take its place, while the earlier run is removed, while
# the replacement moves. After a kill, the name says what is left to do.
REPLACEMENT, COMPLETE, MOVING = ".replacement", ".complete", ".moving"

DISAGREEMENT = ".disagreement"  # folder with what a resumed recording found different, until the recording ends

OUR_NAME = re.compile(
    rf"{MANIFEST}|{PROGRAMS}|{SITES}|{LAYOUTS}|{SOURCES}|verdict\.json|report\.html|rank-\d{{5}}"
    rf"|\.(run\.json|verdict\.json|report\.html)\.\d+\.tmp"
    rf"|\{REPLACEMENT}|\{COMPLETE}|\{MOVING}|\{DISAGREEMENT}"
)
"""What belongs to a run in its folder, besides its lock; users may keep other files there."""

READ_ERRORS = (
    *(msgspec.MsgspecError, pa.ArrowException, OSError, EOFError, RecursionError),
    *(ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError),
    MemoryError,  # a damaged length may be larger than the memory
)
"""The errors that reading a damaged file may raise."""


def damaged(path: Path, what: object) -> ReferenceFormatError:
    return ReferenceFormatError(
        f"{path} is damaged: {what}. Other files of the run were not checked; record the run again, or restore this "
        "file from a copy.",
        str(path),
    )


def open_without_links(path: str, flags: int) -> int:
    """Open a regular file, for ``open(..., opener=...)``; OSError for a link, a pipe, a device or a folder."""
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # not on Windows
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if not os.path.islink(path):
            raise
        raise OSError(errno.ELOOP, f"it is a link to {os.readlink(path)}", path) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return descriptor


def open_file(path: Path) -> BinaryIO:
    """Open a file of a run for reading."""
    return open(path, "rb", opener=open_without_links)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file of a run for reading; ReferenceFormatError if that fails."""
    try:
        with open_file(path) as file:
            yield file
    except OSError as error:
        raise damaged(path, f"it is missing or cannot be read, although run.json has it ({error})") from error


def read_file(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Return the content of a file of a run; ValueError if it is larger than a run's files are."""
    with open_file(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        require_at_most(limit, num_bytes, "bytes")
        return file.read(num_bytes)


def require_at_most(limit: int, number: int, what: str) -> None:
    """Raise ValueError if a file claims more of something than a run has."""
    if not 0 <= number <= limit:
        raise ValueError(f"it has {number:,} {what}, and a run has at most {limit:,}")


def refuse_links(folder: Path, ranks: Collection[int] | None = None) -> None:
    """Raise ReferenceFormatError if a run, or what it has of these ranks, contains a link."""
    wanted = None if ranks is None else {*map(rank_folder, ranks)}

    def is_seen(name: str) -> bool:
        is_ours = name == LOCK_FILE or OUR_NAME.fullmatch(name) is not None
        return is_ours and (wanted is None or not name.startswith("rank-") or name in wanted)

    for place, folders, files in os.walk(folder, onerror=_refuse_unreadable):
        if place == str(folder):
            folders[:], files = filter(is_seen, folders), [*filter(is_seen, files)]
        for name in (*folders, *files):
            if os.path.islink(path := os.path.join(place, name)):
                raise ReferenceFormatError(
                    f"{path} is a link to {os.readlink(path)}, and a run holds no links. It was not followed, and "
                    "nothing was changed. Remove it, or copy the run without links (cp -rL).",
                    path,
                )


def _refuse_unreadable(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):  # no run, or another process has removed it
        raise damaged(Path(error.filename), error) from error


def table_path(folder: Path, kind: str, identity: int) -> Path:
    """Return the path of a program, a layout or a table of sites."""
    return folder / kind / table_name(identity)


def table_name(identity: int) -> str:
    return f"{format_digest(identity)}.parquet"


def rank_folder(rank: int) -> str:
    return f"rank-{rank:05d}"


def stream_path(folder: Path, rank: int, attempt: int, segment: int) -> Path:
    """Return the path of a process's steps; ``segment`` is the number of the fit in the attempt."""
    suffix = f".segment-{segment:03d}" if segment else ""
    return folder / rank_folder(rank) / f"attempt-{attempt:03d}{suffix}.arrows"


Content = TypeVar("Content")


def read_json(path: Path, kind: type[Content]) -> Content:
    """Return the content of a JSON file; raise ReferenceFormatError, which names a field of the wrong type."""
    try:
        return msgspec.json.decode(read_file(path), type=kind)
    except READ_ERRORS as error:
        raise damaged(path, error) from error


class _Sealed(msgspec.Struct):
    digest: str
    content: msgspec.Raw


def seal(content: object, *, run_id: str) -> bytes:
    """Return a line of JSON with a digest of the content and the run's id."""
    text = msgspec.json.encode(content)
    return msgspec.json.encode(_Sealed(digest=_seal_digest(text, run_id), content=msgspec.Raw(text)))


def unseal(line: bytes, kind: type[Content], *, run_id: str) -> Content:
    """Return the sealed content; raise ValueError if it was changed, or is from another run."""
    sealed = msgspec.json.decode(line, type=_Sealed)
    if sealed.digest != _seal_digest(bytes(sealed.content), run_id):
        raise ValueError("its content does not match its digest")
    return msgspec.json.decode(sealed.content, type=kind)


def _seal_digest(content: bytes, run_id: str) -> str:
    return format_digest(digest_bytes(run_id.encode() + content))
