"""Which rank started a difference, and which only received it: told by the collectives of each rank's differing step.

A rank alone cannot know where a difference comes from that a collective delivered while its own part agrees. All ranks
together can: the k-th call of a collective in a group is the same call on all of them.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from det_callbacks.compare.align import Alignment
from det_callbacks.runs.program import IN_FLIGHT, Site, StepView
from det_callbacks.runs.values import itemsize

Side = Literal["origin", "receiver", "unknown", "equal"]
Begins = Literal["own", "outside", "open", "none"]
CallKey = tuple[str, str, int]
_POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_p2p")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """A call of a collective that differs on one rank.

    Attributes:
        op: ``namespace.op.overload``.
        group: ranks, as "0-3".
        number: how many calls of the same op in the same group came before it in the step.
        input_differs: what this rank put in is not what it put in in the reference, or it was called otherwise.
        output_differs: what came out here differs.
        num_bytes: that this rank put in, or got where it put in nothing.
        source: lines of the user's code, innermost first.
    """

    op: str
    group: str
    number: int
    input_differs: bool
    output_differs: bool
    num_bytes: int = 0
    source: tuple[str, ...] = ()

    @property
    def key(self) -> CallKey:
        """What the call has in common on all ranks; the two ends of a message are calls of two ops."""
        return call_key(self.op, self.group, self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDifference:
    """What the others have to know of a rank's first differing step.

    Attributes:
        rank: process.
        segment: fit of the run.
        step: first training batch that differs.
        begins: the surest of what differs there though nothing that was read differs, and no collective delivered it.
            "own": a batch, a generator, an op whose inputs and arguments agree: nobody else had a part in it.
            "outside": it was there when the step read it (a weight, a tensor made between the steps, an argument); at
            the run's first difference that is the rank's own, and later it may follow from what another rank did.
            "open": nobody recorded who wrote it, such as a gradient at a level below "op".
            "none": a collective delivered all that differs.
        calls: the collectives that differ, in the order of the step.
    """

    rank: int
    segment: int
    step: int
    begins: Begins
    calls: tuple[CollectiveCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification:
    """Who started a difference.

    Attributes:
        sides: by rank: "origin" (it computed, or was given, something else), "receiver" (its own part agrees, the
            difference came from the other ranks), "unknown" (it may have been either) or "equal".
        collective: the first call whose inputs agree on all ranks while its output differs: it is an origin itself.
        through: the first call that brought the difference to a receiver.
        since: by rank, segment and step of its first difference; None where nothing differs.
    """

    sides: tuple[Side, ...]
    collective: CollectiveCall | None = None
    through: CollectiveCall | None = None
    since: tuple[tuple[int, int] | None, ...] = ()

    @property
    def origins(self) -> tuple[int, ...]:
        """The ranks that started a difference; none where a collective did."""
        return tuple(rank for rank, side in enumerate(self.sides) if side == "origin")

    @property
    def receivers(self) -> tuple[int, ...]:
        """The ranks that were brought a difference."""
        return tuple(rank for rank, side in enumerate(self.sides) if side == "receiver")

    @property
    def unknown(self) -> tuple[int, ...]:
        """The ranks of which it cannot be told."""
        return tuple(rank for rank, side in enumerate(self.sides) if side == "unknown")

    @property
    def is_collective(self) -> bool:
        """Whether a collective started it, and no rank can have."""
        return self.collective is not None and not self.origins and not self.unknown


def classify(per_rank: Sequence[RankDifference | None]) -> Classification:
    """Return which ranks started a difference and which received it.

    Args:
        per_rank: of each rank of the run, by rank, its first differing step; None where nothing differs on it. No rank
            may be left out: what is not known of one would count as agreeing.

    Raises:
        ValueError: an entry is of another rank than its place says.

    Example:
        >>> sent = CollectiveCall(
        ...     op="c10d.allreduce_.default", group="0-1", number=0, input_differs=True, output_differs=True
        ... )
        >>> got = CollectiveCall(
        ...     op="c10d.allreduce_.default", group="0-1", number=0, input_differs=False, output_differs=True
        ... )
        >>> zero = RankDifference(rank=0, segment=0, step=3, begins="none", calls=(got,))
        >>> one = RankDifference(rank=1, segment=0, step=3, begins="own", calls=(sent,))
        >>> classify([zero, one]).sides
        ('receiver', 'origin')
    """
    for place, known in enumerate(per_rank):
        if known is not None and known.rank != place:
            raise ValueError(f"The entry of rank {place} is of rank {known.rank}: entries are ordered by rank.")
    differing = [known for known in per_rank if known is not None]
    first = min(map(_moment, differing), default=None)
    earliest = [known for known in differing if _moment(known) == first]
    changed = {call.key for known in earliest for call in known.calls if call.input_differs}
    sides = tuple("equal" if known is None else _side(known, earliest) for known in per_rank)
    calls = [(known, call) for known in differing for call in _delivered(known)]
    # what went in on all ranks is known of the first step that differs only
    at_once = [(known, call) for known, call in calls if _moment(known) == first]
    handed_on = [call for known, call in calls if _moment(known) != first or call.key in changed]
    return Classification(
        sides=sides,
        collective=next((call for _, call in at_once if call.key not in changed), None),
        through=next(iter(handed_on), None),
        since=tuple(None if known is None else _moment(known) for known in per_rank),
    )


def _side(known: RankDifference, earliest: Sequence[RankDifference]) -> Side:
    """Return who a rank that differs is, among the ranks that differ at the run's first differing step."""
    is_early = any(known is other for other in earliest)
    if known.begins == "own" or (known.begins == "outside" and is_early):
        return "origin"
    if known.begins == "none":
        return "receiver"
    if known.begins == "outside":
        return "unknown"
    if not is_early or any(other.begins in ("own", "outside") for other in earliest):
        return "receiver"
    # nobody else can have started it, or several may have
    return "origin" if sum(other.begins == "open" for other in earliest) == 1 else "unknown"


def call_key(op: str, group: str, number: int) -> CallKey:
    """Return what tells a call from the others on all ranks; messages of a group are not told from each other."""
    return ("", group, 0) if op.partition(".")[2].startswith(_POINT_TO_POINT) else (op, group, number)


def differing_calls(
    reference: StepView, current: StepView, alignment: Alignment, rows: Iterable[int]
) -> tuple[CollectiveCall, ...]:
    """Return the collectives of a step that differ on this rank.

    Args:
        reference: the step in the reference.
        current: the same step of the current run.
        alignment: which of their sites belong together.
        rows: of the alignment, that differ.
    """
    inputs: set[int] = set()
    outputs: set[int] = set()
    missing: list[Site] = []
    for row in rows:
        position = int(alignment.current[row])
        site = current.program.sites[position] if position >= 0 else None
        if site is None:
            left = reference.program.sites[int(alignment.reference[row])]
            if left.role == "sent" and left.output == 0:
                missing.append(left)
        elif site.role == "sent":
            inputs.add(position - site.output)
        elif site.role == "delivered" and not is_in_flight(reference, current, int(alignment.reference[row]), position):
            outputs.update(calls_of(current, position))
    found = [
        CollectiveCall(
            op=site.op,
            group=group,
            number=number,
            input_differs=position in inputs,
            output_differs=position in outputs,
            num_bytes=_num_bytes(current, position),
            source=site.source,
        )
        for position, site, group, number in calls_in(current.program.sites)
        if position in inputs or position in outputs
    ]
    found.extend(
        CollectiveCall(
            op=site.op, group=_group_of(site), number=-1, input_differs=True, output_differs=False, source=site.source
        )
        for site in missing
    )
    return tuple(found)


def calls_in(sites: Sequence[Site]) -> Iterator[tuple[int, Site, str, int]]:
    """Yield position, first site, group and number of each collective of a step."""
    counts: Counter[tuple[str, str]] = Counter()
    for position, site in enumerate(sites):
        if site.role == "sent" and site.output == 0:
            group = _group_of(site)
            yield position, site, group, counts[site.op, group]
            counts[site.op, group] += 1


def is_in_flight(reference: StepView, current: StepView, left: int, right: int) -> bool:
    """Return whether a site had not arrived from its collective yet when it was read, in one of two steps."""
    entries = [
        view.layout.entries[position] for view, position in ((reference, left), (current, right)) if position >= 0
    ]
    return any(entry is not None and entry.detail == IN_FLIGHT for entry in entries)


def _moment(known: RankDifference) -> tuple[int, int]:
    return known.segment, known.step


def _delivered(known: RankDifference) -> Iterator[CollectiveCall]:
    """Yield the calls that brought a difference to a rank whose own part agrees."""
    return (call for call in known.calls if call.output_differs and not call.input_differs)


def calls_of(view: StepView, position: int) -> Iterator[int]:
    """Yield where the calls are that delivered what a site holds."""
    for place in view.program.sites[position].inputs:
        site = view.program.sites[place]
        if site.role == "sent":
            yield place - site.output


def _group_of(site: Site) -> str:
    return str(json.loads(site.arguments).get("group", ""))


def _num_bytes(view: StepView, position: int) -> int:
    """Return how many bytes a call put in, or what was read of what it delivered where it put in nothing."""
    sites, entries = view.program.sites, view.layout.entries
    places = [position]
    while places[-1] + 1 < len(sites) and _is_next_of(sites[places[-1] + 1], sites[places[-1]]):
        places.append(places[-1] + 1)
    if entries[position] is None:
        places = [at for at, site in enumerate(sites) if site.role == "delivered" and position in site.inputs]
    total = 0
    for place in places:
        entry = entries[place]
        size = None if entry is None else itemsize(entry.dtype)
        if entry is not None and size is not None:
            total += math.prod(entry.shape) * size
    return total


def _is_next_of(site: Site, before: Site) -> bool:
    return site.role == "sent" and site.op == before.op and site.output == before.output + 1
