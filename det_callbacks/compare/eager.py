"""Outputs of compiled code and the op of eager code that makes the same tensor."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from det_callbacks.runs.program import Site, StepView
from det_callbacks.runs.source_text import first_line

_Op = tuple[str, str, str]  # phase, op and line


class EagerPair(NamedTuple):
    """Positions, in the reference and in the current step, of a tensor that one of them made in
    compiled code: that of side ``compiled``.
    """

    positions: tuple[int, int]
    compiled: int


def eager_pairs(views: Sequence[StepView], paired: Sequence[set[int]]) -> list[EagerPair]:
    """Return the pairs of a compiled and an eager step, of tensors without a partner so far.

    Both steps call an op in a line equally often, or its calls are not paired. A call with several
    outputs is paired by their shapes, if only one of them has the shape.
    """
    pairs = []
    for side in (0, 1):
        eager = 1 - side
        calls = _calls_of(views[eager])
        for position, place, number, num_calls in _compiled(views[side]):
            eager_calls = calls.get(place, [])
            if position in paired[side] or len(eager_calls) != num_calls:
                continue
            entries = views[eager].layout.entries
            shape = _shape(views[side], position)
            same = [
                at
                for at in eager_calls[number]
                if _shape(views[eager], at) == shape and entries[at]
            ]
            if len(same) == 1 and same[0] not in paired[eager]:
                ordered = (position, same[0]) if side == 0 else (same[0], position)
                pairs.append(EagerPair(ordered, side))
    return pairs


def _shape(view: StepView, position: int) -> tuple[int, ...] | None:
    entry = view.layout.entries[position]
    return None if entry is None else entry.shape


def _calls_of(view: StepView) -> dict[_Op, list[list[int]]]:
    """Return the positions of the outputs of each call of an op in a line."""
    calls: dict[_Op, list[list[int]]] = defaultdict(list)
    last: dict[_Op, int] = {}
    for position, site in enumerate(view.program.sites):
        if site.role != "output" or not site.op or site.recomputed:
            continue
        place = site.phase, site.op, first_line(site.source)
        if site.output <= last.get(place, site.output):
            calls[place].append([])
        calls[place][-1].append(position)
        last[place] = site.output
    return calls


def _compiled(view: StepView) -> Iterator[tuple[int, _Op, int, int]]:
    """Yield the position, the op of eager code, the number of its call in the step, and of all its
    calls, for each output of compiled code whose op is known.
    """
    sites = view.program.sites
    regions: list[list[tuple[int, Site, _Op]]] = []
    line = ""
    for position, site in enumerate(sites):
        if site.role == "graph":
            regions.append([])
            line = first_line(site.source)
        elif site.eager_op and regions:
            place = site.phase, site.eager_op, site.eager_line or line
            regions[-1].append((position, site, place))
    num_before: dict[_Op, int] = defaultdict(int)
    numbered = []
    for region in regions:
        numbered += [(at, place, num_before[place] + site.eager_call) for at, site, place in region]
        for place, num_calls in {place: site.eager_calls for _, site, place in region}.items():
            num_before[place] += num_calls
    for at, place, number in numbered:
        yield at, place, number, num_before[place]
