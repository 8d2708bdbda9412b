"""What stands beside a checkpoint: ``X.ckpt.digests.json``, as data and as JSON."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from det_callbacks.checkpoint.entries import Entry
from det_callbacks.checkpoint.sealed import UnknownVersionError, seal, unseal
from det_callbacks.digest import DIGEST_VERSION, format_digest
from det_callbacks.errors import CheckpointFormatError

SCHEMA = 1

_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_HEX = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """Size in bytes and digest of a file."""

    size: int
    digest: int

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"size": self.size, "digest": format_digest(self.digest)}


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
        attachments: name -> content of the files to keep beside the checkpoint.
        num_ranks: processes that keep some, each its own.
    """

    run: Mapping[str, Any] | None = None
    step: int | None = None
    epoch: int | None = None
    chain: int | None = None
    program: int | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    attachments: Mapping[str, bytes] = field(default_factory=dict)
    num_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """A file kept beside a checkpoint: its name in its rank's folder, and what is in it."""

    file: str
    content: FileDigest

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"file": self.file, **self.content.to_dict()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """Digests of one save of a checkpoint.

    Attributes:
        id: random identity of the save, hexadecimal.
        file: the checkpoint's bytes; None where it is a folder.
        files: of a folder: name relative to it -> what is in the file.
        entries: section (a key of the checkpoint) -> path in it -> entry.
        context: when it was saved; without the attachments.
        num_ranks: processes that keep something beside it for an exact resume; 0 where nothing is kept.
        det_callbacks_version: which wrote it.
    """

    id: str
    file: FileDigest | None
    files: Mapping[str, FileDigest] = field(default_factory=dict)
    entries: Mapping[str, Mapping[str, Entry]]
    context: SaveContext
    num_ranks: int = 0
    det_callbacks_version: str = field(default_factory=lambda: version("det_callbacks"))

    def to_bytes(self) -> bytes:
        """Return the file's content; equal content has equal bytes."""
        context = self.context
        content: dict[str, Any] = {
            "schema": SCHEMA,
            "digest_version": DIGEST_VERSION,
            "det_callbacks_version": self.det_callbacks_version,
            "id": self.id,
            "file": {"files": {name: file.to_dict() for name, file in self.files.items()}}
            if self.file is None
            else self.file.to_dict(),
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
        return seal(content)

    @classmethod
    def from_bytes(cls, raw: bytes, path: str) -> "Sidecar":
        """Read a file's content.

        Args:
            raw: the content.
            path: of the file, for messages.

        Raises:
            CheckpointFormatError: it is truncated, damaged, or of another version.
        """
        try:
            content = unseal(raw, {"schema": SCHEMA, "digest_version": DIGEST_VERSION})
        except UnknownVersionError as error:
            raise CheckpointFormatError(
                f"{path} has {error}. The checkpoint itself was not looked at. Use the version that saved it, or save "
                "it again.",
                path,
            ) from error
        except ValueError as error:
            raise _damaged(path, str(error)) from error
        try:
            return cls._from_dict(content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(path, f"its structure is not that of a sidecar ({error!r})") from error

    @classmethod
    def _from_dict(cls, content: Mapping[str, Any]) -> "Sidecar":
        file, resume = content["file"], content["resume"]
        is_folder = "files" in file
        return cls(
            id=safe_name(content["id"]),
            file=None if is_folder else _file_digest(file),
            files={str(name): _file_digest(value) for name, value in file["files"].items()} if is_folder else {},
            entries={
                section: {path: Entry.from_dict(entry) for path, entry in entries.items()}
                for section, entries in content["entries"].items()
            },
            context=SaveContext(
                run=content["run"],
                step=content["step"],
                epoch=content["epoch"],
                chain=None if content["chain"] is None else _digest(content["chain"]),
                program=None if content["program"] is None else _digest(content["program"]),
                environment=content["environment"],
            ),
            num_ranks=0 if resume is None else int(resume["num_ranks"]),
            det_callbacks_version=content["det_callbacks_version"],
        )


def safe_name(name: Any) -> str:
    """Return a name that can only mean a file in the folder it is looked for in.

    Raises:
        ValueError: if it is not one.
    """
    if not isinstance(name, str) or not _SAFE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no plain file name: letters, digits and . _ - only, not beginning with . or -")
    return name


def _file_digest(content: Mapping[str, Any]) -> FileDigest:
    size = content["size"]
    if not isinstance(size, int) or size < 0:
        raise ValueError(f"{size!r} is no size")
    return FileDigest(size=size, digest=_digest(content["digest"]))


def _digest(text: Any) -> int:
    if not isinstance(text, str) or not _HEX.fullmatch(text):
        raise ValueError(f"{text!r} is no digest")
    return int(text, 16)


def attachments_of(content: Mapping[str, Any]) -> dict[str, Attachment]:
    """Return what a JSON object says of files by name.

    Raises:
        KeyError, TypeError, ValueError: it does not say that.
    """
    return {
        safe_name(name): Attachment(file=safe_name(value["file"]), content=_file_digest(value))
        for name, value in content.items()
    }


def _damaged(path: str, what: str) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"{path} is damaged: {what}. The checkpoint beside it was not looked at, and nothing was loaded; restore this "
        "file from a copy, or delete it to use the checkpoint unchecked.",
        path,
    )
