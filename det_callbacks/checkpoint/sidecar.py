"""The file beside a checkpoint, ``X.ckpt.digests.json``: what the checkpoint was when it was saved.

None of the names that are added to a checkpoint's own holds a digit, since Lightning takes every digit after
``hpc_ckpt_`` in a folder's listing as a version, and none ends in ``.ckpt``.
"""

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from det_callbacks.checkpoint.entries import Entries, Entry
from det_callbacks.digest import DIGEST_VERSION, digest_bytes, digest_file, format_digest
from det_callbacks.errors import CheckpointFormatError

SCHEMA = 1
SIDECAR = ".digests.json"
RESUME = ".resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """Size in bytes and digest of a file."""

    size: int
    digest: int

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"size": self.size, "digest": format_digest(self.digest)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "FileDigest":
        """Read the JSON form; raises KeyError, TypeError or ValueError where it is none."""
        if type(content["size"]) is not int or content["size"] < 0:
            raise ValueError(f"{content['size']!r} is no size")
        return cls(size=content["size"], digest=int(content["digest"], 16))


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveContext:
    """The moment at which a checkpoint is saved.

    Attributes:
        run: id, mode and reference of the run it belongs to; None outside one.
        step: the last training batch that was done, counted from 0; None before the first.
        epoch: under way, counted from 0.
        chain: of the run after its last recorded step.
        program: id of the program of that step.
        environment: what can change bits, as run.json has it.
    """

    run: Mapping[str, Any] | None = None
    step: int | None = None
    epoch: int | None = None
    chain: int | None = None
    program: int | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """Digests of one save of a checkpoint.

    Attributes:
        id: random identity of the save, hexadecimal.
        file: the checkpoint's bytes; None where it is a folder.
        files: of a folder: name relative to it -> what is in the file.
        entries: section (a key of the checkpoint) -> path in it -> entry.
        context: when it was saved.
        num_ranks: processes that keep something beside it for an exact resume; 0 where nothing is kept.
        det_callbacks_version: which wrote it.
    """

    id: str
    file: FileDigest | None
    files: Mapping[str, FileDigest] = field(default_factory=dict)
    entries: Entries
    context: SaveContext
    num_ranks: int = 0
    det_callbacks_version: str = field(default_factory=lambda: version("det_callbacks"))

    def to_bytes(self) -> bytes:
        """Return the file's content; equal content has equal bytes."""
        context = self.context
        file = {"files": {name: file.to_dict() for name, file in self.files.items()}}
        return seal(
            {
                "schema": SCHEMA,
                "digest_version": DIGEST_VERSION,
                "det_callbacks_version": self.det_callbacks_version,
                "id": self.id,
                "file": file if self.file is None else self.file.to_dict(),
                "entries": {
                    section: {path: entry.to_dict() for path, entry in entries.items()}
                    for section, entries in self.entries.items()
                },
                "run": None if context.run is None else dict(context.run),
                "step": context.step,
                "epoch": context.epoch,
                "chain": None if context.chain is None else format_digest(context.chain),
                "program": None if context.program is None else format_digest(context.program),
                "environment": dict(context.environment),
                "resume": {"num_ranks": self.num_ranks} if self.num_ranks else None,
            }
        )

    @classmethod
    def from_bytes(cls, raw: bytes, path: str) -> "Sidecar":
        """Read a file's content.

        Args:
            raw: the content.
            path: of the file, for messages.

        Raises:
            CheckpointFormatError: it is truncated, damaged, or of another version.
        """
        content = unseal(raw, path, schema=SCHEMA, digest_version=DIGEST_VERSION)
        try:
            file, resume = content["file"], content["resume"]
            return cls(
                id=str(content["id"]),
                file=None if "files" in file else FileDigest.from_dict(file),
                files={str(name): FileDigest.from_dict(one) for name, one in file.get("files", {}).items()},
                entries={
                    section: {name: Entry.from_dict(entry) for name, entry in entries.items()}
                    for section, entries in content["entries"].items()
                },
                context=SaveContext(
                    **{name: content[name] for name in ("run", "step", "epoch", "environment")},
                    chain=None if content["chain"] is None else int(content["chain"], 16),
                    program=None if content["program"] is None else int(content["program"], 16),
                ),
                num_ranks=0 if resume is None else int(resume["num_ranks"]),
                det_callbacks_version=content["det_callbacks_version"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged(path, f"its structure is not that of a sidecar ({error!r})") from error


def read_sidecar(path: Path) -> Sidecar | None:
    """Return the sidecar of a checkpoint; None where none stands beside it.

    Raises:
        CheckpointFormatError: it is damaged.
    """
    place = beside(path, SIDECAR)
    raw = read_bytes(place)
    return None if raw is None else Sidecar.from_bytes(raw, str(place))


def write_sidecar(path: Path, *, id: str, entries: Entries, context: SaveContext, num_ranks: int) -> None:
    """Write the sidecar of a checkpoint that is whole, atomically; reads the file, or the files of the folder, once.

    Args:
        path: of the checkpoint.
        id: of the save.
        entries: of the checkpoint; none of a folder.
        context: when it was saved.
        num_ranks: processes that have written what they keep for an exact resume of it.
    """
    is_folder = path.is_dir()
    sidecar = Sidecar(
        id=id,
        file=None if is_folder else digest_path(path),
        files=digest_folder(path) if is_folder else {},
        entries=entries,
        context=context,
        num_ranks=num_ranks,
    )
    write_atomically(beside(path, SIDECAR), sidecar.to_bytes())


# JSON with a digest of itself


def seal(content: Mapping[str, Any]) -> bytes:
    """Return one line of JSON with a digest of itself; equal content has equal bytes."""
    return _encode({**content, "digest": format_digest(digest_bytes(_encode(content)))})


def unseal(raw: bytes, path: str, **versions: int) -> dict[str, Any]:
    """Return what was sealed.

    Args:
        raw: a file's content.
        path: of the file, for messages.
        versions: entries, and the only value of each that is read.

    Raises:
        CheckpointFormatError: it is truncated, damaged, something else, or of another version.
    """
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise damaged(path, "it is empty" if not raw else f"it is not JSON ({error})") from error
    if not isinstance(content, dict) or not versions.keys() <= content.keys():
        raise damaged(path, "it is none of the files that stand beside a checkpoint")
    # The digest first: a flipped bit in a version is damage and not a foreign version.
    without = {key: value for key, value in content.items() if key != "digest"}
    if content.get("digest") != format_digest(digest_bytes(_encode(without))) or _encode(content) != raw:
        raise damaged(path, "its content is not what its digest says")
    for name, known in versions.items():
        if content[name] != known:
            raise CheckpointFormatError(
                f"{path} has {name} {content[name]!r}, and this version of det_callbacks reads {known}. The checkpoint "
                "itself was not looked at. Use the version that saved it, or save it again.",
                path,
            )
    return content


def _encode(content: Mapping[str, Any]) -> bytes:
    """Return one line: indented, 10,000 entries would take 20 times as long."""
    return json.dumps(content, allow_nan=False).encode() + b"\n"


def damaged(path: str, what: str) -> CheckpointFormatError:
    """Return the error of a file beside a checkpoint that cannot be read."""
    return CheckpointFormatError(
        f"{path} is damaged: {what}. The checkpoint beside it was not looked at, and nothing was loaded; restore this "
        "file from a copy, or delete it to use the checkpoint unchecked.",
        path,
    )


# files


def new_id() -> str:
    """Return the random identity of a save; drawn from the operating system, so no generator moves."""
    return uuid.UUID(bytes=os.urandom(16), version=4).hex


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
    """Write a file durably under another name, without a digit in it, and give it its own when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = beside(path, ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def digest_path(path: Path) -> FileDigest:
    """Return size and digest of a file."""
    size, digest = digest_file(path)
    return FileDigest(size=size, digest=digest)


def digest_folder(folder: Path) -> dict[str, FileDigest]:
    """Return what is in each file of a folder, by its name relative to it."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {name: digest_path(folder / name) for name in names}


def remove_beside(path: Path) -> None:
    """Remove everything of ours that stands beside a checkpoint; never what a link leads to."""
    beside(path, SIDECAR).unlink(missing_ok=True)
    folder = beside(path, RESUME)
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)  # another rank may write its own part of it at the same time
