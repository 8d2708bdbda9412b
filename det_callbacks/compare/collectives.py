"""Which rank started a difference, and which only received it: told by the collectives of each rank's differing step.

A rank alone cannot know where a difference comes from that a collective delivered while its own part agrees. All ranks
together can: the k-th call of a collective in a group is the same call on all of them.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from det_callbacks.compare.differences import SiteDifferences
from det_callbacks.runs.program import IN_FLIGHT, Site, StepView

Side = Literal["origin", "receiver", "unknown", "equal"]
Begins = Literal["local", "external", "ambiguous", "received"]
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
        source: lines of the user's code, innermost first.
    """

    op: str
    group: str
    number: int
    input_differs: bool
    output_differs: bool
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
            "local": a batch, a generator, an op whose inputs and arguments agree: nobody else had a part in it.
            "external": it was there when the step read it (a weight, a tensor made between the steps, an argument); at
            the run's first difference that is the rank's own, and later it may follow from what another rank did.
            "ambiguous": nobody recorded who wrote it, such as a gradient at a level below "op".
            "received": a collective delivered all that differs.
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
        >>> zero = RankDifference(rank=0, segment=0, step=3, begins="received", calls=(got,))
        >>> one = RankDifference(rank=1, segment=0, step=3, begins="local", calls=(sent,))
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
    if known.begins == "local" or (known.begins == "external" and is_early):
        return "origin"
    if known.begins == "received":
        return "receiver"
    if known.begins == "external":
        return "unknown"
    if not is_early or any(other.begins in ("local", "external") for other in earliest):
        return "receiver"
    # nobody else can have started it, or several may have
    return "origin" if sum(other.begins == "ambiguous" for other in earliest) == 1 else "unknown"


def call_key(op: str, group: str, number: int) -> CallKey:
    """Return what tells a call from the others on all ranks; messages of a group are not told from each other."""
    return ("", group, 0) if op.partition(".")[2].startswith(_POINT_TO_POINT) else (op, group, number)


def describe_rank(found: SiteDifferences) -> tuple[list[tuple[CallKey, int]], RankDifference]:
    """Return what collectives delivered with nothing differing before it here, and what the other ranks have to know.

    Args:
        found: how the first step of a rank differs that does.

    Returns:
        Rows that a collective delivered, with its call; and what is to be known of the rank.
    """
    current = found.current
    keys = {position: call_key(site.op, group, number) for position, site, group, number in _calls_in(current)}
    delivered: list[tuple[CallKey, int]] = []
    begins: set[Begins] = set()
    for row in found.beginnings:
        if found.site(row).role == "delivered" and not _is_in_flight(found, row):
            position = found.places(row)[1]
            delivered.extend((keys[call], row) for call in _calls_of(current, position)[:1])
            begins.add("received")
            continue
        # Python may pass it on, and what a collective delivered: by skipping an op, or calling it otherwise
        has_received = "received" in begins
        is_passed_on = has_received or found.site(row).role == "value" or found.is_after_readable(row)
        begun = _begun(found, row, is_passed_on=is_passed_on)
        if begun != "ambiguous" or not has_received:
            begins.add(begun)
    surest: tuple[Begins, ...] = ("local", "external", "ambiguous")
    return delivered, RankDifference(
        rank=current.rank,
        segment=current.record.segment,
        step=current.record.step,
        begins=next((begun for begun in surest if begun in begins), "received"),
        calls=_differing_calls(found),
    )


def _begun(found: SiteDifferences, row: int, *, is_passed_on: bool) -> Begins:
    """Return how sure it is that a difference which nothing recorded led to is this rank's own."""
    site = found.site(row)
    if found.is_source(row):
        if site.phase in ("data", "rng"):
            return "local"
        # of a bucket of gradients, or of gathered parameters, nobody knows who wrote it
        is_exchanged = (site.name is None and site.module == "?") or (site.name or "").startswith("grad of ")
        return "ambiguous" if is_exchanged or is_passed_on else "external"
    if site.op and found.kinds[row] in ("argument", "missing", "extra"):
        return "ambiguous" if is_passed_on else "external"
    return "local" if found.is_origin(row) else "ambiguous"


def _differing_calls(found: SiteDifferences) -> tuple[CollectiveCall, ...]:
    """Return the collectives of a step that differ on this rank; one that only the reference has comes last."""
    current, inputs, outputs = found.current, set[int](), set[int]()
    if not any((view.program.roles == "sent").any() for view in (found.reference, current)):
        return ()
    missing: list[Site] = []
    for row in found.kinds:
        site, position = found.site(row), found.places(row)[1]
        if position < 0:
            missing += [site] if site.role == "sent" and site.output == 0 else []
        elif site.role == "sent":
            inputs.add(position - site.output)
        elif site.role == "delivered" and not _is_in_flight(found, row):
            outputs.update(_calls_of(current, position))
    calls = [
        CollectiveCall(
            op=site.op,
            group=group,
            number=number,
            input_differs=position in inputs,
            output_differs=position in outputs,
            source=site.source,
        )
        for position, site, group, number in _calls_in(current)
        if position in inputs or position in outputs
    ]
    calls += [
        CollectiveCall(
            op=site.op, group=_group_of(site), number=-1, input_differs=True, output_differs=False, source=site.source
        )
        for site in missing
    ]
    return tuple(calls)


def _calls_in(view: StepView) -> Iterator[tuple[int, Site, str, int]]:
    """Yield position, first site, group and number of each collective of a step."""
    counts: Counter[tuple[str, str]] = Counter()
    for position in (view.program.roles == "sent").nonzero()[0].tolist():
        site = view.program.sites[position]
        if site.output == 0:
            group = _group_of(site)
            yield position, site, group, counts[site.op, group]
            counts[site.op, group] += 1


def _is_in_flight(found: SiteDifferences, row: int) -> bool:
    """Return whether a site had not arrived from its collective yet when it was read, in one of the two steps."""
    views = zip((found.reference, found.current), found.places(row), strict=True)
    entries = [view.layout.entries[position] for view, position in views if position >= 0]
    return any(entry is not None and entry.detail == IN_FLIGHT for entry in entries)


def _calls_of(view: StepView, position: int) -> list[int]:
    """Return where the calls are that delivered what a site holds; none of a site that is not there."""
    inputs = view.program.sites[position].inputs if position >= 0 else ()
    read = ((place, view.program.sites[place]) for place in inputs)
    return [place - site.output for place, site in read if site.role == "sent"]


def _moment(known: RankDifference) -> tuple[int, int]:
    return known.segment, known.step


def _delivered(known: RankDifference) -> Iterator[CollectiveCall]:
    """Yield the calls that brought a difference to a rank whose own part agrees."""
    return (call for call in known.calls if call.output_differs and not call.input_differs)


def _group_of(site: Site) -> str:
    return str(json.loads(site.arguments).get("group", ""))
