"""The rows of a step grouped in units: an op call with everything recorded for it, or one named row.

A unit is what can be inserted or removed as a whole: the input and generator rows that an op made, the row of its
varying arguments, and its outputs. Each unit gets five keys, from the strictest to the loosest, as small numbers that
both sides of a comparison share.
"""

import json
import struct
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from det_callbacks.runs.program import Site, StepView
from det_callbacks.runs.values import argument_bits, plain_value

DIGEST, ARGUMENTS, LAYOUT, STRUCTURE, OP = range(5)
"""Levels of keys: same bits, arguments, layouts, outputs and names; op alone.

An op's outputs have names where the trace knew them, which it may not have on one side. So equal bits count whatever
the names, then names count, and last the op counts alone.
"""

NUM_LEVELS = 5

_LEADING = ("input", "generator", "delivered", "left")

_UNKNOWN = "a value that was kept as a digest only"
_ABSENT = "a tensor or nothing"
_NAN = 0x7FF8_0000_0000_0000


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentDifference:
    """How the arguments of two aligned calls differ.

    Attributes:
        values: argument name -> (text of the reference's value, text of the current one).
        is_known: False where the values cannot be compared: each side kept a digest of other arguments.
    """

    values: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    is_known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of one call.

    Attributes:
        values: name -> JSON text of its value, for the constant ones and a varying one that is a number.
        digested: names of the varying ones of which only a common digest was kept.
        bits: that digest.
    """

    values: Mapping[str, str]
    digested: tuple[str, ...] = ()
    bits: int = 0


class ArgumentReader:
    """Reads the arguments of the ops of one step.

    Args:
        view: the step.
    """

    def __init__(self, view: StepView) -> None:
        self._view = view
        self._parsed: dict[str, dict[str, str]] = {}
        self._canonical: dict[str, str] = {}

    def read(self, output: int) -> Arguments:
        """Return the arguments of the call that an output row belongs to.

        Args:
            output: position of the row; that of the argument row itself for a call without outputs.
        """
        site = self._view.program.sites[output]
        constants = self._constants(site.arguments)
        if not site.varying:
            return Arguments(values=constants)
        row = output if site.role == "argument" else output - site.output - 1
        assert self._view.program.sites[row].role == "argument", "varying arguments have a row before the outputs"
        bits = int(self._view.record.digests[row])
        entry = self._view.layout.entries[row]
        value = None if entry is None or len(site.varying) > 1 else _decode(bits, entry.dtype)
        if value is None:
            return Arguments(values=constants, digested=site.varying, bits=bits)
        # Two NaNs of other bits would have the same text.
        text = f'"nan {bits:#x}"' if value != value and bits != _NAN else json.dumps(plain_value(value))
        return Arguments(values={**constants, site.varying[0]: text})

    def canonical(self, output: int) -> str:
        """Return a text that is equal for equal arguments, whichever of them vary."""
        site = self._view.program.sites[output]
        if not site.varying:
            known = self._canonical.get(site.arguments)
            if known is None:
                known = self._canonical[site.arguments] = _canonical(Arguments(values=self._constants(site.arguments)))
            return known
        return _canonical(self.read(output))

    def _constants(self, text: str) -> dict[str, str]:
        known = self._parsed.get(text)
        if known is None:
            known = {name: json.dumps(value) for name, value in json.loads(text).items()}
            self._parsed[text] = known
        return known


def differing_arguments(reference: Arguments, current: Arguments) -> ArgumentDifference | None:
    """Return how two calls differ in their arguments, None where they agree.

    Arguments of which one side kept only a digest are compared by digesting the other side's values.
    """
    if reference.digested == current.digested:
        agree = reference.bits == current.bits
        digested = {} if agree else dict.fromkeys(reference.digested, (_UNKNOWN, _UNKNOWN))
        is_known = True
    else:
        digested = {}
        is_known = True
        for one, other, is_swapped in ((reference, current, False), (current, reference, True)):
            if not one.digested:
                continue
            if not all(name in other.values for name in one.digested):
                is_known = False
                continue
            bits = argument_bits([_revive(other.values[name]) for name in one.digested])[0]
            if bits != one.bits:
                for name in one.digested:
                    pair = (_UNKNOWN, other.values[name])
                    digested[name] = pair[::-1] if is_swapped else pair
    skipped = {*reference.digested, *current.digested}
    values = {
        name: (reference.values.get(name, _ABSENT), current.values.get(name, _ABSENT))
        for name in (*reference.values, *(name for name in current.values if name not in reference.values))
        if name not in skipped and reference.values.get(name) != current.values.get(name)
    }
    if values or digested:
        return ArgumentDifference(values={**values, **digested})
    return None if is_known else ArgumentDifference(is_known=False)


def _canonical(arguments: Arguments) -> str:
    content: list[Any] = [sorted(arguments.values.items())]
    if arguments.digested:
        content += [arguments.digested, arguments.bits]
    return json.dumps(content)


def _decode(bits: int, tag: str) -> float | int | bool | None:
    """Return the number that the 64 bits of an argument row are, None where they are a digest."""
    if tag == "float":
        return float(struct.unpack("<d", struct.pack("<Q", bits))[0])
    if tag == "int":
        return bits - 2**64 if bits >= 2**63 else bits
    if tag == "bool":
        return bool(bits)
    return None


def _revive(text: str) -> Any:
    """Return a value from its JSON text as the trace had it: infinities and NaN are kept as texts."""
    value = json.loads(text)
    return float(value) if value in ("inf", "-inf", "nan") else value


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """The units of one side, in order.

    Attributes:
        leads: first row of each unit, input rows included.
        starts: first row that the op itself has.
        stops: one past the last row.
        names: of the rows of each unit.
        keys: by level, one number a unit; equal numbers are equal keys, on both sides.
    """

    leads: list[int]
    starts: list[int]
    stops: list[int]
    names: list[tuple[str | None, ...]]
    keys: tuple[list[int], ...]

    def __len__(self) -> int:
        return len(self.starts)


class Interner:
    """Numbers for keys; the two sides of a comparison share one."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def number(self, key: Hashable) -> int:
        """Return the number of a key."""
        return self._numbers.setdefault(key, len(self._numbers))


def group(view: StepView, interner: Interner) -> Units:
    """Return the units of a step; some 3 microseconds a site."""
    sites = view.program.sites
    layouts = _LayoutNumbers(view, interner)
    digests = view.record.digests.tolist()
    reader = ArgumentReader(view)
    leads, starts, stops = _bounds(sites)
    names: list[tuple[str | None, ...]] = []
    keys: tuple[list[int], ...] = ([], [], [], [], [])
    for start, stop in zip(starts, stops, strict=True):
        first = start + (sites[start].role == "argument" and stop > start + 1)
        rows = sites[first:stop]
        head = rows[0]
        # By their names the rows of a state or a batch are what they are; an op is its name and place.
        op: Hashable = (head.phase, head.module, head.op) if head.op else _row_key(head)
        kind = interner.number((OP, op))
        outputs = tuple((row.role, row.output) for row in rows)
        names.append(tuple(row.name for row in rows))
        entries = tuple(layouts.number(place) for place in range(first, stop))
        arguments = reader.canonical(first) if head.op else ""
        bits = tuple(digests[first:stop])
        structure = interner.number((STRUCTURE, kind, outputs, names[-1]))
        layout = interner.number((LAYOUT, structure, entries))
        keys[OP].append(kind)
        keys[STRUCTURE].append(structure)
        keys[LAYOUT].append(layout)
        keys[ARGUMENTS].append(interner.number((ARGUMENTS, layout, arguments)))
        keys[DIGEST].append(interner.number((DIGEST, kind, outputs, entries, arguments, bits)))
    return Units(leads=leads, starts=starts, stops=stops, names=names, keys=keys)


def are_compatible(left: str | None, right: str | None) -> bool:
    """Return whether two names may be of the same tensor: one of them may be unknown."""
    return left is None or right is None or left == right


def _row_key(site: Site) -> Hashable:
    return (site.phase, site.module, site.role, site.name)


def _bounds(sites: tuple[Site, ...]) -> tuple[list[int], list[int], list[int]]:
    leads: list[int] = []
    starts: list[int] = []
    stops: list[int] = []
    num_sites = len(sites)
    place = 0
    while place < num_sites:
        start = _skip_leading(sites, place)
        stop = start + 1
        head = sites[start]
        if head.op:
            if head.role == "argument" and stop < num_sites and _follows(sites[stop], head, 0):
                stop += 1
            while stop < num_sites and _follows(sites[stop], sites[stop - 1], sites[stop - 1].output + 1):
                stop += 1
        leads.append(place)
        starts.append(start)
        stops.append(stop)
        place = stop
    return leads, starts, stops


def _skip_leading(sites: tuple[Site, ...], place: int) -> int:
    """Return where the op begins that made the input rows from here on; ``place`` where no op made them."""
    start = place
    while start < len(sites) and sites[start].role in _LEADING:
        start += 1
    if start == place or start == len(sites) or not sites[start].op:
        return place
    reader = sites[start]
    if reader.role == "argument" and start + 1 < len(sites):
        reader = sites[start + 1]
    read = frozenset(reader.inputs)
    # Rows of generators at a step's top have no op of their own, though one may come right after them.
    first = start
    while first > place and first - 1 in read:
        first -= 1
    return start if first == place else place


def _follows(site: Site, before: Site, output: int) -> bool:
    return (
        site.op == before.op
        and site.output == output
        and site.role in ("output", "value", "sent", "entering")
        and site.phase == before.phase
        and site.module == before.module
    )


class _LayoutNumbers:
    """Numbers of the layout entries of one side, looked up by object: hashing each entry anew would cost more."""

    def __init__(self, view: StepView, interner: Interner) -> None:
        self._entries = view.layout.entries
        self._interner = interner
        self._known: dict[int, int] = {}

    def number(self, place: int) -> int:
        entry = self._entries[place]
        known = self._known.get(id(entry))
        if known is None:
            known = self._known[id(entry)] = self._interner.number(("layout", entry))
        return known
