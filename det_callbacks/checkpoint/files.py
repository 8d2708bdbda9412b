"""A checkpoint on a disk, and the names of what stands beside it.

None of the names that are added to a checkpoint's own holds a digit, since Lightning takes every digit after
``hpc_ckpt_`` in a folder's listing as a version, and none ends in ``.ckpt``.
"""

import os
import shutil
from pathlib import Path

from det_callbacks.checkpoint.sidecar import FileDigest
from det_callbacks.checkpoint.stream import digest_file

SIDECAR = ".digests.json"
RESUME = ".resume"


def is_remote(path: str | Path) -> bool:
    """Return whether a path is a URL: what lies behind it has no digests beside it."""
    return "://" in str(path)


def beside(path: Path, suffix: str) -> Path:
    """Return the path whose name is this one's and the suffix."""
    return path.with_name(path.name + suffix)


def resolved(path: str | Path) -> Path:
    """Return a path with links followed, so that ``last.ckpt`` has what stands beside the checkpoint it leads to."""
    return Path(os.path.realpath(path))


def read_bytes(path: Path) -> bytes | None:
    """Return a file's content, None where there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file durably under another name, and give it its own when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = beside(path, ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def digest_path(path: Path) -> FileDigest:
    """Return size and digest of a file."""
    with path.open("rb") as file:
        return digest_file(file)


def digest_folder(folder: Path) -> dict[str, FileDigest]:
    """Return what is in each file of a folder, by its name relative to it."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {name: digest_path(folder / name) for name in names}


def remove(path: Path) -> None:
    """Remove a file, link or folder, if there is one; never what a link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)  # another rank may remove its own part of it at the same time
    else:
        path.unlink(missing_ok=True)
