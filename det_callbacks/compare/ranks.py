"""How much of each rank was compared, where it first differs, and which rank started it."""

import json
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from det_callbacks.compare.align import Alignment, align
from det_callbacks.compare.differences import MAX_DESCRIBED, StepDifference, compare_steps
from det_callbacks.compare.record import FitRecord, RankRecord, Tally, record_path
from det_callbacks.runs.files import damaged
from det_callbacks.runs.program import Site, StepView
from det_callbacks.runs.steps import Fit
from det_callbacks.runs.store import Run
from det_callbacks.verdict import Divergence

Side = Literal["origin", "receiver", "unknown", "equal"]
Begins = Literal["local", "external", "ambiguous", "received"]
CallKey = tuple[str, str, int]
Order = tuple[int, int, int, int]
"""Segment, step, position in the step, rank; sorted ascending."""

_POINT_TO_POINT = ("send", "recv", "isend", "irecv")

_MAX_ALIGNMENTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """A collective in a step: the k-th call of an op in a group is the same call
    on all its ranks.
    """

    op: str
    group: str  # such as "0-3"
    number: int  # of earlier calls in the group; -1 if only the reference has it
    source: tuple[str, ...] = field(default=(), compare=False)

    @property
    def key(self) -> CallKey:
        """Equal for one call on all ranks; messages of a group share a key,
        because their ends are different ops.
        """
        is_message = self.op.partition(".")[2].startswith(_POINT_TO_POINT)
        return ("", self.group, 0) if is_message else (self.op, self.group, self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification:
    """Who started a difference, by rank; an "unknown" rank may have started or received it."""

    sides: tuple[Side, ...]
    # the first with equal inputs on all ranks and a different output
    collective: CollectiveCall | None = None
    through: CollectiveCall | None = None  # the first that brought the difference to a receiver
    # segment and step of each rank's first difference
    since: tuple[tuple[int, int] | None, ...] = ()

    def ranks(self, side: Side) -> tuple[int, ...]:
        return tuple(rank for rank, of_rank in enumerate(self.sides) if of_rank == side)

    @property
    def is_collective(self) -> bool:
        """Whether a collective started it, and no rank did."""
        return self.collective is not None and not {"origin", "unknown"} & {*self.sides}


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """The first difference of a rank, and the evidence of who started it.

    It ``begins`` "local" (an op whose inputs match: no other rank can have caused it), "external"
    (a weight: the rank's at the run's first difference, later perhaps from another rank),
    "ambiguous" (its writer was not recorded) or "received" (a collective delivered it).
    """

    order: Order
    first: Divergence
    origins: tuple[Divergence, ...] = ()  # origins of the step that this rank sees by itself
    begins: Begins
    # calls with different inputs or arguments on this rank
    changed: frozenset[CallKey] = frozenset()
    # outputs of other calls on this rank
    received: tuple[tuple[CollectiveCall, Divergence], ...] = ()

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
        return [*(replace(output, is_origin=True) for output in self._delivered_by(ranks)), *own]

    def _delivered_by(self, ranks: Classification) -> list[Divergence]:
        """Return the outputs of the collective that are origins."""
        key = None if ranks.collective is None else ranks.collective.key
        return [divergence for call, divergence in self.received if call.key == key]


def classify(per_rank: Sequence[FirstDifference | None]) -> Classification:
    """Return which ranks started a difference and which received it,
    from each rank's first difference.
    """
    differing = [first for first in per_rank if first is not None]
    moment = min((first.moment for first in differing), default=None)
    earliest = [first for first in differing if first.moment == moment]
    changed = frozenset().union(*(first.changed for first in earliest))
    received = [(first, call) for first in differing for call, _ in first.received]
    # the inputs of all ranks are known only in the first step that differs
    by_itself = (
        call for first, call in received if first.moment == moment and call.key not in changed
    )
    handed_on = (call for first, call in received if first.moment != moment or call.key in changed)
    return Classification(
        sides=tuple("equal" if first is None else _side(first, earliest) for first in per_rank),
        collective=next(by_itself, None),
        through=next(handed_on, None),
        since=tuple(None if first is None else first.moment for first in per_rank),
    )


def _side(first: FirstDifference, earliest: Sequence[FirstDifference]) -> Side:
    is_early = first.moment == earliest[0].moment
    if first.begins == "local" or (first.begins == "external" and is_early):
        return "origin"
    if first.begins == "external":
        return "unknown"
    begun = Counter(other.begins for other in earliest)
    if first.begins == "received" or not is_early or begun["local"] or begun["external"]:
        return "receiver"
    # no other rank, or one of several, can have started it
    return "origin" if begun["ambiguous"] == 1 else "unknown"


def describe_first(
    difference: StepDifference, before: str = "", *, is_unrestored: bool = False
) -> FirstDifference:
    """Return the first difference of a step; ``before`` comes from ``RunPair.before``."""
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
    calls = {}
    for position in (view.program.roles == "sent").nonzero()[0].tolist():
        site = view.program.sites[position]
        if site.output == 0:
            group = _group_of(site)
            calls[position] = CollectiveCall(
                op=site.op, group=group, number=counts[site.op, group], source=site.source
            )
            counts[site.op, group] += 1
    return calls


def _changed_calls(
    difference: StepDifference, calls: Mapping[int, CollectiveCall]
) -> frozenset[CallKey]:
    """Return the calls with different inputs or arguments on this rank,
    and those only in the reference.
    """
    changed = set()
    for row in difference.kinds:
        site, position = difference.site(row), difference.pairs[row][1]
        if site.role == "sent":
            missing = CollectiveCall(op=site.op, group=_group_of(site), number=-1)
            changed.add((calls[position - site.output] if position >= 0 else missing).key)
    return frozenset(changed)


def _group_of(site: Site) -> str:
    return str(json.loads(site.arguments).get("group", ""))


class StepCounter:
    """Counts what differs in steps; two programs are aligned once.

    ``reordered`` collects the phases of ``Alignment.reordered``.
    """

    def __init__(self) -> None:
        self.reordered: set[str] = set()
        self._alignments: dict[tuple[int, ...], Alignment] = {}

    def count(self, reference: StepView, current: StepView) -> tuple[int, int]:
        """Return how many sites both steps have, and how many divergences."""
        reference_kind = reference.record.program_id, reference.record.layout_id
        current_kind = current.record.program_id, current.record.layout_id
        if reference_kind == current_kind:
            differs = reference.record.digests != current.record.digests
            # in equal programs, everything else is a difference of content
            if not differs[current.program.arguments].any():
                return len(differs), int(np.count_nonzero(differs))
        key = (*reference_kind, *current_kind)
        alignment = self._alignments.get(key) or align(reference, current)
        if len(self._alignments) < _MAX_ALIGNMENTS:
            self._alignments[key] = alignment
        self.reordered.update(alignment.reordered)
        difference = StepDifference(reference, current, alignment)
        return difference.num_compared, difference.num_differing


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpairedSteps:
    """Steps of one fit of one rank that are in only one run."""

    rank: int
    segment: int
    kind: Literal["missing", "extra"]
    first: int
    last: int
    count: int

    @property
    def order(self) -> Order:
        """Sorts before the sites of the first step."""
        return (self.segment, self.first, -1, self.rank)

    def divergence(self) -> Divergence:
        """Return the first step as a divergence."""
        return Divergence(
            rank=self.rank, step=self.first, phase="other", kind=self.kind, segment=self.segment
        )


@dataclass(slots=True, kw_only=True)
class RankResult:
    """The result of one rank; ``first`` is None if no site differs."""

    rank: int
    tally: Tally = field(default_factory=Tally)
    first: FirstDifference | None = None
    unpaired: list[UnpairedSteps] = field(default_factory=list)

    def add_unpaired(
        self, kind: Literal["missing", "extra"], segment: int, steps: Collection[int]
    ) -> None:
        if steps:
            span = {"first": min(steps), "last": max(steps), "count": len(steps)}
            self.unpaired.append(UnpairedSteps(rank=self.rank, segment=segment, kind=kind, **span))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPair:
    """Two runs that are compared rank by rank.

    Equal chains at a step prove that all steps up to it are equal, so bisection finds the first one
    that differs; earlier ones are counted and not read. Damage there goes unnoticed, but cannot
    turn a difference into a match. For a verification, the record has the result of all but the
    first differing step.
    """

    reference: Run
    current: Run
    is_common: bool  # only common steps are compared
    records: Mapping[int, RankRecord]  # if the current run is a verification

    def compare(self, rank: int) -> RankResult:
        """Return the result of a rank; ReferenceFormatError if a file is damaged."""
        if rank in self.records:
            return self._verified(self.records[rank])
        result, counter = RankResult(rank=rank), StepCounter()
        segments = {*self.reference.rank(rank).segments, *self.current.rank(rank).segments}
        for segment in sorted(segments):
            self._compare_fit(result, counter, segment)
        result.tally.num_differing += sum(steps.count for steps in result.unpaired)
        result.tally.reordered |= counter.reordered
        return result

    def _compare_fit(self, result: RankResult, counter: StepCounter, segment: int) -> None:
        """Compare a fit, and add what differs to the result of its rank."""
        rank = result.rank
        reference, current = (run.rank(rank).fit(segment) for run in (self.reference, self.current))
        num_equal = num_equal_steps(reference, current)
        if num_equal:
            self._count_equal(result.tally, rank, segment, current, num_equal)
        reference_steps = set(reference.steps[num_equal:].tolist())
        current_steps = set(current.steps[num_equal:].tolist())
        for step in sorted(reference_steps & current_steps):
            views = self.views(rank, segment, step)
            num_compared, num_differing = counter.count(*views)
            if num_differing and self.is_common:
                last = {"reference": reference.steps[-1], "current": current.steps[-1]}
                ends_early = compare_steps(*views).ends_early
                if ends_early is not None and last[ends_early] == step:
                    num_differing = 0  # the next step of the other run, which is not common
            result.tally.count([step], views[1].program, num_compared)
            result.tally.num_differing += num_differing
            if result.first is None and num_differing:
                result.first = describe_first(compare_steps(*views), self.before(segment, step))
        if not self.is_common:
            result.add_unpaired("missing", segment, reference_steps - current_steps)
            result.add_unpaired("extra", segment, current_steps - reference_steps)

    def _verified(self, record: RankRecord) -> RankResult:
        """Return the result of a rank from its record and the steps
        that its verification stored.
        """
        result = RankResult(rank=record.rank)
        result.tally.add(record.tally)
        for fit in record.fits:
            stored = self._stored_steps(record, fit)
            result.add_unpaired("extra", fit.segment, fit.extra)
            if result.first is None and fit.differing:
                result.first = self._first_stored(record, fit, stored)
        reference, stop = self.reference.rank(record.rank), record.stopped
        for segment in reference.segments if record.steps == "all" else ():
            fit = record.fit(segment) or FitRecord(segment=segment)
            missing = fit.missing(reference.steps(segment).tolist())
            if stop is not None:
                missing = {step for step in missing if (segment, step) < (stop.segment, stop.step)}
            result.add_unpaired("missing", segment, missing)
            result.tally.num_differing += len(missing)
        return result

    def _stored_steps(self, record: RankRecord, fit: FitRecord) -> list[int]:
        stored: list[int] = self.current.rank(record.rank).steps(fit.segment).tolist()
        if record.is_unfinished:  # a step is stored before the record has it
            stored = stored[: fit.num_stored]
        if len(stored) != fit.num_stored:
            raise damaged(
                record_path(self.current.path, record.rank),
                f"it has {fit.num_stored} stored steps of fit {fit.segment}, but the run has "
                f"{len(stored)}",
            )
        return stored

    def _first_stored(
        self, record: RankRecord, fit: FitRecord, stored: Sequence[int]
    ) -> FirstDifference:
        """Return the first difference of a fit of which steps differ."""
        step = next((step for step in stored if step in fit.differing), None)
        if step is not None:
            difference = compare_steps(*self.views(record.rank, fit.segment, step))
            if difference.num_differing:
                before = self.before(fit.segment, step)
                is_unrestored = before == "resumed" and bool(fit.unrestored)
                return describe_first(difference, before, is_unrestored=is_unrestored)
        raise damaged(
            record_path(self.current.path, record.rank),
            f"it says that step {min(fit.differing)} of fit {fit.segment} differs, but no stored "
            "step does",
        )

    def before(self, segment: int, step: int) -> Literal["resumed", "unrecorded", ""]:
        """Return what may have changed the state before a step."""
        runs = self.reference, self.current
        is_recorded = all(run.manifest.selection.selects_step(step - 1) for run in runs)
        is_resumed = any((segment, step) in run.resumed_steps for run in runs)
        if is_resumed:
            return "resumed"
        return "unrecorded" if step and not is_recorded else ""

    def views(self, rank: int, segment: int, step: int) -> tuple[StepView, StepView]:
        return self.reference.view(rank, segment, step), self.current.view(rank, segment, step)

    def _count_equal(self, tally: Tally, rank: int, segment: int, fit: Fit, num_equal: int) -> None:
        """Count the first steps of a fit; a step of each kind and the last step are opened."""
        rows = fit[["program_ids", "layout_ids", "num_digests", "steps"]][:num_equal].tolist()
        kinds: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for *kind, step in rows:
            kinds[tuple(kind)].append(step)
        self.views(rank, segment, rows[-1][-1])
        for steps in kinds.values():
            program = self.views(rank, segment, steps[0])[1].program
            tally.count(steps, program, len(program) * len(steps))


def num_equal_steps(reference: Fit, current: Fit) -> int:
    """Return the length of the common prefix of equal steps, by their chains."""
    num_common = min(len(reference.steps), len(current.steps))
    if not num_common:
        return 0
    is_same_step = reference.steps[:num_common] == current.steps[:num_common]
    num_same = int(np.argmin(np.append(is_same_step, False)))

    def has_diverged(index: int) -> bool:
        return bool(reference.chains[index] != current.chains[index])

    return bisect_left(range(num_same), True, key=has_diverged)
