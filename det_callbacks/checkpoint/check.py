"""Compares a checkpoint with the digests next to it, or two with each other."""

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from det_callbacks.checkpoint.files import (
    RESUME,
    SIDECAR,
    Entries,
    Entry,
    Sidecar,
    entries_of,
    measure,
    read_part,
    read_sidecar,
    walk,
)
from det_callbacks.digest.components import measure_tensors
from det_callbacks.errors import CheckpointFormatError, CheckpointNotFoundError


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryDifference:
    """One entry that differs between the two.

    Attributes:
        section: key of the checkpoint, or "files" of a folder.
        path: keys below the section, joined by "/"; "" if the section is a single value.
        kind: "content" (different bits or a different value), "structure" (a different shape, dtype
            or type), "missing" (only the reference has it) or "extra".
        reference: digest (16 hexadecimal digits), layout, type, or a
            shortened value; None for "extra".
        current: the same for the current checkpoint; None for "missing".
        parameter: owner of an optimizer's state, if known.
        num_elements: number of elements; None if the tensors were not loaded,
            as is ``num_differing``.
        num_differing: elements whose bits differ.
        max_ulps: largest distance of two finite elements in units in the last place, or None.

    Examples:
        >>> torch.save({"state_dict": {"weight": torch.tensor([1.0, 2.0])}}, "first.ckpt")
        >>> torch.save({"state_dict": {"weight": torch.tensor([1.0, 2.0000002])}}, "second.ckpt")
        >>> (entry,) = check_checkpoint("first.ckpt", "second.ckpt").entries
        >>> entry.name, entry.kind, entry.num_differing, entry.num_elements, entry.max_ulps
        ('state_dict: weight', 'content', 1, 2, 1)
    """

    section: str
    path: str
    kind: str
    reference: str | None = None
    current: str | None = None
    parameter: str | None = None
    num_elements: int | None = None
    num_differing: int | None = None
    max_ulps: int | None = None

    @property
    def name(self) -> str:
        """Section and path, with the parameter if known: "state_dict: net.weight"."""
        name = f"{self.section}: {self.path}" if self.path else self.section
        return (
            name
            if self.parameter is None
            else f"{name} ({self.path.rpartition('/')[2]} of {self.parameter})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """The result of comparing a checkpoint with its digests or with another checkpoint.

    Attributes:
        path: the checkpoint; the reference, if two were compared.
        other: the checkpoint compared with it, or None.
        has_same_bytes: whether the file has the bytes of the other, or of when it was saved.
        entries: the entries that differ.
        missing_files: parts of ranks that are missing.
        sections: section -> number of entries compared.
        num_tensors: number of tensors compared.
        num_bytes: size of the file or files.
        sidecar: the digests next to the checkpoint; None if two checkpoints were compared.

    Examples:
        >>> torch.save({"state_dict": {"weight": torch.zeros(2)}}, "first.ckpt")
        >>> report = check_checkpoint("first.ckpt", "first.ckpt")
        >>> report.equal, report.exit_code, report.num_tensors, report.sections
        (True, 0, 1, {'state_dict': 1})
    """

    path: str
    other: str | None = None
    has_same_bytes: bool
    entries: tuple[EntryDifference, ...]
    missing_files: tuple[str, ...] = ()
    sections: Mapping[str, int]
    num_tensors: int
    num_bytes: int
    sidecar: Sidecar | None = None

    @property
    def equal(self) -> bool:
        """Whether nothing differs. Files with different bytes can have equal entries."""
        if self.other is not None:
            return not self.entries
        return self.has_same_bytes and not self.entries and not self.missing_files

    @property
    def exit_code(self) -> int:
        """0 if equal, else 1."""
        return 0 if self.equal else 1

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        sidecar = content.pop("sidecar")
        save = (
            None
            if sidecar is None
            else {name: sidecar[name] for name in ("id", "run", "step", "epoch")}
        )
        return {"schema": 1, "equal": self.equal, **content, "save": save}


def check_checkpoint(path: str | Path, other: str | Path | None = None) -> CheckpointReport:
    """Compare a checkpoint with the digests next to it, or with another checkpoint.

    It reads the file once. If the bytes differ, or if you compare two checkpoints, it loads them
    with ``weights_only=True``, which takes memory for one or two checkpoints.

    Args:
        path: a checkpoint on a disk; a folder only to compare it with its digests.
        other: a checkpoint to compare with ``path``, the reference. Neither needs digests.

    Returns:
        What differs; ``.equal`` is True if nothing does.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or nothing to compare it with.
        CheckpointFormatError: a checkpoint, or a file of its digests, cannot be read.

    Examples:
        >>> torch.save({"state_dict": {"weight": torch.zeros(2)}}, "first.ckpt")
        >>> torch.save({"state_dict": {"weight": torch.ones(2)}}, "second.ckpt")
        >>> report = check_checkpoint("first.ckpt", "second.ckpt")
        >>> report.equal, [entry.name for entry in report.entries]
        (False, ['state_dict: weight'])
    """
    place = _existing(path)
    if other is not None:
        return _check_two(place, _existing(other))
    sidecar = read_sidecar(place)
    if sidecar is None:
        raise CheckpointNotFoundError(
            f"There is nothing to compare {place} with: {place.name}{SIDECAR} is not in its "
            "folder. DeterminismCallback saves it with each checkpoint; if you copied this "
            f"checkpoint, copy that file and {place.name}{RESUME}/, too.",
            str(place),
        )
    report = compare_saved(place, sidecar)
    missing = [rank for rank in range(sidecar.num_ranks) if read_part(place, sidecar, rank) is None]
    return replace(report, missing_files=tuple(f"the part of rank {rank}" for rank in missing))


def compare_saved(place: Path, sidecar: Sidecar) -> CheckpointReport:
    """Compare a checkpoint with its sidecar; load a file only if its bytes differ."""
    content, found = measure(place)
    has_same_bytes = sidecar.file == content
    if found is None and not has_same_bytes:
        problem = ": its bytes changed since it was saved"
        if content.size < sidecar.file.size:
            problem = (
                f": it has {content.size:,} of the {sidecar.file.size:,} bytes saved, so it is "
                "truncated"
            )
        found = entries_of(_load(place, problem))
    entries = sidecar.entries if found is None else found
    return _report(
        place,
        sidecar.entries,
        entries,
        content.size,
        has_same_bytes=has_same_bytes,
        sidecar=sidecar,
    )


def _report(
    place: Path,
    reference: Entries,
    current: Entries,
    num_bytes: int,
    sidecar: Sidecar | None = None,
    **more: Any,
) -> CheckpointReport:
    return CheckpointReport(
        path=str(place),
        entries=tuple(
            _differences(reference, current, {} if sidecar is None else sidecar.parameters)
        ),
        sections={section: len(inner) for section, inner in reference.items()},
        num_tensors=sum(
            entry.kind == "tensor" for inner in reference.values() for entry in inner.values()
        ),
        num_bytes=num_bytes,
        sidecar=sidecar,
        **more,
    )


def _load(place: Path, problem: str = "") -> dict[Any, Any]:
    try:
        with place.open("rb") as file:
            checkpoint: dict[Any, Any] = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(checkpoint, dict):
            raise TypeError(
                f"it holds a {type(checkpoint).__qualname__} instead of a checkpoint's dictionary"
            )
    except Exception as error:  # torch raises anything for a damaged file
        raise CheckpointFormatError(
            f"{place} cannot be read{problem} ({type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}). Nothing was loaded. Use another checkpoint, or "
            "restore this one from a copy.",
            str(place),
        ) from error
    return checkpoint


def _check_two(*places: Path) -> CheckpointReport:
    loaded = [_load(place, ": of two, both have to be files" * place.is_dir()) for place in places]
    contents = [measure(place)[0] for place in places]
    reference, current = map(entries_of, loaded)
    more: dict[str, Any] = {"has_same_bytes": contents[0] == contents[1], "other": str(places[1])}
    report = _report(places[0], reference, current, contents[0].size, **more)
    values = [
        {(section, path): value for section, path, value in walk(checkpoint)}
        for checkpoint in loaded
    ]
    counted = (
        _counted(one, *(each.get((one.section, one.path)) for each in values))
        for one in report.entries
    )
    return replace(report, entries=tuple(counted))


def _existing(path: str | Path) -> Path:
    place = Path(path).resolve()  # the sidecar is next to the file that a link points to
    if not (place.is_file() or place.is_dir()):  # a pipe would be waited for
        raise CheckpointNotFoundError(
            f"There is no checkpoint {path} on this disk, so nothing was compared. Check the name, "
            "or copy the checkpoint here together with the files next to it.",
            str(place),
        )
    return place


def _differences(
    reference: Entries, current: Entries, parameters: Mapping[str, str]
) -> Iterator[EntryDifference]:
    before, after = (
        {
            (section, path): entry
            for section, inner in entries.items()
            for path, entry in inner.items()
        }
        for entries in (reference, current)
    )
    for section, path in {**before, **after}:
        one, other = before.get((section, path)), after.get((section, path))
        if one == other:
            continue
        kind = "missing" if other is None else "extra" if one is None else "structure"
        shown = [None if entry is None else _layout(entry) for entry in (one, other)]
        if one is not None and other is not None and shown[0] == shown[1]:
            kind, shown = "content", [one.digest, other.digest]
        parameter = (
            parameters.get("/".join(path.split("/")[:3])) if section == "optimizer_states" else None
        )
        sides: dict[str, Any] = {
            "reference": shown[0],
            "current": shown[1],
            "parameter": parameter or None,
        }
        yield EntryDifference(section=section, path=path, kind=kind, **sides)


def _layout(entry: Entry) -> str:
    return entry.type if entry.shape is None else f"{entry.type} {list(entry.shape)}"


def _counted(entry: EntryDifference, reference: Any, current: Any) -> EntryDifference:
    """Add the numbers of elements and ULPs of tensors, or the values of other entries."""
    if entry.kind != "content":
        return entry
    if not (isinstance(reference, Tensor) and isinstance(current, Tensor)):
        return replace(entry, reference=reprlib.repr(reference), current=reprlib.repr(current))
    try:
        known = measure_tensors(reference, current)
    except ValueError:  # not strided: known to differ
        return entry
    figures = {name: getattr(known, name) for name in ("num_elements", "num_differing", "max_ulps")}
    return replace(entry, **figures)
