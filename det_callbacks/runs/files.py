"""The files of a run: their names, and how they are opened, read and written.

Reading: a run may come from somebody else, so a link in it may lead anywhere, and a size in it may
be any number. Nothing follows a link in a run's folder, and sizes are compared with limits before
anything of that size is read.

Writing: a failed write is a ``WriteError``, which ends a program with exit status 2. A run stays
readable: files are replaced as a whole or appended to, and nothing follows a partly written
message. ``tests/contract/test_house.py`` finds a write outside of ``writing``.
"""

import errno
import os
import re
import stat
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, Self, TypeVar

import msgspec
import pyarrow as pa

from det_callbacks.digest.host import digest_bytes, format_digest
from det_callbacks.errors import ReferenceFormatError, WriteError

FORMAT_VERSION = 2  # 1: a site had one name; 2: it has subject, of and part

MANIFEST = "run.json"
PROGRAMS = "programs"
SITES = "sites"
LAYOUTS = "layouts"
SOURCES = "sources"
NONDETERMINISTIC_FILE = "nondeterministic_ops.json"

MAX_ROWS = 2_000_000
"""Sites of a step, and rows of a table: ten times the rows of all programs that a
recorder keeps (call_graph.py).
"""
MAX_VALUES = 16 * MAX_ROWS
"""Values in all columns of a table, or of a record batch of evidence."""
MAX_BYTES = 1 << 28
"""Bytes of a JSON file or of a line, and of the text in a table or in a record batch."""

LOCK_FILE = ".lock"

# Folders in a run's folder with its replacement: until it may take its place, while the earlier run
# is removed, while the replacement moves. After a kill, the name says what is left to do.
REPLACEMENT, COMPLETE, MOVING = ".replacement", ".complete", ".moving"

# folder with what a resumed recording found different, until the recording ends
DISAGREEMENT = ".disagreement"

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

ANOTHER_FOLDER: Mapping[str, str] = {
    # purpose of a run -> what names another folder
    "record": (
        "record to another folder (reference of DeterminismCallback or TrainingRun, name of "
        "ObserverContext, RUN of det-callbacks record)"
    ),
    "verify": (
        "pass another folder for the results (current of DeterminismCallback or TrainingRun, name "
        "of ObserverContext, --current of det-callbacks verify, --to of det-callbacks check)"
    ),
    "audit": "pass another folder for the results (current of DeterminismCallback or TrainingRun)",
}
_ANY_FOLDER = (
    "pass another folder (reference or current of DeterminismCallback; RUN of det-callbacks "
    "record, --current of verify, --to of check)"
)


def damaged(path: Path, what: object) -> ReferenceFormatError:
    """Return the error for a file that cannot be read; ``what`` says why, as a clause."""
    return ReferenceFormatError(
        f"{path} is damaged: {what}. Other files of the run were not checked; record the run "
        "again, or restore this file from a copy.",
        str(path),
    )


def open_without_links(path: str, flags: int) -> int:
    """Open a regular file, for ``open(..., opener=...)``; OSError for a link, a pipe,
    a device or a folder.
    """
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
        raise damaged(
            path, f"it is missing or cannot be read, although run.json has it ({error})"
        ) from error


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
                    f"{path} is a link to {os.readlink(path)}, and a run holds no links. It was "
                    "not followed, and nothing was changed. Remove it, or copy the run without "
                    "links (cp -rL).",
                    path,
                )


def _refuse_unreadable(error: OSError) -> None:
    # no run, or another process has removed it
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
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


def parse_file(path: Path, parse: Callable[[bytes], Content]) -> Content:
    """Return the result of ``parse`` for a file's content; if it raises one of ``READ_ERRORS``,
    the file is damaged.
    """
    try:
        return parse(read_file(path))
    except ReferenceFormatError:  # of another file that parse reads, or of a version
        raise
    except READ_ERRORS as error:
        raise damaged(path, error) from error


def read_json(path: Path, kind: type[Content]) -> Content:
    """Return the content of a JSON file; raise ReferenceFormatError,
    which names a field of the wrong type.
    """
    return parse_file(path, msgspec.json.Decoder(kind).decode)


class _Sealed(msgspec.Struct):
    digest: str
    content: msgspec.Raw


def seal(content: object, *, run_id: str) -> bytes:
    """Return a line of JSON with a digest of the content and the run's id."""
    text = msgspec.json.encode(content)
    return msgspec.json.encode(
        _Sealed(digest=_seal_digest(text, run_id), content=msgspec.Raw(text))
    )


def unseal(line: bytes, kind: type[Content], *, run_id: str) -> Content:
    """Return the sealed content; raise ValueError if it was changed, or is from another run."""
    sealed = msgspec.json.decode(line, type=_Sealed)
    if sealed.digest != _seal_digest(bytes(sealed.content), run_id):
        raise ValueError("its content does not match its digest")
    return msgspec.json.decode(sealed.content, type=kind)


def _seal_digest(content: bytes, run_id: str) -> str:
    return format_digest(digest_bytes(run_id.encode() + content))


@contextmanager
def writing(path: str | Path, *, instead: str = _ANY_FOLDER) -> Iterator[None]:
    """Turn an OSError of the block into a ``WriteError``; ``instead`` says what the user can do."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        todo = f"free some space, or {instead}" if is_full else instead
        text = f"Cannot write {path}: {_reason(Path(path), error)}; {todo}."
        raise WriteError(text, str(path)) from error


def _reason(path: Path, error: OSError) -> str:
    if isinstance(error, FileExistsError | NotADirectoryError):
        for place in (path, *path.parents):
            if os.path.lexists(place) and not os.path.isdir(place):
                subject = "it" if place == path else str(place)
                if not os.path.exists(place):
                    return f"{subject} is a link to {os.readlink(place)}, which does not exist"
                return f"{subject} is a file"
    return error.strerror or str(error)


def make_folder(path: Path, *, instead: str = _ANY_FOLDER) -> None:
    """Make a folder and its parents."""
    with writing(path, instead=instead):
        path.mkdir(parents=True, exist_ok=True)


def open_to_write(path: Path, mode: Literal["wb", "ab", "a+b"], *, buffering: int = -1) -> BinaryIO:
    """Open a file, and never what a link in its place leads to; inside ``writing``."""
    return open(path, mode, buffering, opener=open_without_links)


def list_folder(path: Path, *, instead: str = _ANY_FOLDER) -> list[Path]:
    """Return what is in a folder that is about to be written."""
    with writing(path, instead=instead):
        return [*path.iterdir()]


def replace_atomically(path: Path, content: bytes, *, instead: str = _ANY_FOLDER) -> None:
    """Write a file so that a reader sees its new or its old content."""
    # processes of two nodes may have the same number
    temporary = path.with_name(f".{path.name}.{os.getpid()}{uuid.uuid4().int % 10**9:09d}.tmp")
    with writing(path, instead=instead):
        try:
            with open_to_write(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:  # Ctrl-C too: raised again
            temporary.unlink(missing_ok=True)
            raise


class AppendedFile:
    """A file of whole messages, each appended with one system call and without fsync.

    A failed write refuses all later ones: readers accept a torn tail,
    and half a message in the middle is damage.
    """

    def __init__(self, path: Path, *, is_new: bool) -> None:
        self._path = path
        self.is_broken = False
        with writing(path):
            self._file = open_to_write(path, "wb" if is_new else "ab", buffering=0)

    def write(self, content: bytes) -> int:
        num_bytes = len(content)
        with writing(self._path):
            if self.is_broken:
                raise OSError(errno.EIO, "an earlier write failed")
            self.is_broken = True  # even after Ctrl-C
            num_written = self._file.write(content)
            if num_written != num_bytes:
                raise OSError(errno.ENOSPC, f"only {num_written} of {num_bytes} bytes had room")
            self.is_broken = False
        return num_bytes

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    @property
    def closed(self) -> bool:
        return self._file.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with writing(self._path):  # a network file system may only now report a full disk
            self._file.close()
