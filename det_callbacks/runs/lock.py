"""The lock of a run's folder: one process writes there at a time, for all ranks of its run.

``flock`` ends with the process, so no crash leaves it behind; a file that is created exclusively
would. The ``filelock`` package does not name the holder, and leaves its file in references that are
committed.
"""

import errno
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from det_callbacks.errors import CoverageWarning, RunInUseError
from det_callbacks.runs.files import (
    LOCK_FILE,
    make_folder,
    open_to_write,
    refuse_links,
    writing,
)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of flock on some network file systems


class FolderLock:
    """The right to write to a folder, which one process holds for all ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = (folder / LOCK_FILE).absolute()  # the program may change its directory
        self._file: BinaryIO | None = None
        self._owner = 0

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lock; a forked child does not hold its parent's."""
        return self._file is not None and self._owner == os.getpid()

    def acquire(self, *, instead: str) -> None:
        """Make the folder and take its lock; ``RunInUseError`` if another writer has it.

        On a file system without locks a warning says that a second writer would go unnoticed.
        """
        make_folder(self._folder, instead=instead)
        refuse_links(self._folder)
        path = self._path
        if not self.is_held:
            self.release()  # a forked child leaves its parent's lock to the parent
        while self._file is None:
            with writing(path, instead=instead):
                file = open_to_write(path, "a+b", buffering=0)
            try:
                self._lock(file, instead)
                if os.fstat(file.fileno()).st_nlink:
                    self._file, self._owner = file, os.getpid()
            finally:
                # another process has it, or has removed the file that was opened
                if self._file is None:
                    file.close()
        with writing(path, instead=instead):
            self._file.truncate(0)
            holder = (
                f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%F %T}"
            )
            self._file.write(holder.encode())

    def _lock(self, file: BinaryIO, instead: str) -> None:
        with writing(self._path, instead=instead):
            try:
                if fcntl is None:
                    raise OSError(errno.ENOSYS, "there is no flock")
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    text = (
                        f"The file system of {self._folder} has no locks, so a second writer goes "
                        "unnoticed."
                    )
                    warnings.warn(text, CoverageWarning, stacklevel=2)
                    return
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
            file.seek(0)
            holder = file.read().decode(errors="replace") or "another process"
            raise RunInUseError(
                f"{self._folder} is being written by {holder}. Nothing was changed there. Wait "
                f"until it ends, or {instead}.",
                str(self._folder),
            )

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        is_held, file, self._file = self.is_held, self._file, None
        if file is not None and is_held:
            # before closing: a forked child then holds a lock on a file without a name
            with closing(file), writing(self._folder):
                self._path.unlink(missing_ok=True)
        elif file is not None:
            file.close()

    @contextmanager
    def hold(self, *, instead: str) -> Iterator[None]:
        """Hold the lock in a block."""
        try:
            self.acquire(instead=instead)
            yield
        finally:
            self.release()
