"""One checkpoint against the digests beside it, or two against each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from det_callbacks.checkpoint.difference import EntryDifference, counted, differences
from det_callbacks.checkpoint.entries import Entries, entries_of, walk
from det_callbacks.checkpoint.files import (
    RESUME,
    SIDECAR,
    beside,
    digest_folder,
    digest_path,
    is_remote,
    read_bytes,
    resolved,
)
from det_callbacks.checkpoint.parts import read_parts
from det_callbacks.checkpoint.sidecar import FileDigest, Sidecar
from det_callbacks.digest import format_digest
from det_callbacks.errors import CheckpointFormatError, CheckpointNotFoundError


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint's sidecar.

    Attributes:
        path: of the checkpoint.
        sidecar: as it was read.
        fits: whether the checkpoint's bytes are the ones it is of; of a folder that is known when its files were read.
    """

    path: Path
    sidecar: Sidecar
    fits: bool


def find_sidecar(path: Path, content: FileDigest | None) -> Found | None:
    """Return the sidecar of a checkpoint; None where none stands beside it.

    Args:
        path: of the file or folder.
        content: of the file; None for a folder.

    Raises:
        CheckpointFormatError: it is damaged.
    """
    place = beside(path, SIDECAR)
    raw = read_bytes(place)
    if raw is None:
        return None
    sidecar = Sidecar.from_bytes(raw, str(place))
    return Found(path=path, sidecar=sidecar, fits=sidecar.file == content)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """What a checkpoint was compared with, and what differs.

    Attributes:
        path: the checkpoint; of two, the reference.
        other: of two, the one compared with it.
        has_same_bytes: whether the files' bytes are the ones that the sidecar is of; of two, whether they are equal.
        is_opened: whether the entries were compared. They are not where the bytes are the right ones and a class in
            the file keeps ``weights_only`` from loading it, nor in a folder.
        entries: the entries that differ.
        missing_files: names of files kept beside the checkpoint that are not there any more.
        sections: section -> number of entries compared.
        num_tensors: among them.
        num_bytes: of the file or files.
        sidecar: what it was compared with; None where two were.
    """

    path: str
    other: str | None = None
    has_same_bytes: bool
    is_opened: bool
    entries: tuple[EntryDifference, ...] = ()
    missing_files: tuple[str, ...] = ()
    sections: Mapping[str, int]
    num_tensors: int
    num_bytes: int
    sidecar: Sidecar | None = None

    @property
    def equal(self) -> bool:
        """Whether nothing differs. The bytes of two files may, where all they hold is equal."""
        if self.other is not None:
            return not self.entries
        return self.has_same_bytes and not self.entries and not self.missing_files

    @property
    def exit_code(self) -> int:
        """0 equal, 1 not."""
        return 0 if self.equal else 1

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        context = None if self.sidecar is None else self.sidecar.context
        return {
            "schema": 1,
            "equal": self.equal,
            "path": self.path,
            "other": self.other,
            "has_same_bytes": self.has_same_bytes,
            "is_opened": self.is_opened,
            "entries": [entry.to_dict() for entry in self.entries],
            "missing_files": list(self.missing_files),
            "sections": dict(self.sections),
            "num_tensors": self.num_tensors,
            "num_bytes": self.num_bytes,
            "save": None
            if self.sidecar is None or context is None
            else {
                "id": self.sidecar.id,
                "run": context.run,
                "step": context.step,
                "epoch": context.epoch,
                "chain": None if context.chain is None else format_digest(context.chain),
                "program": None if context.program is None else format_digest(context.program),
            },
        }


def check_checkpoint(path: str | Path, other: str | Path | None = None) -> CheckpointReport:
    """Compare a checkpoint with the digests that stand beside it, or with another checkpoint.

    Nothing in the files is executed: they are loaded with ``weights_only=True``. Reads the file twice and takes the
    digest of every tensor; holds one checkpoint in memory, or two.

    Args:
        path: a checkpoint on a disk; a folder, where it is compared with its digests.
        other: another one, compared with the first, which is the reference. Neither needs digests.

    Returns:
        What differs; ``.equal`` says whether nothing does.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or nothing to compare it with.
        CheckpointFormatError: a checkpoint or its sidecar cannot be read.

    Example:
        >>> check_checkpoint("checkpoints/last.ckpt").equal  # doctest: +SKIP
        True
    """
    place = _existing(path)
    if other is None:
        return _check_one(place)
    return _check_two(place, _existing(other))


def compare_loaded(
    place: Path, found: Found, content: FileDigest, checkpoint: Mapping[Any, Any] | None
) -> CheckpointReport:
    """Compare what was loaded from a file with its sidecar.

    Args:
        place: the file.
        found: its sidecar.
        content: size and digest of the file.
        checkpoint: what was loaded; None where it was not opened.
    """
    entries: Entries = found.sidecar.entries
    found_differences = [] if checkpoint is None else differences(entries, entries_of(checkpoint))
    return CheckpointReport(
        path=str(place),
        has_same_bytes=found.fits,
        is_opened=checkpoint is not None,
        entries=tuple(found_differences),
        sections={section: len(inner) for section, inner in entries.items()},
        num_tensors=_num_tensors(entries),
        num_bytes=content.size,
        sidecar=found.sidecar,
    )


def load_plainly(place: Path) -> Any:
    """Load a file with ``weights_only=True`` to the host; raises whatever torch does."""
    with place.open("rb") as file:
        return torch.load(file, map_location="cpu", weights_only=True)


def unreadable(place: Path, content: FileDigest, found: Found | None, error: BaseException) -> CheckpointFormatError:
    """Return the error of a file that cannot be loaded."""
    first_line = str(error).partition("\n")[0]
    reason = f"({type(error).__name__}: {first_line})"
    if found is None or found.fits:
        digests = "no digests stand beside it" if found is None else "its bytes are the ones that were saved"
        return CheckpointFormatError(
            f"{place} cannot be loaded by torch.load {reason}; {digests}. Nothing was loaded; load it with what "
            "saved it, or use another checkpoint.",
            str(place),
        )
    saved = found.sidecar.file
    what = "its bytes changed"
    if saved is not None and content.size != saved.size:
        cut = ", so it is truncated" if content.size < saved.size else ""
        what = f"it has {content.size:,} bytes, and {saved.size:,} were saved{cut}"
    return CheckpointFormatError(
        f"{place} cannot be read: {what} {reason}. The digests beside it are whole. Nothing was loaded; use "
        "another checkpoint, or restore this one from a copy.",
        str(place),
    )


def no_digests(place: Path) -> CheckpointNotFoundError:
    """Return the error of a checkpoint without a sidecar where one is needed."""
    return CheckpointNotFoundError(
        f"There is nothing to compare {place} with: no {place.name}{SIDECAR} stands beside it. The checkpoint "
        "itself is there. Checkpoints saved with DeterminismCallback have one; if this one was copied, copy both.",
        str(place),
    )


def _check_one(place: Path) -> CheckpointReport:
    if place.is_dir():
        found = find_sidecar(place, None)
        if found is None:
            raise no_digests(place)
        return _with_attachments(_check_folder(place, found.sidecar), found)
    content = digest_path(place)
    found = find_sidecar(place, content)
    if found is None:
        raise no_digests(place)
    checkpoint: Any = None
    try:
        checkpoint = load_plainly(place)
    except UnpicklingError as error:
        if not found.fits:
            raise unreadable(place, content, found, error) from error
    except Exception as error:  # a damaged file makes torch's readers raise anything
        raise unreadable(place, content, found, error) from error
    if checkpoint is not None and not isinstance(checkpoint, dict):
        raise _no_dictionary(place, checkpoint)
    return _with_attachments(compare_loaded(place, found, content, checkpoint), found)


def _check_folder(folder: Path, sidecar: Sidecar) -> CheckpointReport:
    """Compare the files of a folder with its sidecar; reads them all once."""
    present = digest_folder(folder)
    names = [*sidecar.files, *(name for name in present if name not in sidecar.files)]
    entries = [_difference(name, sidecar.files.get(name), present.get(name)) for name in names]
    differing = tuple(entry for entry in entries if entry is not None)
    if sidecar.file is not None:  # it was a file when it was saved
        differing = (EntryDifference(section="files", path="", kind="structure"), *differing)
    return CheckpointReport(
        path=str(folder),
        has_same_bytes=not differing,
        is_opened=False,
        entries=differing,
        sections={"files": len(sidecar.files)},
        num_tensors=0,
        num_bytes=sum(digest.size for digest in present.values()),
        sidecar=sidecar,
    )


def _difference(name: str, reference: FileDigest | None, current: FileDigest | None) -> EntryDifference | None:
    if reference == current:
        return None
    before, now = (None if one is None else format_digest(one.digest) for one in (reference, current))
    kind = "missing" if current is None else "extra" if reference is None else "content"
    return EntryDifference(section="files", path=name, kind=kind, reference=before, current=now)


def _with_attachments(report: CheckpointReport, found: Found) -> CheckpointReport:
    _, missing, damaged = read_parts(found.path, found.sidecar)
    return CheckpointReport(
        path=report.path,
        has_same_bytes=report.has_same_bytes,
        is_opened=report.is_opened,
        entries=(*report.entries, *(EntryDifference(section="resume", path=name, kind="content") for name in damaged)),
        missing_files=tuple(missing),
        sections=report.sections,
        num_tensors=report.num_tensors,
        num_bytes=report.num_bytes,
        sidecar=report.sidecar,
    )


def _check_two(reference: Path, current: Path) -> CheckpointReport:
    loaded = []
    for place in (reference, current):
        if place.is_dir():
            raise CheckpointFormatError(
                f"{place} is a folder, and only files can be compared with one another. Compare each with the "
                "digests beside it, or consolidate it into a file first.",
                str(place),
            )
        try:
            checkpoint = load_plainly(place)
        except Exception as error:  # a damaged file makes torch's readers raise anything
            content = digest_path(place)
            raise unreadable(place, content, find_sidecar(place, content), error) from error
        if not isinstance(checkpoint, dict):
            raise _no_dictionary(place, checkpoint)
        loaded.append(checkpoint)
    entries = [entries_of(checkpoint) for checkpoint in loaded]
    values = [{(section, path): value for section, path, value in walk(checkpoint)} for checkpoint in loaded]
    contents = [digest_path(place) for place in (reference, current)]
    return CheckpointReport(
        path=str(reference),
        other=str(current),
        has_same_bytes=contents[0] == contents[1],
        is_opened=True,
        entries=tuple(counted(differences(*entries), *values)),
        sections={section: len(inner) for section, inner in entries[0].items()},
        num_tensors=sum(isinstance(value, Tensor) for value in values[0].values()),
        num_bytes=contents[0].size,
    )


def _existing(path: str | Path) -> Path:
    if is_remote(path):
        raise CheckpointFormatError(
            f"{path} is remote, and checkpoints are compared on a disk: copy it there together with what stands beside "
            f"it (X.ckpt{SIDECAR}, X.ckpt{RESUME}/).",
            str(path),
        )
    place = resolved(path)
    if not place.exists():
        raise CheckpointNotFoundError(
            f"There is no checkpoint {place}. Nothing was compared; look at the name, or at whether it was "
            "deleted because better ones came.",
            str(place),
        )
    return place


def _no_dictionary(place: Path, checkpoint: object) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"{place} holds a {type(checkpoint).__qualname__} and not a checkpoint's dictionary. It could be loaded; "
        "to compare tensors by themselves use det_callbacks.digest_tensor.",
        str(place),
    )


def _num_tensors(entries: Entries) -> int:
    return sum(entry.kind == "tensor" for inner in entries.values() for entry in inner.values())
