"""Which rank started a difference and which received it, by the collectives of the differing steps."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from det_callbacks.compare.differences import MAX_DESCRIBED, StepDifference
from det_callbacks.runs.program import Site, StepView
from det_callbacks.verdict import Divergence

Side = Literal["origin", "receiver", "unknown", "equal"]
Begins = Literal["local", "external", "ambiguous", "received"]
CallKey = tuple[str, str, int]
Order = tuple[int, int, int, int]
"""Segment, step, position in the step, rank; sorted ascending."""

_POINT_TO_POINT = ("send", "recv", "isend", "irecv")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """A collective in a step: the k-th call of an op in a group is the same call on all its ranks."""

    op: str
    group: str  # such as "0-3"
    number: int  # of earlier calls in the group; -1 if only the reference has it
    source: tuple[str, ...] = field(default=(), compare=False)

    @property
    def key(self) -> CallKey:
        """Equal for one call on all ranks; messages of a group share a key, because their ends are different ops."""
        is_message = self.op.partition(".")[2].startswith(_POINT_TO_POINT)
        return ("", self.group, 0) if is_message else (self.op, self.group, self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification:
    """Who started a difference, by rank; an "unknown" rank may have started or received it."""

    sides: tuple[Side, ...]
    collective: CollectiveCall | None = None  # the first with equal inputs on all ranks and a different output
    through: CollectiveCall | None = None  # the first that brought the difference to a receiver
    since: tuple[tuple[int, int] | None, ...] = ()  # segment and step of each rank's first difference

    def ranks(self, side: Side) -> tuple[int, ...]:
        return tuple(rank for rank, known in enumerate(self.sides) if known == side)

    @property
    def is_collective(self) -> bool:
        """Whether a collective started it, and no rank did."""
        return self.collective is not None and not {"origin", "unknown"} & {*self.sides}


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """The first difference of a rank, and the evidence of who started it.

    It ``begins`` "local" (an op whose inputs match: no other rank can have caused it), "external" (a
    weight: the rank's at the run's first difference, later perhaps from another rank),
    "ambiguous" (its writer was not recorded) or "received" (a collective delivered it).
    """

    order: Order
    first: Divergence
    origins: tuple[Divergence, ...] = ()  # origins of the step that this rank sees by itself
    begins: Begins
    changed: frozenset[CallKey] = frozenset()  # calls with different inputs or arguments on this rank
    received: tuple[tuple[CollectiveCall, Divergence], ...] = ()  # outputs of other calls on this rank

    @property
    def moment(self) -> tuple[int, int]:
        """Segment and step."""
        return self.order[:2]

    def with_origin_from(self, ranks: Classification | None) -> Divergence:
        """Return the divergence with its origin, as known from all ranks together."""
        if ranks is None:
            return self.first
        side, is_origin = ranks.sides[self.order[-1]], self.first.is_origin
        if ranks.is_collective:
            is_origin = replace(self.first, numbers=None) in self._delivered_by(ranks)
        elif side == "receiver":
            is_origin = False
        return replace(self.first, is_origin=None if side == "unknown" and is_origin else is_origin)

    def origins_among(self, ranks: Classification | None) -> list[Divergence]:
        """Return the origins of the step, without those that the rank received."""
        if ranks is None:
            return [*self.origins]
        own = self.origins if ranks.sides[self.order[-1]] == "origin" else ()
        return [*(replace(one, is_origin=True) for one in self._delivered_by(ranks)), *own]

    def _delivered_by(self, ranks: Classification) -> list[Divergence]:
        """Return the outputs of the collective that are origins."""
        key = None if ranks.collective is None else ranks.collective.key
        return [divergence for call, divergence in self.received if call.key == key]


def classify(per_rank: Sequence[FirstDifference | None]) -> Classification:
    """Return which ranks started a difference and which received it, from each rank's first difference."""
    differing = [known for known in per_rank if known is not None]
    first = min((known.moment for known in differing), default=None)
    earliest = [known for known in differing if known.moment == first]
    changed = frozenset().union(*(known.changed for known in earliest))
    received = [(known, call) for known in differing for call, _ in known.received]
    # the inputs of all ranks are known only in the first step that differs
    by_itself = (call for known, call in received if known.moment == first and call.key not in changed)
    handed_on = (call for known, call in received if known.moment != first or call.key in changed)
    return Classification(
        sides=tuple("equal" if known is None else _side(known, earliest) for known in per_rank),
        collective=next(by_itself, None),
        through=next(handed_on, None),
        since=tuple(None if known is None else known.moment for known in per_rank),
    )


def _side(known: FirstDifference, earliest: Sequence[FirstDifference]) -> Side:
    is_early = known.moment == earliest[0].moment
    if known.begins == "local" or (known.begins == "external" and is_early):
        return "origin"
    if known.begins == "external":
        return "unknown"
    begun = Counter(other.begins for other in earliest)
    if known.begins == "received" or not is_early or begun["local"] or begun["external"]:
        return "receiver"
    # no other rank, or one of several, can have started it
    return "origin" if begun["ambiguous"] == 1 else "unknown"


def describe_first(difference: StepDifference, before: str = "", *, is_unrestored: bool = False) -> FirstDifference:
    """Return the first difference of a step; ``before`` comes from ``RankWalk.before``."""
    calls = _calls_in(difference.current)
    changed = _changed_calls(difference, calls)
    received: list[tuple[CollectiveCall, Divergence]] = []
    for row in difference.starting("collective"):
        position, sites = difference.pairs[row][1], difference.current.program.sites
        read = sites[position].inputs if position >= 0 else ()
        sent = [place - sites[place].output for place in read if sites[place].role == "sent"]
        if sent and calls[sent[0]].key not in changed and len(received) < MAX_DESCRIBED:
            received.append((calls[sent[0]], difference.describe(row)))
    first = next(iter(difference.kinds))
    return FirstDifference(
        order=(difference.segment, difference.step, first, difference.rank),
        first=difference.describe(first),
        origins=difference.origins,
        begins=_begins(difference, first, before, is_unrestored=is_unrestored),
        changed=changed,
        received=tuple(received),
    )


def _begins(difference: StepDifference, row: int, before: str, *, is_unrestored: bool) -> Begins:
    site, start = difference.site(row), difference.start(row)
    program, position = difference.side(row)
    if start == "collective":
        return "received"
    # Python may have read the output of a collective that no op read
    delivered = [site for site in program.sites if site.role == "delivered"]
    read = {place for site in delivered for place in site.inputs}
    sent = [place for place, site in enumerate(program.sites[:position]) if site.role == "sent"]
    is_unread = any(place not in read for place in sent)
    if start == "outside" and site.phase not in ("data", "rng"):
        # the writer of a bucket of gradients, or of gathered parameters, is unknown
        if site.name:
            is_exchanged = site.subject == "gradient"
        else:
            is_exchanged = is_unread or site.module == "?"
        is_after_gap = before == "unrecorded" and site.phase != "state"
        return "ambiguous" if is_exchanged or is_after_gap else "external"
    if site.op and difference.kinds[row] in ("argument", "missing", "extra"):
        return "ambiguous" if is_unread or before == "unrecorded" else "external"
    return "local" if start in ("here", "outside") else "external" if is_unrestored else "ambiguous"


def _calls_in(view: StepView) -> dict[int, CollectiveCall]:
    """Return the collectives of a step by the position of their first site, in order."""
    counts: Counter[tuple[str, str]] = Counter()
    found = {}
    for position in (view.program.roles == "sent").nonzero()[0].tolist():
        site = view.program.sites[position]
        if site.output == 0:
            group = _group_of(site)
            found[position] = CollectiveCall(op=site.op, group=group, number=counts[site.op, group], source=site.source)
            counts[site.op, group] += 1
    return found


def _changed_calls(difference: StepDifference, calls: Mapping[int, CollectiveCall]) -> frozenset[CallKey]:
    """Return the calls with different inputs or arguments on this rank, and those only in the reference."""
    found = set()
    for row in difference.kinds:
        site, position = difference.site(row), difference.pairs[row][1]
        if site.role == "sent":
            missing = CollectiveCall(op=site.op, group=_group_of(site), number=-1)
            found.add((calls[position - site.output] if position >= 0 else missing).key)
    return frozenset(found)


def _group_of(site: Site) -> str:
    return str(json.loads(site.arguments).get("group", ""))
