"""All writing to disk: a failed write is a ``WriteError``, which ends a program with exit status 2.

A run stays readable: files are replaced as a whole or appended to, and nothing follows a partly written message.
``tests/contract/test_house.py`` finds a write outside of ``writing``.
"""

import errno
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, Self

from det_callbacks.errors import WriteError
from det_callbacks.runs.files import open_without_links

ANOTHER_FOLDER: Mapping[str, str] = {
    # purpose of a run -> what names another folder
    "record": "record to another folder (reference of DeterminismCallback or TrainingRun, name of ObserverContext, RUN "
    "of det-callbacks record)",
    "verify": "pass another folder for the results (current of DeterminismCallback or TrainingRun, name of "
    "ObserverContext, --current of det-callbacks verify, --to of det-callbacks check)",
    "audit": "pass another folder for the results (current of DeterminismCallback or TrainingRun)",
}
_ANY_FOLDER = (
    "pass another folder (reference or current of DeterminismCallback; RUN of det-callbacks record, --current of "
    "verify, --to of check)"
)


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

    A failed write refuses all later ones: readers accept a torn tail, and half a message in the middle is damage.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with writing(self._path):  # a network file system may only now report a full disk
            self._file.close()
