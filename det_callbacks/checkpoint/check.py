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
from det_callbacks.checkpoint.files import SIDECAR, Place
from det_callbacks.checkpoint.folders import check_folder
from det_callbacks.checkpoint.parts import read_kept
from det_callbacks.checkpoint.reading import Found, find_sidecar
from det_callbacks.checkpoint.sidecar import FileDigest, Sidecar
from det_callbacks.digest import format_digest
from det_callbacks.errors import CheckpointFormatError, CheckpointMismatchError, CheckpointNotFoundError


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


def check_checkpoint(
    path: str | Path, other: str | Path | None = None, *, require_digests: bool = False
) -> CheckpointReport:
    """Compare a checkpoint with the digests that stand beside it, or with another checkpoint.

    Nothing in the files is executed: they are loaded with ``weights_only=True``. Reads the file twice and takes the
    digest of every tensor; holds one checkpoint in memory, or two.

    Args:
        path: a checkpoint, local or remote; a folder, where it is compared with its digests.
        other: another one, compared with the first, which is the reference. Neither needs digests.
        require_digests: of two, each has to be what was saved; of one that is what is asked anyway.

    Returns:
        What differs; ``.equal`` says whether nothing does.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or nothing to compare it with.
        CheckpointFormatError: a checkpoint or its sidecar cannot be read.
        CheckpointMismatchError: one of two is not what was saved (``require_digests``).

    Example:
        >>> check_checkpoint("checkpoints/last.ckpt").equal  # doctest: +SKIP
        True
    """
    place = _existing(path)
    if other is None:
        return _check_one(place)
    current = _existing(other)
    if require_digests:
        for one in (place, current):
            _require_saved(one)
    return _check_two(place, current)


def compare_loaded(
    place: Place, found: Found, content: FileDigest, checkpoint: Mapping[Any, Any] | None
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
        path=place.shown,
        has_same_bytes=found.fits,
        is_opened=checkpoint is not None,
        entries=tuple(found_differences),
        sections={section: len(inner) for section, inner in entries.items()},
        num_tensors=_num_tensors(entries),
        num_bytes=content.size,
        sidecar=found.sidecar,
    )


def load_plainly(place: Place) -> Any:
    """Load a file with ``weights_only=True`` to the host; raises whatever torch does."""
    with place.open() as file:
        return torch.load(file, map_location="cpu", weights_only=True)


def unreadable(place: Place, content: FileDigest, found: Found | None, error: BaseException) -> CheckpointFormatError:
    """Return the error of a file that cannot be loaded."""
    first_line = str(error).partition("\n")[0]
    reason = f"({type(error).__name__}: {first_line})"
    if found is None or found.fits:
        digests = "no digests stand beside it" if found is None else "its bytes are the ones that were saved"
        return CheckpointFormatError(
            f"{place.shown} cannot be loaded by torch.load {reason}; {digests}. Nothing was loaded; load it with what "
            "saved it, or use another checkpoint.",
            place.shown,
        )
    saved = found.sidecar.file
    what = "its bytes changed"
    if saved is not None and content.size != saved.size:
        cut = ", so it is truncated" if content.size < saved.size else ""
        what = f"it has {content.size:,} bytes, and {saved.size:,} were saved{cut}"
    return CheckpointFormatError(
        f"{place.shown} cannot be read: {what} {reason}. The digests beside it are whole. Nothing was loaded; use "
        "another checkpoint, or restore this one from a copy.",
        place.shown,
    )


def no_digests(place: Place) -> CheckpointNotFoundError:
    """Return the error of a checkpoint without a sidecar where one is needed."""
    return CheckpointNotFoundError(
        f"There is nothing to compare {place.shown} with: no {place.name}{SIDECAR} stands beside it. The checkpoint "
        "itself is there. Checkpoints saved with DeterminismCallback have one; if this one was copied, copy both.",
        place.shown,
    )


def _check_one(place: Place) -> CheckpointReport:
    if place.is_folder():
        found = find_sidecar(place, None)
        if found is None:
            raise no_digests(place)
        checked = check_folder(place, found)
        return _with_attachments(
            CheckpointReport(
                path=place.shown,
                has_same_bytes=not checked.differences,
                is_opened=False,
                entries=tuple(checked.differences),
                sections={"files": checked.num_files},
                num_tensors=_num_tensors(found.sidecar.entries),
                num_bytes=checked.num_bytes,
                sidecar=found.sidecar,
            ),
            found,
        )
    content = place.digest()
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


def _require_saved(place: Place) -> None:
    content = place.digest()
    found = find_sidecar(place, content)
    if found is None:
        raise no_digests(place)
    if not found.fits:
        raise CheckpointMismatchError(
            f"{place.shown} is not what was saved: its bytes are not those of the digests beside it. Nothing was "
            "compared; check it by itself to see which entries differ.",
            place.shown,
        )


def _with_attachments(report: CheckpointReport, found: Found) -> CheckpointReport:
    _, missing, damaged = read_kept(found)
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


def _check_two(reference: Place, current: Place) -> CheckpointReport:
    loaded = []
    for place in (reference, current):
        if place.is_folder():
            raise CheckpointFormatError(
                f"{place.shown} is a folder, and only files can be compared with one another. Compare each with the "
                "digests beside it, or consolidate it into a file first.",
                place.shown,
            )
        try:
            checkpoint = load_plainly(place)
        except Exception as error:  # a damaged file makes torch's readers raise anything
            content = place.digest()
            raise unreadable(place, content, find_sidecar(place, content), error) from error
        if not isinstance(checkpoint, dict):
            raise _no_dictionary(place, checkpoint)
        loaded.append(checkpoint)
    entries = [entries_of(checkpoint) for checkpoint in loaded]
    values = [{(section, path): value for section, path, value in walk(checkpoint)} for checkpoint in loaded]
    contents = [place.digest() for place in (reference, current)]
    return CheckpointReport(
        path=reference.shown,
        other=current.shown,
        has_same_bytes=contents[0] == contents[1],
        is_opened=True,
        entries=tuple(counted(differences(*entries), *values)),
        sections={section: len(inner) for section, inner in entries[0].items()},
        num_tensors=sum(isinstance(value, Tensor) for value in values[0].values()),
        num_bytes=contents[0].size,
    )


def _existing(path: str | Path) -> Place:
    place = Place.of(path)
    if not place.exists():
        raise CheckpointNotFoundError(
            f"There is no checkpoint {place.shown}. Nothing was compared; look at the name, or at whether it was "
            "deleted because better ones came.",
            place.shown,
        )
    return place


def _no_dictionary(place: Place, checkpoint: object) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"{place.shown} holds a {type(checkpoint).__qualname__} and not a checkpoint's dictionary. It could be loaded; "
        "to compare tensors by themselves use det_callbacks.digest_tensor.",
        place.shown,
    )


def _num_tensors(entries: Entries) -> int:
    return sum(entry.kind == "tensor" for inner in entries.values() for entry in inner.values())
