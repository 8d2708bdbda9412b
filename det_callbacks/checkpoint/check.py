"""One checkpoint against the digests beside it, or two against each other."""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from det_callbacks.checkpoint.entries import Entries, Entry, entries_of, walk
from det_callbacks.checkpoint.parts import missing_parts
from det_callbacks.checkpoint.sidecar import (
    RESUME,
    SIDECAR,
    FileDigest,
    Sidecar,
    digest_folder,
    digest_path,
    is_remote,
    read_sidecar,
    resolved,
)
from det_callbacks.digest import format_digest
from det_callbacks.digest.numbers import tensor_numbers
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

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


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
        names = ("path", "other", "has_same_bytes", "is_opened", "num_tensors", "num_bytes")
        return {
            "schema": 1,
            "equal": self.equal,
            **{name: getattr(self, name) for name in names},
            "entries": [entry.to_dict() for entry in self.entries],
            "missing_files": list(self.missing_files),
            "sections": dict(self.sections),
            "save": None if self.sidecar is None else _save(self.sidecar),
        }


def _save(sidecar: Sidecar) -> dict[str, Any]:
    context = sidecar.context
    digests = {"chain": context.chain, "program": context.program}
    return {
        **{"id": sidecar.id, "run": context.run, "step": context.step, "epoch": context.epoch},
        **{name: None if value is None else format_digest(value) for name, value in digests.items()},
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
    report = compare_folder(place, sidecar) if place.is_dir() else _check_file(place, sidecar)
    return replace(report, missing_files=missing_parts(place, sidecar))


def compare_loaded(
    place: Path, sidecar: Sidecar, content: FileDigest, checkpoint: Mapping[Any, Any] | None
) -> CheckpointReport:
    """Compare what was loaded from a file with its sidecar.

    Args:
        place: the file.
        sidecar: of it.
        content: size and digest of the file.
        checkpoint: what was loaded; None where it was not opened.
    """
    entries = sidecar.entries
    return CheckpointReport(
        path=str(place),
        has_same_bytes=sidecar.file == content,
        is_opened=checkpoint is not None,
        entries=() if checkpoint is None else tuple(differences(entries, entries_of(checkpoint))),
        sections={section: len(inner) for section, inner in entries.items()},
        num_tensors=sum(entry.kind == "tensor" for inner in entries.values() for entry in inner.values()),
        num_bytes=content.size,
        sidecar=sidecar,
    )


def compare_folder(folder: Path, sidecar: Sidecar) -> CheckpointReport:
    """Compare the files of a folder with its sidecar; reads them all once."""
    present, entries = digest_folder(folder), []
    if sidecar.file is not None:  # it was a file when it was saved
        entries.append(EntryDifference(section="files", path="", kind="structure"))
    for name in {**sidecar.files, **present}:
        saved, found = sidecar.files.get(name), present.get(name)
        if saved != found:
            kind = "missing" if found is None else "extra" if saved is None else "content"
            shown = [None if one is None else format_digest(one.digest) for one in (saved, found)]
            entries.append(EntryDifference(section="files", path=name, kind=kind, reference=shown[0], current=shown[1]))
    return CheckpointReport(
        path=str(folder),
        has_same_bytes=not entries,
        is_opened=False,
        entries=tuple(entries),
        sections={"files": len(sidecar.files)},
        num_tensors=0,
        num_bytes=sum(digest.size for digest in present.values()),
        sidecar=sidecar,
    )


def load_plainly(place: Path) -> dict[Any, Any]:
    """Load the dictionary of a file to the host with ``weights_only=True``; raises whatever torch does.

    Raises:
        CheckpointFormatError: it holds something else.
    """
    with place.open("rb") as file:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    if isinstance(checkpoint, dict):
        return checkpoint
    raise CheckpointFormatError(
        f"{place} holds a {type(checkpoint).__qualname__} and not a checkpoint's dictionary. It could be loaded; "
        "to compare tensors by themselves use det_callbacks.digest_tensor.",
        str(place),
    )


def unreadable(
    place: Path, content: FileDigest, sidecar: Sidecar | None, error: BaseException
) -> CheckpointFormatError:
    """Return the error of a file that cannot be loaded."""
    if isinstance(error, CheckpointFormatError):
        return error
    reason = f"({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    if sidecar is None or sidecar.file == content:
        digests = "no digests stand beside it" if sidecar is None else "its bytes are the ones that were saved"
        return CheckpointFormatError(
            f"{place} cannot be loaded by torch.load {reason}; {digests}. Nothing was loaded; load it with what "
            "saved it, or use another checkpoint.",
            str(place),
        )
    saved = sidecar.file
    what = "its bytes changed"
    if saved is not None and content.size != saved.size:
        cut = ", so it is truncated" if content.size < saved.size else ""
        what = f"it has {content.size:,} bytes, and {saved.size:,} were saved{cut}"
    return CheckpointFormatError(
        f"{place} cannot be read: {what} {reason}. The digests beside it are whole. Nothing was loaded; use "
        "another checkpoint, or restore this one from a copy.",
        str(place),
    )


def _check_file(place: Path, sidecar: Sidecar) -> CheckpointReport:
    content = digest_path(place)
    checkpoint = None
    try:
        checkpoint = load_plainly(place)
    except UnpicklingError as error:  # a class that weights_only refuses
        if sidecar.file != content:
            raise unreadable(place, content, sidecar, error) from error
    except Exception as error:  # a damaged file makes torch's readers raise anything
        raise unreadable(place, content, sidecar, error) from error
    return compare_loaded(place, sidecar, content, checkpoint)


def _check_two(reference: Path, current: Path) -> CheckpointReport:
    loaded, contents = [], []
    for place in (reference, current):
        if place.is_dir():
            raise CheckpointFormatError(
                f"{place} is a folder, and only files can be compared with one another. Compare each with the "
                "digests beside it, or consolidate it into a file first.",
                str(place),
            )
        contents.append(digest_path(place))
        try:
            loaded.append(load_plainly(place))
        except Exception as error:  # a damaged file makes torch's readers raise anything
            raise unreadable(place, contents[-1], read_sidecar(place), error) from error
    entries = [entries_of(checkpoint) for checkpoint in loaded]
    values = [{(section, path): value for section, path, value in walk(checkpoint)} for checkpoint in loaded]
    found = [_counted(one, *(each.get((one.section, one.path)) for each in values)) for one in differences(*entries)]
    return CheckpointReport(
        path=str(reference),
        other=str(current),
        has_same_bytes=contents[0] == contents[1],
        is_opened=True,
        entries=tuple(found),
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


# what differs


def differences(reference: Entries, current: Entries) -> list[EntryDifference]:
    """Return what is not the same, in the order of the reference, then what only ``current`` has."""
    found = []
    for section, path in dict.fromkeys((*_names(reference), *_names(current))):
        one, other = (entries.get(section, {}).get(path) for entries in (reference, current))
        if one is not None and other is not None and one.is_same(other):
            continue
        kind = "missing" if other is None else "extra"
        if one is not None and other is not None:
            is_content = (one.kind, one.type, one.shape) == (other.kind, other.type, other.shape)
            kind = "content" if is_content else "structure"
        parameters = [entry.parameter for entry in (one, other) if entry is not None and entry.parameter is not None]
        found.append(
            EntryDifference(
                section=section,
                path=path,
                kind=kind,
                reference=_shown(one, kind),
                current=_shown(other, kind),
                parameter=next(iter(parameters), None),
            )
        )
    return _with_exchanges(found, lambda one: (reference[one.section][one.path], current[one.section][one.path]))


def _names(entries: Entries) -> list[tuple[str, str]]:
    return [(section, path) for section, inner in entries.items() for path in inner]


def _shown(entry: Entry | None, kind: str) -> str | None:
    if entry is None:
        return None
    if kind == "content":
        return None if entry.digest is None else format_digest(entry.digest)
    return entry.type if entry.shape is None else f"{entry.type} {list(entry.shape)}"


def _with_exchanges(
    found: Sequence[EntryDifference], both: Callable[[EntryDifference], tuple[Entry, Entry]]
) -> list[EntryDifference]:
    """Name the pairs of tensors of which each has the other's content: what a wrong mapping of names does."""
    pairs = {(one.section, one.path): both(one) for one in found if one.kind == "content"}
    by_content: dict[tuple[str, int | None, int | None], str] = {}
    for (section, path), (saved, held) in pairs.items():
        if saved.kind == "tensor":
            by_content.setdefault((section, saved.digest, held.digest), path)
    named = []
    for one in found:
        saved_held = pairs.get((one.section, one.path))
        partner = None
        if saved_held is not None:
            saved, held = saved_held
            partner = by_content.get((one.section, held.digest, saved.digest))
        named.append(one if partner is None else replace(one, exchanged_with=partner))
    return named


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
    return replace(
        one, num_elements=numbers.num_elements, num_differing=numbers.num_differing, max_ulps=numbers.max_ulps
    )
