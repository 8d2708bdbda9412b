"""Which rows of two steps belong together.

The same program on both sides is aligned by position. Otherwise a sequence diff runs over the units of both sides: an
op call with the input and generator rows that it made, the row of its varying arguments and its outputs, or one named
row; what can be inserted or removed as a whole. Each unit has four keys. Digests are anchors: the strictest key comes
first, and for each key prefix and suffix, then keys that occur once, then common blocks. The occurrence of a site and
its edges are no keys, so one op inserted among twenty alike shows as one op; where several places are equally good, it
is the earliest.
"""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from det_callbacks.compare.arguments import ArgumentReader
from det_callbacks.compare.sequence import Gap, Pairs, gaps_between, match_repeated, match_unique, trim
from det_callbacks.runs.program import Site, StepView

DIGEST, ARGUMENTS, STRUCTURE, OP = range(4)
"""Levels of keys: same bits, same arguments and layouts, same outputs and names, op alone.

An op's outputs have names where the trace knew them, which it may not have on one side. So equal bits count whatever
the names, then names count, and last the op counts alone.
"""

_LEADING = ("input", "generator", "delivered", "left")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alignment:
    """The rows of two steps side by side.

    Attributes:
        reference: int64, position in the reference by row, -1 where only the current step has it.
        current: int64, position in the current step by row, -1 where only the reference has it.
        is_same_program: rows are positions on both sides.

    Rows that say nothing by themselves are left out: a row of varying arguments that the other side keeps as constants,
    and the input rows of an op that only one side has.
    """

    reference: np.ndarray
    current: np.ndarray
    is_same_program: bool = False

    def __len__(self) -> int:
        return len(self.reference)


def align(reference: StepView, current: StepView) -> Alignment:
    """Return which rows of two steps belong together, in the order of the steps.

    The same program on both sides costs nothing. Otherwise some 10 microseconds a site of both sides; the search for
    the best alignment is bounded, so unrelated programs of 100,000 sites also take seconds.
    """
    if reference.record.program_id == current.record.program_id:
        places = np.arange(len(reference.program), dtype=np.int64)
        return Alignment(reference=places, current=places, is_same_program=True)
    numbers: dict[Hashable, int] = {}
    left, right = group(reference, numbers), group(current, numbers)
    return _Rows(reference, current, left, right).join(_match_units(left, right))


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


def group(view: StepView, numbers: dict[Hashable, int]) -> Units:
    """Return the units of a step; some 3 microseconds a site.

    Args:
        view: the step.
        numbers: of the keys known so far, which both sides share; new ones are added.
    """
    sites, entries = view.program.sites, view.layout.entries
    digests = view.record.digests.tolist()
    reader = ArgumentReader(view)
    known_entries: dict[int, int] = {}  # by object: hashing each entry anew would cost more

    def number(*key: Hashable) -> int:
        return numbers.setdefault(key, len(numbers))

    def entry_number(place: int) -> int:
        entry = entries[place]
        known = known_entries.get(id(entry))
        if known is None:
            known = known_entries[id(entry)] = number("layout", entry)
        return known

    units = Units(*_bounds(sites), [], ([], [], [], []))
    for start, stop in zip(units.starts, units.stops, strict=True):
        first = start + (sites[start].role == "argument" and stop > start + 1)
        rows = sites[first:stop]
        head = rows[0]
        # by their names the rows of a state or a batch are what they are; an op is its name and place
        place = (head.phase, head.module, head.op, *(() if head.op else (head.role, head.name)))
        kind = number(OP, place)
        outputs = tuple((row.role, row.output) for row in rows)
        units.names.append(tuple(row.name for row in rows))
        structure = number(STRUCTURE, kind, outputs, units.names[-1])
        given = (tuple(map(entry_number, range(first, stop))), reader.canonical(first) if head.op else "")
        units.keys[OP].append(kind)
        units.keys[STRUCTURE].append(structure)
        units.keys[ARGUMENTS].append(number(ARGUMENTS, structure, given))
        units.keys[DIGEST].append(number(DIGEST, kind, outputs, given, tuple(digests[first:stop])))
    return units


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
    # Rows of generators at a step's top have no op of their own, though one may come right after them.
    first = start
    while first > place and first - 1 in reader.inputs:
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


def _match_units(reference: Units, current: Units) -> Pairs:
    """Return the matched units in order: index in the reference, index in the current step."""
    pairs: Pairs = []
    gaps: list[Gap] = [(0, len(reference), 0, len(current))]
    for level, (left, right) in enumerate(zip(reference.keys, current.keys, strict=True)):
        remaining: list[Gap] = []
        for gap in gaps:
            for part in _split(left, right, gap, pairs, prefix_first=level == DIGEST):
                if level > DIGEST:
                    repeated = match_repeated(left, right, part)
                    pairs.extend(repeated)
                    remaining.extend(gaps_between(repeated, part))
                elif _has_same_structure(reference, current, part):
                    pairs.extend(zip(range(part[0], part[1]), range(part[2], part[3]), strict=True))
                else:
                    remaining.append(part)
        gaps = [gap for gap in remaining if gap[0] < gap[1] and gap[2] < gap[3]]
    return sorted(pairs)


def _split(left: list[int], right: list[int], gap: Gap, pairs: Pairs, *, prefix_first: bool) -> list[Gap]:
    """Match ends and unique keys of a gap into ``pairs``; return the gaps that are left."""
    ends, inner = trim(left, right, gap, suffix_first=not prefix_first)
    pairs.extend(ends)
    unique = match_unique(left, right, inner)
    pairs.extend(unique)
    parts = []
    for part in gaps_between(unique, inner):
        ends, rest = trim(left, right, part, suffix_first=not prefix_first)
        pairs.extend(ends)
        if rest[0] < rest[1] or rest[2] < rest[3]:
            parts.append(rest)
    return parts


def _has_same_structure(reference: Units, current: Units, gap: Gap) -> bool:
    """Return whether the two sides of a gap are the same sequence of ops, whatever their arguments, layouts and bits.

    They then belong together one by one: a search that wants equal arguments would pair an op with its neighbour.
    """
    left, right = range(gap[0], gap[1]), range(gap[2], gap[3])
    if reference.keys[OP][gap[0] : gap[1]] != current.keys[OP][gap[2] : gap[3]]:
        return False
    return all(
        reference.keys[STRUCTURE][one] == current.keys[STRUCTURE][other]
        or _have_compatible_names(reference.names[one], current.names[other])
        for one, other in zip(left, right, strict=True)
    )


def _have_compatible_names(left: tuple[str | None, ...], right: tuple[str | None, ...]) -> bool:
    return len(left) == len(right) and all(map(_are_compatible, left, right))


def _are_compatible(left: str | None, right: str | None) -> bool:
    """Return whether two names may be of the same tensor: one of them may be unknown."""
    return left is None or right is None or left == right


class _Rows:
    """Turns matched units into aligned rows."""

    def __init__(self, reference: StepView, current: StepView, left: Units, right: Units) -> None:
        self._views = (reference, current)
        self._units = (left, right)
        self._partners: dict[int, int] = {}  # input rows of the current step -> theirs in the reference
        self._moved: set[int] = set()  # input rows of the reference that are paired with another call's

    def join(self, matches: Pairs) -> Alignment:
        self._pair_inputs(matches)
        left_units, right_units = self._units
        rows: list[tuple[int, int]] = []
        left = right = 0
        for left_match, right_match in (*matches, (len(left_units), len(right_units))):
            for unit in range(left, left_match):
                rows.extend((place, -1) for place in self._body(0, unit))
            for unit in range(right, right_match):
                rows.extend((self._partners[place], place) for place in self._leads(1, unit) if place in self._partners)
                rows.extend((-1, place) for place in self._body(1, unit))
            if left_match < len(left_units):
                rows.extend((place, -1) for place in self._leads(0, left_match) if place not in self._moved)
                rows.extend((self._partners.get(place, -1), place) for place in self._leads(1, right_match))
                rows.extend(self._pair_outputs(left_match, right_match))
            left, right = left_match + 1, right_match + 1
        table = np.array(rows, dtype=np.int64).reshape(-1, 2)
        return Alignment(reference=table[:, 0], current=table[:, 1])

    def _site(self, side: int, place: int) -> Site:
        return self._views[side].program.sites[place]

    def _leads(self, side: int, unit: int) -> range:
        units = self._units[side]
        return range(units.leads[unit], units.starts[unit])

    def _body(self, side: int, unit: int) -> range:
        """Return the rows of a unit's outputs; that of its arguments where it has none."""
        units = self._units[side]
        start, stop = units.starts[unit], units.stops[unit]
        has_arguments = self._site(side, start).role == "argument" and stop > start + 1
        return range(start + has_arguments, stop)

    def _pair_inputs(self, matches: Pairs) -> None:
        """Pair the input rows of matched calls, then those that another call makes now."""
        lefts: list[int] = []
        rights: list[int] = []
        for left, right in matches:
            ours, theirs = self._pair_leads(list(self._leads(0, left)), list(self._leads(1, right)))
            lefts.extend(ours)
            rights.extend(theirs)
        for side, loose in enumerate((lefts, rights)):
            matched = {pair[side] for pair in matches}
            for unit in range(len(self._units[side])):
                if unit not in matched:
                    loose.extend(self._leads(side, unit))
        # Whoever reads a tensor first makes its row: one new op before it takes the row over.
        lefts, rights = self._pair_by(0, sorted(lefts), sorted(rights))
        self._pair_by(2, self._named_inputs(0, lefts), self._named_inputs(1, rights))
        self._moved = set(self._partners.values())

    def _named_inputs(self, side: int, places: list[int]) -> list[int]:
        return [place for place in places if (site := self._site(side, place)).role in ("input", "left") and site.name]

    def _pair_leads(self, lefts: list[int], rights: list[int]) -> tuple[list[int], list[int]]:
        """Pair the input rows of two calls that belong together; return those that are left."""
        if len(lefts) == len(rights) and all(map(self._may_be_same, lefts, rights)):
            self._partners.update(zip(rights, lefts, strict=True))
            return [], []
        for strictness in range(4):
            lefts, rights = self._pair_by(strictness, lefts, rights)
        return lefts, rights

    def _may_be_same(self, left: int, right: int) -> bool:
        one, other = self._site(0, left), self._site(1, right)
        return one.role == other.role and _are_compatible(one.name, other.name)

    def _pair_by(self, strictness: int, lefts: list[int], rights: list[int]) -> tuple[list[int], list[int]]:
        places: defaultdict[Hashable, list[int]] = defaultdict(list)
        for place in reversed(lefts):
            places[self._input_key(strictness, 0, place)].append(place)
        taken: set[int] = set()
        over: list[int] = []
        for place in rights:
            found = places.get(self._input_key(strictness, 1, place))
            if found:
                self._partners[place] = found.pop()
                taken.add(self._partners[place])
            else:
                over.append(place)
        return [place for place in lefts if place not in taken], over

    def _input_key(self, strictness: int, side: int, place: int) -> Hashable:
        """Return what an input row is recognised by.

        Args:
            strictness: 0 for name, layout and bits; 1 without the bits; 2 by its name; 3 by layout and bits.
            side: 0 for the reference, 1 for the current step.
            place: of the row.
        """
        site = self._site(side, place)
        if strictness == 2:
            return (site.role, site.name)
        entry = self._views[side].layout.entries[place]
        bits = 0 if strictness == 1 else int(self._views[side].record.digests[place])
        return (site.role, None if strictness == 3 else site.name, entry, bits)

    def _pair_outputs(self, left: int, right: int) -> Pairs:
        lefts, rights = self._body(0, left), self._body(1, right)
        ours, theirs = self._units
        starts = ours.starts[left], theirs.starts[right]
        rows: Pairs = [starts] if starts[0] < lefts.start and starts[1] < rights.start else []
        if _have_compatible_names(ours.names[left], theirs.names[right]):
            return rows + list(zip(lefts, rights, strict=True))
        outputs: defaultdict[Hashable, list[int]] = defaultdict(list)
        for place in reversed(lefts):
            outputs[self._output_key(0, place)].append(place)
        pairs = []
        for place in rights:
            known = outputs[self._output_key(1, place)]
            pairs.append((known.pop() if known else -1, place))
        rows.extend((place, -1) for known in outputs.values() for place in known)
        return rows + pairs

    def _output_key(self, side: int, place: int) -> Hashable:
        site = self._site(side, place)
        return (site.role, site.output) if site.name is None else (site.role, site.name)
