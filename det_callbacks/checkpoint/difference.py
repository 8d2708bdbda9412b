"""How the entries of two checkpoints, or of a checkpoint and its sidecar, differ."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from det_callbacks.checkpoint.entries import Entries, Entry
from det_callbacks.digest import format_digest
from det_callbacks.digest.numbers import tensor_numbers
from det_callbacks.verdict import TensorNumbers


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryDifference:
    """One entry that is not the same in both.

    Attributes:
        section: key of the checkpoint, or "files" of a folder, or "resume" of what is kept beside it.
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


def differences(reference: Entries, current: Entries) -> list[EntryDifference]:
    """Return what is not the same, in the order of the reference, then what only ``current`` has."""
    found = []
    for section, path, entry in _all(reference):
        other = current.get(section, {}).get(path)
        if other is None:
            found.append(_difference(section, path, "missing", entry, None))
        elif not entry.is_same(other):
            is_content = (entry.kind, entry.type, entry.shape) == (other.kind, other.type, other.shape)
            found.append(_difference(section, path, "content" if is_content else "structure", entry, other))
    found += [
        _difference(section, path, "extra", None, entry)
        for section, path, entry in _all(current)
        if path not in reference.get(section, {})
    ]
    return _with_exchanges(found, reference, current)


def counted(
    found: Sequence[EntryDifference],
    reference: Mapping[tuple[str, str], Any],
    current: Mapping[tuple[str, str], Any],
) -> list[EntryDifference]:
    """Return the differences with numbers of elements and ULPs, where both sides are ordinary tensors.

    Args:
        found: the differences.
        reference: (section, path) -> value.
        current: the same of the other checkpoint.
    """
    return [_counted(one, *(values.get((one.section, one.path)) for values in (reference, current))) for one in found]


def _all(entries: Entries) -> list[tuple[str, str, Entry]]:
    return [(section, path, entry) for section, inner in entries.items() for path, entry in inner.items()]


def _difference(section: str, path: str, kind: str, reference: Entry | None, current: Entry | None) -> EntryDifference:
    parameters = [entry.parameter for entry in (reference, current) if entry is not None]
    return EntryDifference(
        section=section,
        path=path,
        kind=kind,
        reference=_shown(reference, kind),
        current=_shown(current, kind),
        parameter=next((name for name in parameters if name is not None), None),
    )


def _shown(entry: Entry | None, kind: str) -> str | None:
    if entry is None:
        return None
    if kind == "content":
        return None if entry.digest is None else format_digest(entry.digest)
    return entry.type if entry.shape is None else f"{entry.type} {list(entry.shape)}"


def _with_exchanges(found: Sequence[EntryDifference], reference: Entries, current: Entries) -> list[EntryDifference]:
    """Name the pairs of which each has the other's content: what a wrong mapping of names does."""
    by_digest: dict[tuple[str, int | None], list[str]] = {}
    for one in found:
        if one.kind == "content":
            digest = reference[one.section][one.path].digest
            by_digest.setdefault((one.section, digest), []).append(one.path)
    named = []
    for one in found:
        partner = None
        if one.kind == "content":
            mine = reference[one.section][one.path]
            held = current[one.section][one.path]
            partner = next(
                (
                    path
                    for path in by_digest.get((one.section, held.digest), ())
                    if mine.kind == "tensor" and current[one.section][path].is_same(mine)
                ),
                None,
            )
        named.append(one if partner is None else replace(one, exchanged_with=partner))
    return named


def _counted(one: EntryDifference, reference: Any, current: Any) -> EntryDifference:
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
