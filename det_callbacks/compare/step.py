"""Two recordings of one step: what differs in them, and where it starts."""

from dataclasses import dataclass, replace

import numpy as np

from det_callbacks.compare.align import Alignment, align
from det_callbacks.compare.changes import Changes, find_changes
from det_callbacks.compare.collectives import (
    Begins,
    CallKey,
    RankDifference,
    call_key,
    calls_in,
    calls_of,
    differing_calls,
    is_in_flight,
)
from det_callbacks.compare.origin import OriginFinder
from det_callbacks.compare.units import ArgumentDifference
from det_callbacks.runs.program import Layout, Program, Site, StepView, TensorLayout
from det_callbacks.verdict import Divergence, Kind

STARTS_BACKWARD = "aten.ones_like.default"
"""The gradient of a loss with respect to itself: ``torch.autograd`` makes it before its engine runs."""

MAX_SOURCES = 10_000
"""Differing sources of one step that are looked at; a step reads them before anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A divergence with what its explanation needs besides.

    Attributes:
        divergence: as the verdict shows it.
        position: row among the aligned sites of the step; tells which of two divergences comes first.
        role: of its site.
        is_source: something entered the step here: it was not computed in it.
        is_rewired: the op reads other tensors than in the reference.
        is_passed_on: Python may have passed it on, from a shape or a number that differs before it.
        unread: type of something in the batch that could not be looked into, which Python may have passed it on from.
        layouts: of the reference and of the current step, where the kind is structure.
        arguments: of an op whose arguments differ.
        is_leading: it lies before everything that the step computed.
        has_equal_samples: of a batch tensor: its samples are the reference's, in another order.
        is_inside_region: an op that was seen inside a compiled region.
        is_written_unseen: a named tensor whose recorded writers agree.
        starts_backward: the gradient that a backward pass starts with.
        draws: the op draws from a generator.
        read_in: phase of the first op that reads it; "" where none does.
    """

    divergence: Divergence
    position: int
    role: str
    is_source: bool
    is_rewired: bool = False
    is_passed_on: bool = False
    unread: str = ""
    layouts: tuple[TensorLayout | None, TensorLayout | None] | None = None
    arguments: ArgumentDifference | None = None
    is_leading: bool = False
    has_equal_samples: bool = False
    is_inside_region: bool = False
    is_written_unseen: bool = False
    starts_backward: bool = False
    draws: bool = False
    read_in: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """How one step differs from the reference's.

    Attributes:
        rank: process.
        step: training batch.
        segment: fit of the run.
        num_compared: sites that both sides have.
        num_differing: divergences, all of them, whatever the limit.
        divergences: the first ones, in the order of the step.
        origins: the first ones with ``is_origin`` True, even where they lie beyond those divergences.
        findings: first divergence, sources up to the first origin, and the first origin: what a cause is found from.
        kinds: the kinds that occur in the step.
        restored: parameters, buffers and optimizer state that differ as the step finds them, wherever its origins lie:
            in the first step after a checkpoint was restored they came from there.
        num_initial: tensors of the initial state that both sides list before the step; 0 unless it is a fit's first.
        among_ranks: what tells, with that of all other ranks, which of them started it.
        delivered: what collectives delivered and differs, while this rank put in what the reference did, with the call.
    """

    rank: int
    step: int
    segment: int = 0
    num_compared: int
    num_differing: int = 0
    divergences: tuple[Divergence, ...] = ()
    origins: tuple[Divergence, ...] = ()
    findings: tuple[Finding, ...] = ()
    kinds: frozenset[Kind] = frozenset()
    restored: tuple[Finding, ...] = ()
    num_initial: int = 0
    among_ranks: RankDifference | None = None
    delivered: tuple[tuple[CallKey, Divergence], ...] = ()


def compare_steps(reference: StepView, current: StepView, *, limit: int = 100) -> StepDifference:
    """Compare a step with the reference's.

    Equal steps and the same program on both sides cost one comparison of two arrays; other programs are aligned first
    (see :func:`det_callbacks.compare.align.align`). What differs is then looked at site by site, some 5 microseconds
    each.

    Args:
        reference: the step as the reference has it.
        current: the same step of the current run.
        limit: how many divergences and how many origins are described; all are counted. With 0 they are only counted.

    Raises:
        ValueError: a step holds another number of digests or layouts than its program has sites.

    Example:
        >>> difference = compare_steps(reference.view(0, 0, 12), current.view(0, 0, 12))  # doctest: +SKIP
        >>> [divergence.op for divergence in difference.divergences if divergence.is_origin]  # doctest: +SKIP
        ['aten.index_add_.default']
    """
    for view in (reference, current):
        if not len(view.program) == len(view.layout) == len(view.record.digests):
            raise ValueError(
                f"Step {view.record.step} of rank {view.rank} holds {len(view.record.digests)} digests and "
                f"{len(view.layout)} layouts for the {len(view.program)} sites of its program."
            )
    rank, step, segment = current.rank, current.record.step, current.record.segment
    is_same = (
        reference.record.program_id == current.record.program_id
        and reference.record.layout_id == current.record.layout_id
    )
    if is_same:
        differs = reference.record.digests != current.record.digests
        num_differing = int(np.count_nonzero(differs))
        # Other arguments are looked into; all else that differs in one and the same program is content.
        if not num_differing or (not limit and not np.any(differs & current.program.is_argument)):
            return StepDifference(
                rank=rank,
                step=step,
                segment=segment,
                num_compared=len(current.program),
                num_differing=num_differing,
                kinds=frozenset(("content",) if num_differing else ()),
            )
    alignment = align(reference, current)
    changes = find_changes(reference, current, alignment)
    if not limit or not changes.kinds:
        return StepDifference(
            rank=rank,
            step=step,
            segment=segment,
            num_compared=changes.num_compared,
            num_differing=len(changes.kinds),
            kinds=frozenset(changes.kinds.values()),
        )
    return _Description(reference, current, alignment, changes).difference(limit)


def reached_part(reference: StepView, current: StepView) -> StepView:
    """Return the reference's step up to the last site that the step under way has too."""
    num_sites = len(current.program)
    if current.program.sites == reference.program.sites[:num_sites]:
        return _beginning(reference, num_sites)
    alignment = align(reference, current)
    reached = alignment.reference[(alignment.reference >= 0) & (alignment.current >= 0)]
    return _beginning(reference, int(reached.max()) + 1 if len(reached) else 0)


def empty_step(view: StepView) -> StepView:
    """Return a step with the same number and without sites, so that everything in the other one is extra."""
    return _beginning(view, 0)


def _beginning(view: StepView, num_sites: int) -> StepView:
    program = Program(sites=view.program.sites[:num_sites])
    layout = Layout(entries=view.layout.entries[:num_sites])
    record = replace(
        view.record,
        program_id=program.id,
        layout_id=layout.id,
        digests=np.array(view.record.digests[:num_sites], dtype=np.uint64),
    )
    return replace(view, record=record, program=program, layout=layout)


class _Description:
    """Describes the differing rows of one step."""

    def __init__(self, reference: StepView, current: StepView, alignment: Alignment, changes: Changes) -> None:
        self._reference = reference
        self._current = current
        self._alignment = alignment
        self._changes = changes
        self._finder = OriginFinder(reference, current, alignment, changes)

    def difference(self, limit: int) -> StepDifference:
        divergences: list[Divergence] = []
        origins: list[Divergence] = []
        findings: list[Finding] = []
        restored: list[Finding] = []
        delivered, begins = self._beginnings(limit)
        for row in self._changes.kinds:
            is_wanted = len(divergences) < limit
            if not is_wanted and len(origins) >= limit:
                break
            is_origin = self._finder.is_origin(row)
            is_evidence = not origins and len(findings) < MAX_SOURCES and (not findings or self._is_source(row))
            is_restored = len(restored) < MAX_SOURCES and self._is_state_found(row)
            if not (is_wanted or is_evidence or is_origin or is_restored):
                continue
            finding = self._finding(row, is_origin)
            if is_wanted:
                divergences.append(finding.divergence)
            if is_evidence or (is_origin and not origins):
                findings.append(finding)
            if is_origin and len(origins) < limit:
                origins.append(finding.divergence)
            if is_restored:
                restored.append(finding)
        return StepDifference(
            rank=self._current.rank,
            step=self._current.record.step,
            segment=self._current.record.segment,
            num_compared=self._changes.num_compared,
            num_differing=len(self._changes.kinds),
            divergences=tuple(divergences),
            origins=tuple(origins),
            findings=tuple(findings),
            kinds=frozenset(self._changes.kinds.values()),
            restored=tuple(restored),
            num_initial=sum(
                self._is_state_found(row) for row in range(len(self._alignment)) if self._finder.is_leading(row)
            ),
            among_ranks=RankDifference(
                rank=self._current.rank,
                segment=self._current.record.segment,
                step=self._current.record.step,
                begins=begins,
                calls=differing_calls(self._reference, self._current, self._alignment, self._changes.kinds),
            ),
            delivered=tuple(delivered),
        )

    def _beginnings(self, limit: int) -> tuple[list[tuple[CallKey, Divergence]], Begins]:
        """Return what a collective delivered with nothing differing before it here, and what else began."""
        delivered: list[tuple[CallKey, Divergence]] = []
        begins: set[Begins] = set()
        calls: dict[int, CallKey] = {}
        was_delivered = False
        for row in self._changes.kinds:
            left, right = self._places(row)
            site = self._finder.site(row)
            if self._finder.has_differing_input(row):
                continue
            if site.role != "delivered" or is_in_flight(self._reference, self._current, left, right):
                # Python may pass it on, and what a collective delivered: by skipping an op, or calling it otherwise
                is_passed_on = was_delivered or site.role == "value" or self._finder.is_after_readable(row)
                begun = self._begun(row, site, is_passed_on=is_passed_on)
                if begun != "open" or not was_delivered:
                    begins.add(begun)
                continue
            was_delivered = True
            if right >= 0 and len(delivered) < limit:
                calls = calls or {
                    position: call_key(call.op, group, number)
                    for position, call, group, number in calls_in(self._current.program.sites)
                }
                call = next(calls_of(self._current, right))
                delivered.append((calls[call], self._finding(row, None).divergence))
        surest: tuple[Begins, ...] = ("own", "outside", "open")
        return delivered, next((begun for begun in surest if begun in begins), "none")

    def _begun(self, row: int, site: Site, *, is_passed_on: bool) -> Begins:
        """Return how sure it is that a difference which nothing recorded led to is this rank's own."""
        if self._is_source(row):
            if site.phase in ("data", "rng"):
                return "own"
            # of a bucket of gradients, or of gathered parameters, nobody knows who wrote it
            is_exchanged = (site.name is None and site.module == "?") or (site.name or "").startswith("grad of ")
            return "open" if is_exchanged or is_passed_on else "outside"
        if site.op and self._changes.kinds[row] in ("argument", "missing", "extra"):
            return "open" if is_passed_on else "outside"
        return "own" if self._finder.is_origin(row) else "open"

    def _is_state_found(self, row: int) -> bool:
        """Return whether a row is a tensor of the state as the step finds it: listed before it, or read first."""
        site = self._finder.site(row)
        if site.op or site.name is None or site.role not in ("named", "input"):
            return False
        is_found = site.role == "input" or (site.phase == "state" and self._finder.is_leading(row))
        return is_found and not self._finder.has_differing_input(row)

    def _places(self, row: int) -> tuple[int, int]:
        return int(self._alignment.reference[row]), int(self._alignment.current[row])

    def _is_source(self, row: int) -> bool:
        return self._finder.is_source(row) and not self._finder.has_differing_input(row)

    def _finding(self, row: int, is_origin: bool | None) -> Finding:
        left, right = self._places(row)
        kind = self._changes.kinds[row]
        site = self._finder.site(row)
        ours = self._reference.layout.entries[left] if left >= 0 else None
        theirs = self._current.layout.entries[right] if right >= 0 else None
        layout = theirs if right >= 0 else ours
        is_tensor = layout is not None and site.role not in ("value", "argument", "graph")
        divergence = Divergence(
            rank=self._current.rank,
            step=self._current.record.step,
            phase=site.phase,
            module=site.module,
            op=site.op,
            occurrence=site.occurrence,
            output=site.output,
            name=site.name or (self._reference.program.sites[left].name if left >= 0 else None),
            kind=kind,
            source=site.source or (self._reference.program.sites[left].source if left >= 0 else ()),
            shape=layout.shape if layout is not None and is_tensor else None,
            dtype=layout.dtype if layout is not None and is_tensor else None,
            reference_digest=None if left < 0 else f"{int(self._reference.record.digests[left]):016x}",
            current_digest=None if right < 0 else f"{int(self._current.record.digests[right]):016x}",
            is_origin=is_origin,
        )
        return Finding(
            divergence=divergence,
            position=row,
            role=site.role,
            is_source=self._is_source(row),
            is_rewired=self._finder.is_rewired(row),
            is_passed_on=self._finder.may_be_passed_on(row),
            unread=self._finder.unread,
            layouts=(ours, theirs) if left >= 0 and right >= 0 and ours != theirs else None,
            arguments=self._changes.arguments.get(row),
            is_leading=self._finder.is_leading(row),
            has_equal_samples=kind == "content" and self._has_equal_samples(row),
            is_inside_region=self._finder.is_inside_region(row),
            is_written_unseen=self._finder.is_written_unseen(row),
            starts_backward=site.op == STARTS_BACKWARD and self._finder.first_reader(row) == "backward",
            draws=self._finder.draws(row),
            read_in=self._finder.first_reader(row) if site.role == "input" else "",
        )

    def _has_equal_samples(self, row: int) -> bool:
        """Return whether the order-free digest of a batch tensor's samples, which follows it, agrees."""
        if row + 1 >= len(self._alignment) or row + 1 in self._changes.kinds:
            return False
        site, following = (self._current.program.sites[self._places(place)[1]] for place in (row, row + 1))
        return site.phase == "data" and following.role == "samples" and following.name == site.name
