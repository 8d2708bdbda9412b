"""One checkpoint against the digests beside it, or two against each other."""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import msgspec
import torch
from torch import Tensor

from det_callbacks.checkpoint.entries import Entries, Entry, entries_of, walk
from det_callbacks.checkpoint.files import (
    RESUME,
    SIDECAR,
    FileDigest,
    Sidecar,
    is_remote,
    measure,
    read_sidecar,
    resolved,
)
from det_callbacks.checkpoint.part import read_part
from det_callbacks.digest import tensor_numbers
from det_callbacks.errors import CheckpointFormatError, CheckpointNotFoundError
from det_callbacks.verdict import TensorNumbers


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryDifference:
    """One entry that is not the same in both.

    Attributes:
        section: key of the checkpoint, or "files" of a folder.
        path: in the section; "" where the section is one value.
        kind: "content" (other bits or another value), "structure" (another shape, dtype or type), "missing" (only the
            reference has it) or "extra".
        reference: digest, or shape and dtype, or type, in the reference; a value shortened, where both were read.
        current: the same of the checkpoint that is compared with it.
        parameter: the parameter that an optimizer's state belongs to, where it is known.
        exchanged_with: path of the entry that has this one's content, and whose content this one has.
        num_elements: of the tensor, where both were read.
        num_differing: of its elements.
        max_ulps: the largest distance of two of them that are finite.
    """

    section: str
    path: str
    kind: str
    reference: str | None = None
    current: str | None = None
    parameter: str | None = None
    exchanged_with: str | None = None
    num_elements: int | None = None
    num_differing: int | None = None
    max_ulps: int | None = None

    @property
    def name(self) -> str:
        """Section and path, with the parameter where it is known: "state_dict: net.weight"."""
        name = f"{self.section}: {self.path}" if self.path else self.section
        return name if self.parameter is None else f"{name} ({self.path.rpartition('/')[2]} of {self.parameter})"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """What a checkpoint was compared with, and what differs.

    Attributes:
        path: the checkpoint; of two, the reference.
        other: of two, the one compared with it.
        has_same_bytes: whether the files' bytes are the ones that the sidecar is of; of two, whether they are equal.
        is_opened: whether what the file holds was compared. It is not where the bytes are the right ones and a class
            in the file keeps ``weights_only`` from loading it, nor in a folder.
        entries: the entries that differ.
        missing_files: what ranks kept beside the checkpoint, and is not there any more.
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
        content: dict[str, Any] = msgspec.to_builtins(self)
        sidecar = content.pop("sidecar")
        save = None if sidecar is None else {name: sidecar[name] for name in ("id", "run", "step", "epoch")}
        return {"schema": 1, "equal": self.equal, **content, "save": save}


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
        CheckpointFormatError: a checkpoint, or what stands beside it, cannot be read.

    Example:
        >>> check_checkpoint("checkpoints/last.ckpt").equal  # doctest: +SKIP
        True
    """
    place = _existing(path)
    if other is not None:
        return _check_two(place, _existing(other))
    sidecar = read_sidecar(place)
    if sidecar is None:
        raise CheckpointNotFoundError(
            f"There is nothing to compare {place} with: no {place.name}{SIDECAR} stands beside it. The checkpoint "
            "itself is there. Checkpoints saved with DeterminismCallback have one; if this one was copied, copy both.",
            str(place),
        )
    content, found = measure(place)
    if found is None:
        try:
            found = entries_of(load_plainly(place, content, sidecar))
        except CheckpointFormatError as error:
            # a class that weights_only refuses, in the bytes that were saved
            if sidecar.file != content or not isinstance(error.__cause__, UnpicklingError):
                raise
    report = compare_saved(place, sidecar, content, found)
    missing = [rank for rank in range(sidecar.num_ranks) if read_part(place, sidecar, rank) is None]
    return replace(report, missing_files=tuple(f"the part of rank {rank}" for rank in missing))


def compare_saved(place: Path, sidecar: Sidecar, content: FileDigest, found: Entries | None) -> CheckpointReport:
    """Compare a checkpoint with its sidecar.

    Args:
        place: file or folder.
        sidecar: of it.
        content: what is there now, see ``measure``.
        found: entries of the file or folder; None where the file was not opened.
    """
    has_same_bytes = sidecar.file == content
    return _report(place, sidecar.entries, found, content.size, has_same_bytes=has_same_bytes, sidecar=sidecar)


def _report(place: Path, reference: Entries, current: Entries | None, num_bytes: int, **more: Any) -> CheckpointReport:
    return CheckpointReport(
        path=str(place),
        is_opened=current is not None and not place.is_dir(),
        entries=() if current is None else tuple(differences(reference, current)),
        sections={section: len(inner) for section, inner in reference.items()},
        num_tensors=sum(entry.kind == "tensor" for inner in reference.values() for entry in inner.values()),
        num_bytes=num_bytes,
        **more,
    )


def load_plainly(place: Path, content: FileDigest, sidecar: Sidecar | None) -> dict[Any, Any]:
    """Load the dictionary of a file to the host with ``weights_only=True``.

    Args:
        place: the file.
        content: size and digest of it.
        sidecar: that stands beside it; None where none does.

    Raises:
        CheckpointFormatError: it cannot be loaded, or holds something else; caused by what torch raised.
    """
    try:
        with place.open("rb") as file:
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file makes torch's readers raise anything
        saved = None if sidecar is None else sidecar.file
        what = "its bytes changed since it was saved"
        if saved is None:
            what = "no digests stand beside it to say whether it changed"
        elif saved == content:
            what = "its bytes are the ones that were saved, so load it with what saved it"
        elif content.size < saved.size:
            what = f"it has {content.size:,} bytes, and {saved.size:,} were saved, so it is truncated"
        raise CheckpointFormatError(
            f"{place} cannot be read: {what} ({type(error).__name__}: {str(error).partition(chr(10))[0]}). Nothing was "
            "loaded; use another checkpoint, or restore this one from a copy.",
            str(place),
        ) from error
    if isinstance(checkpoint, dict):
        return checkpoint
    raise CheckpointFormatError(
        f"{place} holds a {type(checkpoint).__qualname__} and not a checkpoint's dictionary. It could be loaded; "
        "to compare tensors by themselves use det_callbacks.digest_tensor.",
        str(place),
    )


def _check_two(*places: Path) -> CheckpointReport:
    for place in places:
        if place.is_dir():
            raise CheckpointFormatError(
                f"{place} is a folder, and only files can be compared with one another. Compare each with the "
                "digests beside it, or consolidate it into a file first.",
                str(place),
            )
    contents = [measure(place)[0] for place in places]
    both = zip(places, contents, strict=True)
    loaded = [load_plainly(place, content, read_sidecar(place)) for place, content in both]
    reference, current = map(entries_of, loaded)
    more: dict[str, Any] = {"has_same_bytes": contents[0] == contents[1], "other": str(places[1])}
    report = _report(places[0], reference, current, contents[0].size, **more)
    values = [{(section, path): value for section, path, value in walk(checkpoint)} for checkpoint in loaded]
    counted = (_counted(one, *(each.get((one.section, one.path)) for each in values)) for one in report.entries)
    return replace(report, entries=tuple(counted))


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


# what differs


def differences(reference: Entries, current: Entries) -> list[EntryDifference]:
    """Return what is not the same, in the order of the reference, then what only ``current`` has.

    A pair of tensors of which each has the other's content is named as such: a wrong mapping of names does that.
    """
    flat = [
        {(section, path): entry for section, inner in entries.items() for path, entry in inner.items()}
        for entries in (reference, current)
    ]
    found: list[EntryDifference] = []
    for section, path in {**flat[0], **flat[1]}:
        one, other = (entries.get((section, path)) for entries in flat)
        if one is not None and other is not None and one.is_same(other):
            continue
        kind, before, after = "missing" if other is None else "extra", _layout(one), _layout(other)
        if one is not None and other is not None:
            is_content = (one.kind, one.type, one.shape) == (other.kind, other.type, other.shape)
            kind = "content" if is_content else "structure"
            if is_content:
                before, after = one.digest, other.digest
        parameter = next((entry.parameter for entry in (one, other) if entry and entry.parameter), None)
        found.append(
            EntryDifference(section=section, path=path, kind=kind, reference=before, current=after, parameter=parameter)
        )
    by_content = {
        (one.section, one.reference, one.current): one.path
        for one in reversed(found)
        if one.kind == "content" and flat[0][one.section, one.path].kind == "tensor"
    }
    return [replace(one, exchanged_with=by_content.get((one.section, one.current, one.reference))) for one in found]


def _layout(entry: Entry | None) -> str | None:
    if entry is None or entry.shape is None:
        return None if entry is None else entry.type
    return f"{entry.type} {list(entry.shape)}"


def _counted(one: EntryDifference, reference: Any, current: Any) -> EntryDifference:
    """Return a difference with numbers of elements and ULPs, where both sides are ordinary tensors."""
    if one.kind != "content":
        return one
    if not (isinstance(reference, Tensor) and isinstance(current, Tensor)):
        return replace(one, reference=reprlib.repr(reference), current=reprlib.repr(current))
    try:
        numbers = tensor_numbers(TensorNumbers(tensor=one.path), reference, current)
    except ValueError:  # not ordinary strided tensors: that they differ is known
        return replace(one, num_elements=reference.numel())
    names = ("num_elements", "num_differing", "max_ulps")
    return replace(one, **{name: getattr(numbers, name) for name in names})
