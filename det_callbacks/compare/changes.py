"""Which aligned sites of two steps differ, and in what."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from det_callbacks.compare.align import Alignment
from det_callbacks.compare.units import ArgumentDifference, ArgumentReader, differing_arguments
from det_callbacks.runs.program import Site, StepView
from det_callbacks.verdict import Kind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Changes:
    """What differs between two steps.

    Attributes:
        kinds: row of the alignment -> kind of the difference, ascending.
        differs: bool by row: other bits, another layout, or only one side has it. Rows of arguments never do.
        arguments: row -> how the arguments of its op differ; it may be a row whose bits agree.
        num_compared: rows that both sides have.
    """

    kinds: Mapping[int, Kind]
    differs: np.ndarray
    arguments: Mapping[int, ArgumentDifference]
    num_compared: int


def find_changes(reference: StepView, current: StepView, alignment: Alignment) -> Changes:
    """Return what differs between two aligned steps."""
    lefts, rights = alignment.reference, alignment.current
    both = (lefts >= 0) & (rights >= 0)
    other_bits = np.zeros(len(alignment), dtype=bool)
    other_bits[both] = reference.record.digests[lefts[both]] != current.record.digests[rights[both]]
    other_layout = _other_layout(reference, current, alignment)
    differs = other_bits | other_layout | ~both
    sites = current.program.sites
    argument_rows = [row for row in np.flatnonzero(differs & both).tolist() if sites[rights[row]].role == "argument"]
    differs[argument_rows] = False
    candidates = (
        _rows_with_arguments(sites, argument_rows)
        if alignment.is_same_program
        else _rows_to_examine(reference, current, alignment)
    )
    arguments = _other_arguments(reference, current, alignment, candidates, differs)
    kinds: dict[int, Kind] = {}
    for row in sorted({*np.flatnonzero(differs).tolist(), *arguments}):
        known = arguments.get(row)
        if lefts[row] < 0:
            kinds[row] = "extra"
        elif rights[row] < 0:
            kinds[row] = "missing"
        elif known is not None and known.is_known:
            kinds[row] = "argument"
        elif other_layout[row]:
            kinds[row] = "structure"
        elif other_bits[row]:
            kinds[row] = "content"
    return Changes(kinds=kinds, differs=differs, arguments=arguments, num_compared=int(both.sum()))


def _other_layout(reference: StepView, current: StepView, alignment: Alignment) -> np.ndarray:
    if alignment.is_same_program and reference.record.layout_id == current.record.layout_id:
        return np.zeros(len(alignment), dtype=bool)
    ours, theirs = reference.layout.entries, current.layout.entries
    pairs = zip(alignment.reference.tolist(), alignment.current.tolist(), strict=True)
    return np.fromiter(
        (left >= 0 and right >= 0 and ours[left] != theirs[right] for left, right in pairs),
        dtype=bool,
        count=len(alignment),
    )


def _rows_with_arguments(sites: Sequence[Site], argument_rows: list[int]) -> Iterator[int]:
    """Yield the output rows of the calls whose row of varying arguments differs, in one and the same program."""
    for row in argument_rows:
        place = row + 1
        while place < len(sites) and _is_output(sites[place], sites[row], place - row - 1):
            yield place
            place += 1
        if place == row + 1:
            yield row


def _rows_to_examine(reference: StepView, current: StepView, alignment: Alignment) -> Iterator[int]:
    """Yield the rows of calls that may have had other arguments."""
    ours, theirs = reference.program.sites, current.program.sites
    pairs = zip(alignment.reference.tolist(), alignment.current.tolist(), strict=True)
    for row, (left, right) in enumerate(pairs):
        if left < 0 or right < 0 or not theirs[right].op:
            continue
        one, other = ours[left], theirs[right]
        if one.role == "argument" and has_outputs(theirs, right):
            continue
        if one.varying or other.varying or one.arguments != other.arguments:
            yield row


def has_outputs(sites: Sequence[Site], position: int) -> bool:
    """Return whether the call whose row of varying arguments lies here has outputs."""
    return position + 1 < len(sites) and _is_output(sites[position + 1], sites[position], 0)


def _is_output(site: Site, argument: Site, output: int) -> bool:
    return site.op == argument.op and site.role in ("output", "value") and site.output == output


def _other_arguments(
    reference: StepView, current: StepView, alignment: Alignment, candidates: Iterable[int], differs: np.ndarray
) -> dict[int, ArgumentDifference]:
    """Return the rows whose op was called with other arguments: the first of each call, and the others that differ."""
    readers = ArgumentReader(reference), ArgumentReader(current)
    by_call: dict[int, ArgumentDifference | None] = {}
    found: dict[int, ArgumentDifference] = {}
    for row in candidates:
        left, right = int(alignment.reference[row]), int(alignment.current[row])
        call = right - current.program.sites[right].output
        is_first = call not in by_call
        if is_first:
            by_call[call] = differing_arguments(readers[0].read(left), readers[1].read(right))
        difference = by_call[call]
        if difference is not None and (is_first or differs[row]):
            found[row] = difference
    return found
