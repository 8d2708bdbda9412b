"""Which rows of two steps belong together.

The same program on both sides is aligned by position. Otherwise a sequence diff runs over the units of both sides. A
unit is what can be inserted or removed as a whole: an op call with the input and generator rows that it made, the row
of its varying arguments and its outputs, or one named row. Each unit has four keys, which are tried from strict (with
digests) to loose; with each, equal ends are matched first, then keys that occur once, then repeated blocks. The
occurrence of a site and its edges are no keys, so one op inserted among twenty alike shows as one op; where several
places are equally good, it is the earliest.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator
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

_LEADING = ("input", "generator", "delivered", "graph_output")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alignment:
    """The rows of two steps side by side.

    Two kinds of rows are not aligned: a row of varying arguments that the other side keeps as constants, and the input
    rows of an op that only one side has.

    Attributes:
        reference: int64, position in the reference by row, -1 where only the current step has it.
        current: int64, position in the current step by row, -1 where only the reference has it.
        is_same_program: rows are positions on both sides.
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
    units = _group(reference, numbers), _group(current, numbers)
    return _join((reference, current), units, _match_units(*units))


@dataclass(frozen=True, slots=True, eq=False)
class _Units:
    """The units of one side, in order.

    Attributes:
        leads: the input rows of each unit.
        rows: its output rows or its named row; its row of varying arguments, where it has neither.
        arguments: its row of varying arguments; -1 where there is none, or where ``rows`` has it.
        names: of its rows.
        keys: by level, one number a unit; equal numbers are equal keys, on both sides.
    """

    leads: list[range]
    rows: list[range]
    arguments: list[int]
    names: list[tuple[str | None, ...]]
    keys: tuple[list[int], ...]

    def __len__(self) -> int:
        return len(self.rows)


def _group(view: StepView, numbers: dict[Hashable, int]) -> _Units:
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

    units = _Units([], [], [], [], ([], [], [], []))
    for lead, start, stop in _bounds(sites):
        first = start + (sites[start].role == "argument" and stop > start + 1)
        units.leads.append(range(lead, start))
        units.rows.append(range(first, stop))
        units.arguments.append(start if first > start else -1)
        rows = sites[first:stop]
        head = rows[0]
        # rows of the state or the batch are told by their names, ops by name and place
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


def _bounds(sites: tuple[Site, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield of each unit its first row, the first after its input rows, and one past its last."""
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
        yield place, start, stop
        place = stop


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
    # Rows of generators at a step's top belong to no op, even where one follows directly.
    first = start
    while first > place and first - 1 in reader.inputs:
        first -= 1
    return start if first == place else place


def _follows(site: Site, before: Site, output: int) -> bool:
    return (
        site.op == before.op
        and site.output == output
        and site.role in ("output", "value", "sent", "region_input")
        and site.phase == before.phase
        and site.module == before.module
    )


def _match_units(reference: _Units, current: _Units) -> Pairs:
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


def _has_same_structure(reference: _Units, current: _Units, gap: Gap) -> bool:
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


def _join(views: tuple[StepView, StepView], units: tuple[_Units, _Units], matches: Pairs) -> Alignment:
    """Turn matched units into aligned rows."""
    partners = _pair_inputs(views, units, matches)
    moved = set(partners.values())
    ours, theirs = units
    rows: Pairs = []
    left = right = 0
    for left_match, right_match in (*matches, (len(ours), len(theirs))):
        for unit in range(left, left_match):
            rows.extend((place, -1) for place in ours.rows[unit])
        for unit in range(right, right_match):
            rows.extend((partners[place], place) for place in theirs.leads[unit] if place in partners)
            rows.extend((-1, place) for place in theirs.rows[unit])
        if left_match < len(ours):
            rows.extend((place, -1) for place in ours.leads[left_match] if place not in moved)
            rows.extend((partners.get(place, -1), place) for place in theirs.leads[right_match])
            rows.extend(_pair_outputs(views, units, left_match, right_match))
        left, right = left_match + 1, right_match + 1
    table = np.array(rows, dtype=np.int64).reshape(-1, 2)
    return Alignment(reference=table[:, 0], current=table[:, 1])


def _pair_inputs(views: tuple[StepView, StepView], units: tuple[_Units, _Units], matches: Pairs) -> dict[int, int]:
    """Return the input rows of the current step with theirs in the reference.

    Matched calls that read alike have their rows in the same order. All other rows are paired by what they are: a row
    belongs to the op that reads the tensor first, so an op that is inserted before it gets the row.
    """
    partners: dict[int, int] = {}
    loose: tuple[list[int], list[int]] = ([], [])
    for pair in matches:
        rows = [units[side].leads[pair[side]] for side in (0, 1)]
        sites = [[view.program.sites[place] for place in known] for view, known in zip(views, rows, strict=True)]
        if len(rows[0]) == len(rows[1]) and all(map(_may_be_same, *sites)):
            partners.update(zip(rows[1], rows[0], strict=True))
        else:
            loose[0].extend(rows[0])
            loose[1].extend(rows[1])
    for side in (0, 1):
        matched = {pair[side] for pair in matches}
        for unit, places in enumerate(units[side].leads):
            if unit not in matched:
                loose[side].extend(places)
    for is_exact in (True, False):
        known: defaultdict[Hashable, list[int]] = defaultdict(list)
        taken = {*partners.values()}
        for place in sorted(loose[0], reverse=True):
            if place not in taken:
                known[_input_key(views[0], place, is_exact=is_exact)].append(place)
        for place in sorted(loose[1]):
            key = _input_key(views[1], place, is_exact=is_exact)
            if key is not None and place not in partners and known[key]:
                partners[place] = known[key].pop()
    return partners


def _may_be_same(left: Site, right: Site) -> bool:
    return left.role == right.role and _are_compatible(left.name, right.name)


def _input_key(view: StepView, place: int, *, is_exact: bool) -> Hashable:
    """Return what an input row is recognised by: name, layout and bits, or its name alone; None for no name."""
    site = view.program.sites[place]
    if is_exact:
        return site.role, site.name, view.layout.entries[place], int(view.record.digests[place])
    return (site.role, site.name) if site.role in ("input", "graph_output") and site.name else None


def _pair_outputs(views: tuple[StepView, StepView], units: tuple[_Units, _Units], left: int, right: int) -> Pairs:
    ours, theirs = units
    arguments = ours.arguments[left], theirs.arguments[right]
    rows: Pairs = [arguments] if min(arguments) >= 0 else []
    if _have_compatible_names(ours.names[left], theirs.names[right]):
        return rows + list(zip(ours.rows[left], theirs.rows[right], strict=True))
    outputs: defaultdict[Hashable, list[int]] = defaultdict(list)
    for place in reversed(ours.rows[left]):
        outputs[_output_key(views[0].program.sites[place])].append(place)
    pairs = []
    for place in theirs.rows[right]:
        known = outputs[_output_key(views[1].program.sites[place])]
        pairs.append((known.pop() if known else -1, place))
    rows.extend((place, -1) for known in outputs.values() for place in known)
    return rows + pairs


def _output_key(site: Site) -> Hashable:
    return (site.role, site.output) if site.name is None else (site.role, site.name)
