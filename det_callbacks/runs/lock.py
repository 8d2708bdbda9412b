"""Who writes a run's folder: the processes of one run, one run at a time, and its replacement.

``flock`` ends with the process, so no crash leaves it behind; a file that is created exclusively
would. The ``filelock`` package does not name the holder, and leaves its file in
references that are committed.

A run that replaces another one: it waits next to it until the process has ended well,
or opens the folder.

A kill at any moment leaves the earlier run or the later one whole. If it hits the exchange, the
names of the folders say what is left to do, and whoever opens the folder next finishes it.
"""

import errno
import os
import shutil
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from det_callbacks.errors import CoverageWarning, RunInUseError
from det_callbacks.runs.files import (
    COMPLETE,
    LOCK_FILE,
    MANIFEST,
    MOVING,
    OUR_NAME,
    PROGRAMS,
    REPLACEMENT,
    list_folder,
    make_folder,
    open_to_write,
    refuse_links,
    writing,
)

_ONE_AT_A_TIME = "run one program at a time"

# process and folder -> function that puts the complete replacement in its place
_waiting: dict[tuple[int, Path], Callable[[], object]] = {}

Value = TypeVar("Value")

END_OF_FIT = "the end of the fit"  # where processes meet


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


def wait_to_replace(folder: Path, replace: Callable[[], object]) -> None:
    """Call the function when the process opens the folder, or at its end
    (``training/recording.py``).
    """
    _waiting[_key(folder)] = replace


def forget_replacement(folder: Path) -> None:
    """Stop waiting: the replacement goes on, or the process failed."""
    _waiting.pop(_key(folder), None)


def waiting_folders() -> list[Path]:
    """Return the folders whose replacement waits for the end of this process."""
    return [folder for process, folder in _waiting if process == os.getpid()]


def settle(folder: Path) -> None:
    """Let a complete replacement of this process take its place,
    or finish an exchange that a kill interrupted.
    """
    if (replace := _waiting.pop(_key(folder), None)) is not None:
        replace()
    is_there = any(os.path.isdir(folder / name) for name in (COMPLETE, MOVING))
    if is_there and not os.path.exists(folder / MANIFEST):
        with FolderLock(folder).hold(instead=_ONE_AT_A_TIME):
            finish_replacing(folder)


def replace_run(folder: Path) -> None:
    """Replace the run in a folder with the complete one next to it."""
    with FolderLock(folder).hold(instead=_ONE_AT_A_TIME):
        put_in_place(folder)


def put_in_place(folder: Path) -> None:
    """Replace a run, whose lock the caller holds."""
    with writing(folder):
        (folder / REPLACEMENT).rename(folder / COMPLETE)
    finish_replacing(folder)


def finish_replacing(folder: Path) -> None:
    """Finish an exchange that has begun; the caller holds the lock."""
    complete, moving = folder / COMPLETE, folder / MOVING
    if complete.exists():
        remove(child for child in our_files(folder) if child != complete)
        with writing(folder):
            complete.rename(moving)
    if moving.exists():
        with writing(folder):
            for child in reversed(our_files(moving)):  # run.json last: without it there is no run
                child.rename(folder / child.name)
            moving.rmdir()


def loses_steps(folder: Path) -> bool:
    """Return whether the run in a folder has steps, and the one next to it has none:
    it is of a test alone.
    """
    had_steps, has_steps = (
        any((run / PROGRAMS).glob("*.parquet")) for run in (folder, folder / REPLACEMENT)
    )
    return had_steps and not has_steps


def our_files(folder: Path) -> list[Path]:
    """Return the files of a run, run.json first: without it there is no run."""
    ours = (child for child in list_folder(folder) if OUR_NAME.fullmatch(child.name))
    return sorted(ours, key=lambda child: (child.name != MANIFEST, child.name))


def remove(children: Iterable[Path], *, ignore_errors: bool = False) -> None:
    for child in children:
        with writing(child):
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child, ignore_errors=ignore_errors)
            else:
                child.unlink(missing_ok=True)  # another rank may remove it at the same time


def _key(folder: Path) -> tuple[int, Path]:
    return os.getpid(), Path(os.path.realpath(folder))


class Peers:
    """The processes of a run, here only this one; an action must not use the same peers."""

    rank: int = 0
    world_size: int = 1

    def gather(self, action: Callable[[], Any], *, task: str) -> list[Any]:
        """Run an action on every rank; return all results by rank, or raise on every rank."""
        return [action()]

    def run_on_all(self, action: Callable[[], Value], *, task: str) -> Value:
        """Run an action on every rank; return this rank's result, or raise on every rank."""
        outcome: list[Value] = []
        self.gather(lambda: outcome.append(action()), task=task)
        return outcome[0]

    def broadcast(self, action: Callable[[], Value], *, task: str) -> Value:
        """Run an action on rank 0; return its result on every rank, or raise on every rank."""
        result: Value = self.gather(lambda: action() if self.rank == 0 else None, task=task)[0]
        return result

    def require_shared(self, folder: Path) -> None:
        """Raise ``RankError`` on all ranks if one does not see a folder that rank 0 sees."""


ALONE = Peers()
