"""What happens where a file cannot be written: the disk is full, the folder is read-only, a file is in the way.

The package writes to disk inside ``writing`` only, and so every such failure is one ``WriteError``: a sentence that
names the path, the reason and the argument for another place, and exit status 2. ``tests/contract/test_house.py`` finds
a write outside of it. What a run held before stays readable: files are replaced as a whole (``replace_atomically``), or
appended to, where nothing follows a message of which only a part could be written (``AppendedFile``). A run that was
being recorded has no end-of-stream marker then, so it is incomplete, and a verification has no verdict.
"""

import errno
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from det_callbacks.errors import WriteError

ANOTHER_FOLDER: Mapping[str, str] = {
    # purpose of a run -> what names another folder
    "record": "record into another folder (reference of DeterminismCallback, RUN of det-callbacks record)",
    "verify": "name another folder for what is found (current of DeterminismCallback, --current of det-callbacks "
    "verify, --to of det-callbacks check)",
    "audit": "name another folder for what is found (current of DeterminismCallback)",
}
_ANY_FOLDER = (
    "name another folder (reference or current of DeterminismCallback; RUN of det-callbacks record, --current of "
    "verify, --to of check)"
)


@contextmanager
def writing(path: str | Path, *, instead: str = _ANY_FOLDER) -> Iterator[None]:
    """Turn an OSError of the block into a ``WriteError`` about ``path``; ``instead`` says what else can be done."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        todo = f"free some space, or {instead}" if is_full else instead
        text = f"{path} cannot be written: {_reason(Path(path), error)}; {todo}."
        raise WriteError(text, str(path)) from error


def _reason(path: Path, error: OSError) -> str:
    if isinstance(error, FileExistsError | NotADirectoryError):
        for place in (path, *path.parents):
            if os.path.lexists(place) and not os.path.isdir(place):
                return "it is a file" if place == path else f"{place} is a file"
    return error.strerror or str(error)


def make_folder(path: Path, *, instead: str = _ANY_FOLDER) -> None:
    """Make a folder, and those above it, unless it is there."""
    with writing(path, instead=instead):
        path.mkdir(parents=True, exist_ok=True)


def replace_atomically(path: Path, content: bytes, *, instead: str = _ANY_FOLDER) -> None:
    """Write a file so that a reader sees all of it or what was there before."""
    # processes of two nodes may have one number, and write the same program into a shared folder
    temporary = path.with_name(f".{path.name}.{os.getpid()}{uuid.uuid4().int % 10**9:09d}.tmp")
    with writing(path, instead=instead):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:  # Ctrl-C too: raised again
            temporary.unlink(missing_ok=True)
            raise


class AppendedFile:
    """A file to which whole messages are appended, each with one system call and without fsync.

    After a message that could not be written in full, every further one is refused: half a message at the end is a torn
    tail, which readers know, and one in the middle would be damage.
    """

    def __init__(self, path: Path, *, is_new: bool) -> None:
        self._path = path
        self.is_broken = False
        with writing(path):
            self._file = path.open("wb" if is_new else "ab", buffering=0)

    def write(self, content: bytes) -> int:
        """Append a message, and return its length."""
        num_bytes = len(content)
        with writing(self._path):
            if self.is_broken:
                raise OSError(errno.EIO, "an earlier write to it failed")
            self.is_broken = True  # also after Ctrl-C
            num_written = self._file.write(content)
            if num_written != num_bytes:
                raise OSError(errno.ENOSPC, f"only {num_written} of {num_bytes} bytes had room")
            self.is_broken = False
        return num_bytes

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._file.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with writing(self._path):  # a network file system may say only now that the disk is full
            self._file.close()
