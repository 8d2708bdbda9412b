"""A run that replaces the run in its folder.

It is recorded in a folder next to the earlier run. Once complete, it waits there until the process
has ended well, or opens the folder.

A kill at any moment leaves the earlier run or the later one whole. If it hits the exchange, the
names of the folders say what is left to do, and whoever opens the folder next finishes it.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from det_callbacks.runs.files import (
    COMPLETE,
    MANIFEST,
    MOVING,
    OUR_NAME,
    PROGRAMS,
    REPLACEMENT,
    list_folder,
    writing,
)
from det_callbacks.runs.lock import FolderLock

_ONE_AT_A_TIME = "run one program at a time"

# process and folder -> function that puts the complete replacement in its place
_waiting: dict[tuple[int, Path], Callable[[], object]] = {}


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
