"""Aligns the rows of two steps: by position in one program,
else by a sequence diff over the units of both.

A unit is an op call with all its rows, or one named row. Units are matched with four keys, from
strict (with digests) to loose. None of the keys has the occurrence of a site or its edges, so one
op inserted among twenty of its kind shows as one op. Matches never cross, after ``order.py`` has
put named rows and updates into the reference's order.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import IntEnum
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np

from det_callbacks.compare.order import (
    Owners,
    in_reference_order,
    owners_of_updates,
    read_arguments,
)
from det_callbacks.runs.program import Site, StepView

# of rows that precede the call that reads them, and of rows that may follow the first row of a call
_INPUT_ROLES = ("input", "generator", "delivered", "graph_output")
_LATER_ROLES = ("output", "value", "sent", "region_input")

Pairs = list[tuple[int, int]]
"""Positions of rows, or indices of units, in the reference and in the current step;
-1 means none.
"""

_Item = TypeVar("_Item")

MAX_CELLS = 1_000_000
"""The largest product of two lengths for which a gap is searched for its longest
common blocks; some 0.1 s.
"""


class MatchKey(IntEnum):
    """What is equal in two units with the same key, besides the op; the strictest first.

    A name may be known on only one side, so equal bits match under any name.
    """

    DIGEST = 0  # the outputs, arguments, layouts, bits and owners, but not the names
    ARGUMENTS = 1  # the outputs, names, arguments and layouts
    STRUCTURE = 2  # the outputs and names
    OP = 3


class Gap(NamedTuple):
    """Neighbouring units without a match, by index."""

    reference: range
    current: range


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alignment:
    """The position of each row in both steps; -1 if a step does not have the row.

    It omits two kinds of rows without a partner: numbers of a call with outputs, which the other
    side may keep as constants, and input rows of a call in only one step. ``reordered`` has the
    phases whose named rows or updates come in a different order than in the reference.
    """

    reference: np.ndarray
    current: np.ndarray
    is_same_program: bool = False  # rows are positions on both sides
    reordered: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.reference)


def align(reference: StepView, current: StepView) -> Alignment:
    """Return the aligned rows of two steps, in the order of the steps.

    Equal programs cost nothing, different ones some 10 microseconds a site.
    """
    if reference.record.program_id == current.record.program_id:
        positions = np.arange(len(reference.program), dtype=np.int64)
        return Alignment(reference=positions, current=positions, is_same_program=True)
    interned: dict[Hashable, int] = {}
    reference_step, current_step = _group(reference, interned), _group(current, interned)
    order, reordered = in_reference_order(reference_step.units, current_step.units)
    current_step = _Step(current, [current_step.units[index] for index in order])
    matches = _match_units(reference_step.units, current_step.units)
    table = np.array(_join(reference_step, current_step, matches), dtype=np.int64).reshape(-1, 2)
    return Alignment(reference=table[:, 0], current=table[:, 1], reordered=reordered)


def match_keys(reference: Sequence[Hashable], current: Sequence[Hashable]) -> Pairs:
    """Return the indices of matching keys of two sequences, which are in order in both."""
    interned: dict[Hashable, int] = {}
    reference_keys = [interned.setdefault(key, len(interned)) for key in reference]
    current_keys = [interned.setdefault(key, len(interned)) for key in current]
    whole = Gap(range(len(reference)), range(len(current)))
    pairs, middle = _trim(reference_keys, current_keys, whole, suffix_first=False)
    return sorted(pairs + _match_blocks(reference_keys, current_keys, middle))


class _Unit(NamedTuple):
    input_rows: range
    # outputs of a call, or a named row; a call without outputs has its argument row here
    rows: range
    argument_row: int  # of a call with outputs, or -1
    sites: tuple[Site, ...]  # of ``rows``, as are names and owners
    names: tuple[str | None, ...]
    owners: tuple[Owners, ...]
    keys: tuple[int, int, int, int]  # by ``MatchKey``: interned keys


class _Step(NamedTuple):
    view: StepView
    units: list[_Unit]  # in order


def _group(view: StepView, interned: dict[Hashable, int]) -> _Step:
    """Group the rows of a step into units; ``interned`` numbers the keys of both sides,
    for fast comparison.
    """

    def intern(*key: Hashable) -> int:
        return interned.setdefault(key, len(interned))

    sites, digests = view.program.sites, view.record.digests.tolist()
    # by object: hashing each entry again would cost more
    by_object = {id(entry): entry for entry in view.layout.entries}
    interned_by_object = {key: intern("layout", entry) for key, entry in by_object.items()}
    layouts = [interned_by_object[id(entry)] for entry in view.layout.entries]
    owners = owners_of_updates(view.program)
    units = []
    for begin, start, stop in _bounds(sites):
        has_argument = sites[start].role == "argument" and stop > start + 1
        first = start + 1 if has_argument else start
        rows = sites[first:stop]
        head = rows[0]
        # names identify rows of the state or the batch
        op_or_name = (head.op,) if head.op else (head.op, head.role, head.name)
        op = intern(MatchKey.OP, head.phase, head.module, *op_or_name)
        outputs = tuple((row.role, row.output) for row in rows)
        names = tuple(row.name for row in rows)
        structure = intern(MatchKey.STRUCTURE, op, outputs, names)
        layouts_and_arguments = (
            tuple(layouts[first:stop]),
            read_arguments(view, first).canonical if head.op else None,
        )
        arguments = intern(MatchKey.ARGUMENTS, structure, layouts_and_arguments)
        bits = intern(
            MatchKey.DIGEST,
            op,
            outputs,
            layouts_and_arguments,
            tuple(digests[first:stop]),
            tuple(owners[first:stop]),
        )
        unit = _Unit(
            input_rows=range(begin, start),
            rows=range(first, stop),
            argument_row=start if has_argument else -1,
            sites=rows,
            names=names,
            owners=tuple(owners[first:stop]),
            keys=(bits, arguments, structure, op),
        )
        units.append(unit)
    return _Step(view, units)


def _bounds(sites: tuple[Site, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield each unit's first row, its first row that is not an input, and one past its last."""
    num_sites = len(sites)
    begin = start = 0  # the rows from ``begin`` to ``start`` are input rows
    while start < num_sites:
        if sites[start].role in _INPUT_ROLES:
            start += 1
            continue
        stop = _end_of_unit(sites, start)
        first = start
        if sites[start].op and begin < start:
            # generators at a step's top belong to no op; an output of a ``_foreach`` op
            # reads only its own inputs
            read = set(chain.from_iterable(site.inputs for site in sites[start:stop]))
            while first > begin and first - 1 in read:
                first -= 1
        yield from ((row, row, row + 1) for row in range(begin, first))
        yield first, start, stop
        begin = start = stop
    yield from ((row, row, row + 1) for row in range(begin, num_sites))


def _end_of_unit(sites: tuple[Site, ...], start: int) -> int:
    """Return one past the last row of the call, or the named row, at ``start``."""
    head, stop = sites[start], start + 1
    if not head.op:
        return stop
    if head.role == "argument" and stop < len(sites) and _follows(sites[stop], head, 0):
        stop += 1
    while stop < len(sites) and _follows(sites[stop], sites[stop - 1], sites[stop - 1].output + 1):
        stop += 1
    return stop


def _follows(site: Site, before: Site, output: int) -> bool:
    """Return whether a row is the output number ``output`` of the call that the
    row before it belongs to.
    """
    is_same_call = (site.phase, site.module, site.op, site.output) == (
        before.phase,
        before.module,
        before.op,
        output,
    )
    return is_same_call and site.role in _LATER_ROLES


def _match_units(reference: list[_Unit], current: list[_Unit]) -> Pairs:
    """Return matched units in order: index in the reference, index in the current step."""
    whole = Gap(range(len(reference)), range(len(current)))
    # bits agree up to the first difference, while equal bits at the end may be a coincidence
    pairs, gaps = _match_by(MatchKey.DIGEST, reference, current, [whole], suffix_first=False)
    remaining = []
    for gap in gaps:
        if _is_same_sequence(_in_range(reference, gap.reference), _in_range(current, gap.current)):
            pairs += zip(gap.reference, gap.current, strict=True)
        else:
            remaining.append(gap)
    for key in (MatchKey.ARGUMENTS, MatchKey.STRUCTURE, MatchKey.OP):
        # A gap begins where digests first differ, so of several equal ops the inserted one comes
        # first: match from the end.
        matches, remaining = _match_by(key, reference, current, remaining, suffix_first=True)
        pairs += matches
    return sorted(pairs)


def _match_by(
    key: MatchKey,
    reference: list[_Unit],
    current: list[_Unit],
    gaps: list[Gap],
    *,
    suffix_first: bool,
) -> tuple[Pairs, list[Gap]]:
    """Return the matches in gaps, and the gaps that remain between them."""
    reference_keys = [unit.keys[key] for unit in reference]
    current_keys = [unit.keys[key] for unit in current]
    pairs: Pairs = []
    remaining = []
    for gap in gaps:
        matched_ends, middle = _trim(reference_keys, current_keys, gap, suffix_first=suffix_first)
        matches = _match_blocks(reference_keys, current_keys, middle)
        pairs += matched_ends + matches
        for part in _gaps_between(matches, middle):
            matched_ends, rest = _trim(
                reference_keys, current_keys, part, suffix_first=suffix_first
            )
            pairs += matched_ends
            remaining.append(rest)
    return pairs, remaining


def _is_same_sequence(reference: Sequence[_Unit], current: Sequence[_Unit]) -> bool:
    """Return whether both have the same ops: a search by arguments would then pair
    some with their neighbours.
    """
    return len(reference) == len(current) and all(
        reference_unit.keys[MatchKey.OP] == current_unit.keys[MatchKey.OP]
        and _have_compatible_names(reference_unit.names, current_unit.names)
        for reference_unit, current_unit in zip(reference, current, strict=True)
    )


def _have_compatible_names(reference: Sequence[str | None], current: Sequence[str | None]) -> bool:
    """Return whether names may name the same tensors in order;
    a name may be unknown on one side.
    """
    if len(reference) != len(current):
        return False
    return all(None in pair or pair[0] == pair[1] for pair in zip(reference, current, strict=True))


def _join(reference: _Step, current: _Step, matches: Pairs) -> Pairs:
    """Return the aligned rows of matched units; -1 means no row."""
    partners = _pair_inputs(reference, current, matches)
    paired = set(partners.values())
    rows: Pairs = []
    reference_start = current_start = 0
    for reference_index, current_index in matches:
        rows += _unmatched_rows(
            reference.units[reference_start:reference_index],
            current.units[current_start:current_index],
            partners,
        )
        reference_unit = reference.units[reference_index]
        current_unit = current.units[current_index]
        rows += [(position, -1) for position in reference_unit.input_rows if position not in paired]
        rows += [(partners.get(position, -1), position) for position in current_unit.input_rows]
        rows += _pair_outputs(reference.view, reference_unit, current.view, current_unit)
        reference_start, current_start = reference_index + 1, current_index + 1
    return rows + _unmatched_rows(
        reference.units[reference_start:], current.units[current_start:], partners
    )


def _unmatched_rows(
    reference: Sequence[_Unit], current: Sequence[_Unit], partners: dict[int, int]
) -> Pairs:
    """Return the rows of units without a match; of their input rows, only those with a partner."""
    rows: Pairs = [(position, -1) for unit in reference for position in unit.rows]
    for unit in current:
        rows += [
            (partners[position], position) for position in unit.input_rows if position in partners
        ]
        rows += [(-1, position) for position in unit.rows]
    return rows


def _pair_inputs(reference: _Step, current: _Step, matches: Pairs) -> dict[int, int]:
    """Return the reference's input row for each input row of the current step that has one.

    An inserted op gets the rows of tensors that it reads first,
    so rows outside matched calls are paired by key.
    """
    partners = _pair_inputs_of_calls(reference, current, matches)
    return partners | _pair_inputs_by_key(reference, current, partners)


def _pair_inputs_of_calls(reference: _Step, current: _Step, matches: Pairs) -> dict[int, int]:
    """Return the reference's input row for each input row of matched calls
    that read the same in order.
    """
    partners: dict[int, int] = {}
    for reference_index, current_index in matches:
        reference_rows = reference.units[reference_index].input_rows
        current_rows = current.units[current_index].input_rows
        reference_sites = _in_range(reference.view.program.sites, reference_rows)
        current_sites = _in_range(current.view.program.sites, current_rows)
        has_same_roles = [site.role for site in reference_sites] == [
            site.role for site in current_sites
        ]
        if has_same_roles and _have_compatible_names(
            [site.name for site in reference_sites], [site.name for site in current_sites]
        ):
            partners.update(zip(current_rows, reference_rows, strict=True))
    return partners


def _pair_inputs_by_key(
    reference: _Step, current: _Step, partners: dict[int, int]
) -> dict[int, int]:
    """Return the reference's input row for each of the current step that is not in
    ``partners``, if keys match.
    """
    paired = {*partners.values()}
    reference_rows = [
        position
        for unit in reference.units
        for position in unit.input_rows
        if position not in paired
    ]
    current_rows = [
        position
        for unit in current.units
        for position in unit.input_rows
        if position not in partners
    ]
    pairs = _pair_by_key(
        [(_input_key(reference.view, position), position) for position in reference_rows],
        [(_input_key(current.view, position), position) for position in current_rows],
    )
    return {
        current_row: reference_row for reference_row, current_row in pairs if reference_row >= 0
    }


def _input_key(view: StepView, position: int) -> tuple[Hashable, ...]:
    """Return the key that input rows of one tensor share: its name, or else its layout and bits."""
    site = view.program.sites[position]
    if site.role in ("input", "graph_output") and site.name:
        return site.role, site.name
    return site.role, site.name, view.layout.entries[position], int(view.record.digests[position])


def _pair_by_key(
    reference: Sequence[tuple[Hashable, int]], current: Sequence[tuple[Hashable, int]]
) -> Pairs:
    """Return each current position with the first unused reference position
    of the same key, else -1.
    """
    unused: defaultdict[Hashable, list[int]] = defaultdict(list)
    for key, position in reversed(reference):
        unused[key].append(position)
    return [(unused[key].pop() if unused[key] else -1, position) for key, position in current]


def _pair_outputs(
    reference_view: StepView, reference_unit: _Unit, current_view: StepView, current_unit: _Unit
) -> Pairs:
    rows: Pairs = []
    if reference_unit.argument_row >= 0 and current_unit.argument_row >= 0:
        rows.append((reference_unit.argument_row, current_unit.argument_row))
    is_reordered = _is_permutation(reference_unit.owners, current_unit.owners)
    if _have_compatible_names(reference_unit.names, current_unit.names) and not is_reordered:
        return rows + list(zip(reference_unit.rows, current_unit.rows, strict=True))

    def with_keys(view: StepView, unit: _Unit) -> list[tuple[Hashable, int]]:
        sites = _in_range(view.program.sites, unit.rows)
        keys = [
            (site.role, owner if is_reordered else site.name or site.output)
            for site, owner in zip(sites, unit.owners, strict=True)
        ]
        return list(zip(keys, unit.rows, strict=True))

    pairs = _pair_by_key(
        with_keys(reference_view, reference_unit), with_keys(current_view, current_unit)
    )
    paired = {reference_row for reference_row, _ in pairs}
    return [
        *rows,
        *((position, -1) for position in reference_unit.rows if position not in paired),
        *pairs,
    ]


def _is_permutation(reference: Sequence[Owners], current: Sequence[Owners]) -> bool:
    """Return whether the outputs of an op on lists are each for one parameter, and for the same
    parameters in a different order.
    """
    is_each_for_one = all(len(owners) == 1 for owners in current)
    return is_each_for_one and reference != current and {*reference} == {*current}


def _trim(
    reference_keys: Sequence[int], current_keys: Sequence[int], gap: Gap, *, suffix_first: bool
) -> tuple[Pairs, Gap]:
    """Return the matches in the common prefix and suffix of a gap, and the gap between them.

    ``suffix_first`` puts an insertion as early as possible.
    """
    reference_start, reference_stop = gap.reference.start, gap.reference.stop
    current_start, current_stop = gap.current.start, gap.current.stop
    pairs: Pairs = []
    for is_suffix in (suffix_first, not suffix_first):
        while reference_start < reference_stop and current_start < current_stop:
            pair = (
                (reference_stop - 1, current_stop - 1)
                if is_suffix
                else (reference_start, current_start)
            )
            if reference_keys[pair[0]] != current_keys[pair[1]]:
                break
            pairs.append(pair)
            if is_suffix:
                reference_stop, current_stop = pair
            else:
                reference_start, current_start = reference_start + 1, current_start + 1
    return pairs, Gap(range(reference_start, reference_stop), range(current_start, current_stop))


def _match_blocks(reference_keys: Sequence[int], current_keys: Sequence[int], gap: Gap) -> Pairs:
    """Match the longest common blocks of a gap.

    In a large gap, keys match by their n-th occurrence from its end, as far as their order agrees.
    """
    if len(gap.reference) * len(gap.current) > MAX_CELLS:
        reference_positions = _positions_by_occurrence(reference_keys, gap.reference)
        current_positions = _positions_by_occurrence(current_keys, gap.current)
        common = [
            (position, current_positions[key])
            for key, position in reference_positions.items()
            if key in current_positions
        ]
        return _longest_ascending(common[::-1])  # ``common`` begins with the last positions
    # backwards, because the search puts insertions as late as possible
    reference_backwards, current_backwards = gap.reference[::-1], gap.current[::-1]
    matcher = SequenceMatcher(
        None,
        [reference_keys[index] for index in reference_backwards],
        [current_keys[index] for index in current_backwards],
        autojunk=False,
    )
    pairs: Pairs = []
    for block in matcher.get_matching_blocks():
        reference_block = reference_backwards[block.a : block.a + block.size]
        current_block = current_backwards[block.b : block.b + block.size]
        pairs += zip(reference_block, current_block, strict=True)
    return pairs[::-1]


def _positions_by_occurrence(keys: Sequence[int], positions: range) -> dict[tuple[int, int], int]:
    """Return positions by key and the number of its later occurrences among them,
    the last position first.
    """
    seen: Counter[int] = Counter()
    by_occurrence = {}
    for position in reversed(positions):
        key = keys[position]
        by_occurrence[key, seen[key]] = position
        seen[key] += 1
    return by_occurrence


def _gaps_between(pairs: Pairs, gap: Gap) -> list[Gap]:
    """Return the gaps around the matches of a gap that have units on both sides."""
    reference_start, current_start = gap.reference.start, gap.current.start
    gaps = []
    for reference_next, current_next in (*pairs, (gap.reference.stop, gap.current.stop)):
        if reference_start < reference_next and current_start < current_next:
            gaps.append(
                Gap(range(reference_start, reference_next), range(current_start, current_next))
            )
        reference_start, current_start = reference_next + 1, current_next + 1
    return gaps


def _in_range(items: Sequence[_Item], positions: range) -> Sequence[_Item]:
    return items[positions.start : positions.stop]


def _longest_ascending(candidates: Pairs) -> Pairs:
    """Return the longest subsequence of pairs that ascends in both steps;
    the candidates ascend in the reference.
    """
    # patience sorting; of each length, the subsequence whose last position in the
    # current step is the smallest
    ends: list[int] = []  # that position
    chains: list[tuple[Any, ...]] = []  # (its last pair, the subsequence before that pair)
    for pair in candidates:
        length = bisect_left(ends, pair[1])
        # the pair is a better end for this length, or begins the next length
        ends[length : length + 1] = [pair[1]]
        chains[length : length + 1] = [(pair, chains[length - 1] if length else ())]
    longest: Pairs = []
    rest = chains[-1] if chains else ()
    while rest:
        pair, rest = rest
        longest.append(pair)
    return longest[::-1]
