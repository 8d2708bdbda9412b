"""Aligns the rows of two steps: by position in one program, else by a sequence diff over the units of both.

A unit is an op call with all its rows, or one named row. Units are matched with four keys, from
strict (with digests) to loose. None of the keys has the occurrence of a site or its edges, so one
op inserted among twenty of its kind shows as one op. Matches never cross.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import numpy as np

from det_callbacks.compare.arguments import read_arguments
from det_callbacks.runs.program import Site, StepView

DIGEST, ARGUMENTS, STRUCTURE, OP = range(4)
"""Levels of keys: the same bits; the same arguments and layouts; the same outputs and names; the same op.

A name may be known on only one side, so equal bits match under any name.
"""

_LEADING = ("input", "generator", "delivered", "graph_output")

Pairs = list[tuple[int, int]]
Gap = tuple[int, int, int, int]
"""Units without a match: start and stop in the reference, start and stop in the current step."""

MAX_CELLS = 1_000_000
"""The largest product of two lengths for which a gap is searched for its longest common blocks; some 0.1 s."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alignment:
    """The position of each row in both steps; -1 if a step does not have the row.

    Numbers that the other side keeps as constants, and input rows of an op in only one step, are not aligned.
    """

    reference: np.ndarray
    current: np.ndarray
    is_same_program: bool = False  # rows are positions on both sides

    def __len__(self) -> int:
        return len(self.reference)


def align(reference: StepView, current: StepView) -> Alignment:
    """Return the aligned rows of two steps, in the order of the steps.

    Equal programs cost nothing, different ones some 10 microseconds a site.
    """
    if reference.record.program_id == current.record.program_id:
        places = np.arange(len(reference.program), dtype=np.int64)
        return Alignment(reference=places, current=places, is_same_program=True)
    numbers: dict[Hashable, int] = {}
    units = _group(reference, numbers), _group(current, numbers)
    rows = _join((reference, current), units, _match_units(*units))
    table = np.array(rows, dtype=np.int64).reshape(-1, 2)
    return Alignment(reference=table[:, 0], current=table[:, 1])


class _Unit(NamedTuple):
    leads: range  # input rows of the call
    rows: range  # outputs of a call, or a named row; a call without outputs has its argument row here
    argument: int  # the argument row of a call with outputs, or -1
    names: tuple[str | None, ...]  # of ``rows``
    keys: tuple[int, int, int, int]  # by level; equal on both sides for equal keys


def _group(view: StepView, numbers: dict[Hashable, int]) -> list[_Unit]:
    """Return the units of a step in order; ``numbers`` has the keys of both sides."""

    def number(*key: Hashable) -> int:
        return numbers.setdefault(key, len(numbers))

    sites, digests = view.program.sites, view.record.digests.tolist()
    # by object: hashing each entry again would cost more
    by_object = {id(entry): entry for entry in view.layout.entries}
    known = {key: number("layout", entry) for key, entry in by_object.items()}
    layouts = [known[id(entry)] for entry in view.layout.entries]
    units = []
    for lead, start, stop in _bounds(sites):
        has_argument = sites[start].role == "argument" and stop > start + 1
        first = start + has_argument
        rows = sites[first:stop]
        head = rows[0]
        # names identify rows of the state or the batch
        what = (head.op,) if head.op else (head.op, head.role, head.name)
        kind = number(OP, head.phase, head.module, *what)
        outputs, names = tuple((row.role, row.output) for row in rows), tuple(row.name for row in rows)
        structure = number(STRUCTURE, kind, outputs, names)
        given = (tuple(layouts[first:stop]), read_arguments(view, first).canonical if head.op else None)
        arguments = number(ARGUMENTS, structure, given)
        bits = number(DIGEST, kind, outputs, given, tuple(digests[first:stop]))
        keys = (bits, arguments, structure, kind)
        units.append(_Unit(range(lead, start), range(first, stop), start if has_argument else -1, names, keys))
    return units


def _bounds(sites: tuple[Site, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield each unit's first row, its first row that is not an input, and one past its last."""
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
    """Return the position of the op that made the input rows from here on; ``place`` if no op made them."""
    start = place
    while start < len(sites) and sites[start].role in _LEADING:
        start += 1
    if start == place or start == len(sites) or not sites[start].op:
        return place
    reader = sites[min(start + (sites[start].role == "argument"), len(sites) - 1)]
    # generators at a step's top belong to no op
    return start if {*range(place, start)} <= {*reader.inputs} else place


def _follows(site: Site, before: Site, output: int) -> bool:
    is_same_call = (site.phase, site.module, site.op, site.output) == (before.phase, before.module, before.op, output)
    return is_same_call and site.role in ("output", "value", "sent", "region_input")


def _match_units(reference: list[_Unit], current: list[_Unit]) -> Pairs:
    """Return matched units in order: index in the reference, index in the current step."""
    pairs: Pairs = []
    gaps: list[Gap] = [(0, len(reference), 0, len(current))]
    for level in (DIGEST, ARGUMENTS, STRUCTURE, OP):
        left, right = ([unit.keys[level] for unit in units] for units in (reference, current))
        gaps = [part for gap in gaps for part in _split(left, right, gap, pairs, suffix_first=level != DIGEST)]
        if level == DIGEST:
            same = {gap for gap in gaps if _is_same_sequence(reference[slice(*gap[:2])], current[slice(*gap[2:])])}
            pairs.extend(pair for gap in same for pair in zip(range(*gap[:2]), range(*gap[2:]), strict=True))
            gaps = [gap for gap in gaps if gap not in same]
    return sorted(pairs)


def _split(left: list[int], right: list[int], gap: Gap, pairs: Pairs, *, suffix_first: bool) -> list[Gap]:
    """Add the matches of a gap to ``pairs``; return the gaps that are left."""
    gap = _trim(left, right, gap, pairs, suffix_first=suffix_first)
    matched = _match(left, right, gap)
    pairs.extend(matched)
    return [_trim(left, right, part, pairs, suffix_first=suffix_first) for part in _gaps_between(matched, gap)]


def _is_same_sequence(reference: list[_Unit], current: list[_Unit]) -> bool:
    """Return whether both have the same ops: a search by arguments would then pair some with their neighbours."""
    return len(reference) == len(current) and all(
        ours.keys[OP] == theirs.keys[OP] and _have_compatible_names(ours.names, theirs.names)
        for ours, theirs in zip(reference, current, strict=True)
    )


def _have_compatible_names(left: Sequence[str | None], right: Sequence[str | None]) -> bool:
    """Return whether names may name the same tensors in order; a name may be unknown on one side."""
    if len(left) != len(right):
        return False
    return all(None in (one, other) or one == other for one, other in zip(left, right, strict=True))


def _join(views: tuple[StepView, StepView], units: tuple[list[_Unit], list[_Unit]], matches: Pairs) -> Pairs:
    """Return the aligned rows of matched units; -1 means no row."""
    partners = _pair_inputs(views, units, matches)
    moved = set(partners.values())
    ours, theirs = units
    rows: Pairs = []
    left = right = 0
    for left_match, right_match in (*matches, (len(ours), len(theirs))):
        rows.extend((place, -1) for unit in ours[left:left_match] for place in unit.rows)
        for unit in theirs[right:right_match]:
            rows.extend((partners[place], place) for place in unit.leads if place in partners)
            rows.extend((-1, place) for place in unit.rows)
        if left_match < len(ours):
            rows.extend((place, -1) for place in ours[left_match].leads if place not in moved)
            rows.extend((partners.get(place, -1), place) for place in theirs[right_match].leads)
            rows.extend(_pair_outputs(views, ours[left_match], theirs[right_match]))
        left, right = left_match + 1, right_match + 1
    return rows


def _pair_inputs(
    views: tuple[StepView, StepView], units: tuple[list[_Unit], list[_Unit]], matches: Pairs
) -> dict[int, int]:
    """Return the input rows of the current step with theirs in the reference, those of matched calls first.

    The others are paired by key, because an inserted op gets the rows of tensors that it reads first.
    """
    partners: dict[int, int] = {}
    for left, right in matches:
        leads = units[0][left].leads, units[1][right].leads
        ours, theirs = (view.program.sites[rows.start : rows.stop] for view, rows in zip(views, leads, strict=True))
        has_same_roles = [one.role for one in ours] == [one.role for one in theirs]
        if has_same_roles and _have_compatible_names([one.name for one in ours], [one.name for one in theirs]):
            partners.update(zip(leads[1], leads[0], strict=True))
    paired = {*partners.values()}
    ours_left = [place for unit in units[0] for place in unit.leads if place not in paired]
    theirs_left = [place for unit in units[1] for place in unit.leads if place not in partners]
    pairs = _pair_by_key(
        [(_input_key(views[0], place), place) for place in ours_left],
        [(_input_key(views[1], place), place) for place in theirs_left],
    )
    partners.update((place, partner) for partner, place in pairs if partner >= 0)
    return partners


def _input_key(view: StepView, place: int) -> tuple[Hashable, ...]:
    """Return the key that input rows of one tensor share: its name, or else its layout and bits."""
    site = view.program.sites[place]
    if site.role in ("input", "graph_output") and site.name:
        return site.role, site.name
    return site.role, site.name, view.layout.entries[place], int(view.record.digests[place])


def _pair_by_key(ours: Sequence[tuple[Hashable, int]], theirs: Sequence[tuple[Hashable, int]]) -> Pairs:
    """Return each current place with the first unused reference place of the same key, else -1."""
    unused: defaultdict[Hashable, list[int]] = defaultdict(list)
    for key, place in reversed(ours):
        unused[key].append(place)
    return [(unused[key].pop() if unused[key] else -1, place) for key, place in theirs]


def _pair_outputs(views: tuple[StepView, StepView], ours: _Unit, theirs: _Unit) -> Pairs:
    rows: Pairs = [(ours.argument, theirs.argument)] if min(ours.argument, theirs.argument) >= 0 else []
    if _have_compatible_names(ours.names, theirs.names):
        return rows + list(zip(ours.rows, theirs.rows, strict=True))

    def keyed(view: StepView, unit: _Unit) -> list[tuple[Hashable, int]]:
        sites = view.program.sites
        return [((sites[at].role, sites[at].name or sites[at].output), at) for at in unit.rows]

    pairs = _pair_by_key(keyed(views[0], ours), keyed(views[1], theirs))
    paired = {partner for partner, _ in pairs}
    return [*rows, *((place, -1) for place in ours.rows if place not in paired), *pairs]


def _trim(reference: Sequence[int], current: Sequence[int], gap: Gap, pairs: Pairs, *, suffix_first: bool) -> Gap:
    """Add the common prefix and suffix of a gap to ``pairs``; return the gap that is left.

    ``suffix_first`` puts an insertion in the earliest possible place.
    """
    r_start, r_stop, c_start, c_stop = gap
    for is_suffix in (suffix_first, not suffix_first):
        while r_start < r_stop and c_start < c_stop:
            pair = (r_stop - 1, c_stop - 1) if is_suffix else (r_start, c_start)
            if reference[pair[0]] != current[pair[1]]:
                break
            pairs.append(pair)
            if is_suffix:
                r_stop, c_stop = pair
            else:
                r_start, c_start = r_start + 1, c_start + 1
    return r_start, r_stop, c_start, c_stop


def _match(left: Sequence[int], right: Sequence[int], gap: Gap) -> Pairs:
    """Match the longest common blocks of a gap.

    In a large gap, keys match by their n-th occurrence from its end, as far as their order agrees.
    """
    r_start, r_stop, c_start, c_stop = gap
    if (r_stop - r_start) * (c_stop - c_start) > MAX_CELLS:
        ours, theirs = _numbered(left, r_start, r_stop), _numbered(right, c_start, c_stop)
        common = [(place, theirs[key]) for key, place in ours.items() if key in theirs]
        return _longest_increasing(common[::-1])
    # backwards, because the search puts insertions as late as possible
    matcher = SequenceMatcher(None, left[r_start:r_stop][::-1], right[c_start:c_stop][::-1], autojunk=False)
    places = ((block.a + at, block.b + at) for block in matcher.get_matching_blocks() for at in range(block.size))
    return sorted((r_stop - 1 - x, c_stop - 1 - y) for x, y in places)


def _numbered(keys: Sequence[int], start: int, stop: int) -> dict[tuple[int, int], int]:
    """Return the places in a range by key and the number of its later occurrences, the last place first."""
    seen: Counter[int] = Counter()
    found = {}
    for place in reversed(range(start, stop)):
        key = keys[place]
        found[key, seen[key]] = place
        seen[key] += 1
    return found


def _gaps_between(pairs: Pairs, gap: Gap) -> list[Gap]:
    r_start, r_stop, c_start, c_stop = gap
    gaps = []
    for r_next, c_next in (*pairs, (r_stop, c_stop)):
        if r_start < r_next and c_start < c_next:
            gaps.append((r_start, r_next, c_start, c_next))
        r_start, c_start = r_next + 1, c_next + 1
    return gaps


def _longest_increasing(candidates: Pairs) -> Pairs:
    """Return the longest run of pairs that ascends on both sides; the candidates ascend on the left."""
    ends: list[int] = []
    runs: list[tuple[Any, ...]] = []  # the best run of each length: (last pair, run before it)
    for pair in candidates:
        length = bisect_left(ends, pair[1])
        ends[length : length + 1] = [pair[1]]
        runs[length : length + 1] = [(pair, runs[length - 1] if length else ())]
    found: Pairs = []
    run = runs[-1] if runs else ()
    while run:
        pair, run = run
        found.append(pair)
    return found[::-1]
