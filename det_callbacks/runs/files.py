"""The names of a run's files, the version of their format, and the error for a damaged file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pyarrow as pa

from det_callbacks.digest.host import format_digest
from det_callbacks.errors import ReferenceFormatError

FORMAT_VERSION = 1

MANIFEST = "run.json"
PROGRAMS = "programs"
SITES = "sites"
LAYOUTS = "layouts"
SOURCES = "sources"
NONDETERMINISTIC_FILE = "nondeterministic_ops.json"

READ_ERRORS = (
    *(msgspec.MsgspecError, pa.ArrowException, OSError, EOFError, ValueError, KeyError, TypeError, RecursionError),
    MemoryError,  # a damaged length may be larger than the memory
)
"""The errors that reading a damaged file may raise."""


def damaged(path: Path, what: object) -> ReferenceFormatError:
    return ReferenceFormatError(
        f"{path} is damaged: {what}. Other files of the run were not checked; record the run again, or restore this "
        "file from a copy.",
        str(path),
    )


@contextmanager
def reading_file(path: Path) -> Iterator[None]:
    """Turn an OSError of the block, such as a disk error, into the error for a damaged file."""
    try:
        yield
    except OSError as error:
        raise damaged(path, error) from error


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
