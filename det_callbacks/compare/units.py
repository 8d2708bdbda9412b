"""The rows of a step grouped in units: an op call with everything recorded for it, or one named row.

A unit is what can be inserted or removed as a whole: the input and generator rows that an op made, the row of its
varying arguments, and its outputs. Each unit gets five keys, from the strictest to the loosest, as small numbers that
both sides of a comparison share.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from det_callbacks.compare.arguments import ArgumentReader
from det_callbacks.runs.program import Site, StepView

DIGEST, ARGUMENTS, LAYOUT, STRUCTURE, OP = range(5)
"""Levels of keys: same bits, arguments, layouts, outputs and names; op alone.

An op's outputs have names where the trace knew them, which it may not have on one side. So equal bits count whatever
the names, then names count, and last the op counts alone.
"""

NUM_LEVELS = 5

_LEADING = ("input", "generator", "delivered", "left")


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
