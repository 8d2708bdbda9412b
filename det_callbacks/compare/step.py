"""Two recordings of one step: what differs in them, and where it starts."""

from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np

from det_callbacks.compare.align import Alignment, align
from det_callbacks.compare.arguments import ArgumentDifference
from det_callbacks.compare.collectives import CallKey, RankDifference, describe_rank
from det_callbacks.compare.differences import SiteDifferences
from det_callbacks.runs.program import Layout, Program, StepView, TensorLayout
from det_callbacks.verdict import Divergence, Kind

STARTS_BACKWARD = "aten.ones_like.default"
"""The gradient of a loss with respect to itself: ``torch.autograd`` makes it before its engine runs."""

MAX_SOURCES = 10_000
"""Differing sources of one step that are looked at; a step reads them before anything else."""

_MAX_ALIGNMENTS = 16


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
        gradients: names of those that an optimizer was given in the step, on either side.
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
    gradients: frozenset[str] = frozenset()
    among_ranks: RankDifference | None = None
    delivered: tuple[tuple[CallKey, Divergence], ...] = ()


class StepCounter:
    """Counts what differs in step after step: steps of the same two programs are aligned once, where they first occur.

    There most digests agree that tell which sites belong together; in later steps of a difference none does.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, ...], Alignment] = OrderedDict()

    def count(self, reference: StepView, current: StepView) -> tuple[int, int]:
        """Return how many sites both steps have, and how many divergences there are.

        The same program on both sides costs one comparison of two arrays.
        """
        require_whole(reference, current)
        ours, theirs = reference.record, current.record
        if (ours.program_id, ours.layout_id) == (theirs.program_id, theirs.layout_id):
            differs = ours.digests != theirs.digests
            # other arguments are looked into; all else that differs in one and the same program is content
            if not differs[current.program.arguments].any():
                return len(differs), int(np.count_nonzero(differs))
        key = ours.program_id, ours.layout_id, theirs.program_id, theirs.layout_id
        alignment = self._known.pop(key, None) or align(reference, current)
        self._known[key] = alignment
        if len(self._known) > _MAX_ALIGNMENTS:
            self._known.popitem(last=False)
        found = SiteDifferences(reference, current, alignment)
        return found.num_compared, len(found.kinds)


def compare_steps(reference: StepView, current: StepView, *, limit: int = 100) -> StepDifference:
    """Compare a step with the reference's.

    Equal steps and the same program on both sides cost one comparison of two arrays; other programs are aligned first
    (see :func:`det_callbacks.compare.align.align`).

    Args:
        reference: the step as the reference has it.
        current: the same step of the current run.
        limit: how many divergences and how many origins are described; all are counted.

    Raises:
        ValueError: a step holds another number of digests or layouts than its program has sites.

    Example:
        >>> difference = compare_steps(reference.view(0, 0, 12), current.view(0, 0, 12))  # doctest: +SKIP
        >>> [divergence.op for divergence in difference.divergences if divergence.is_origin]  # doctest: +SKIP
        ['aten.index_add_.default']
    """
    found = differing_sites(reference, current)
    rank, step, segment = current.rank, current.record.step, current.record.segment
    if found is None or not found.kinds:
        num_compared = len(current.program) if found is None else found.num_compared
        return StepDifference(rank=rank, step=step, segment=segment, num_compared=num_compared)
    judged = {row: found.is_origin(row) for row in found.beginnings}
    origins = [row for row, is_origin in judged.items() if is_origin]
    divergences = {row: describe(found, row) for row in (*list(found.kinds)[:limit], *origins[:limit])}

    def finding(row: int) -> Finding:
        return _finding(found, row, divergences.get(row) or describe(found, row))

    first = next(iter(found.kinds))
    is_before = (row for row in judged if not origins or row < origins[0])
    sources = [row for row in is_before if row != first and found.is_source(row)]
    evidence = dict.fromkeys((first, *sources[: MAX_SOURCES - 1], *origins[:1]))
    restored = [row for row in judged if _is_state_found(found, row)]
    delivered, among_ranks = describe_rank(found)
    return StepDifference(
        rank=rank,
        step=step,
        segment=segment,
        num_compared=found.num_compared,
        num_differing=len(found.kinds),
        divergences=tuple(divergences[row] for row in list(found.kinds)[:limit]),
        origins=tuple(divergences[row] for row in origins[:limit]),
        findings=tuple(map(finding, evidence)),
        kinds=frozenset(found.kinds.values()),
        restored=tuple(map(finding, restored[:MAX_SOURCES])),
        num_initial=sum(_is_initial(found, row) for row in np.flatnonzero(found.is_leading).tolist()),
        gradients=_gradients(reference.program) | _gradients(current.program),
        among_ranks=among_ranks,
        delivered=tuple((call, describe(found, row)) for call, row in delivered[:limit]),
    )


def differing_sites(reference: StepView, current: StepView) -> SiteDifferences | None:
    """Return how the sites of a step differ; None where they cost no more than a look because all bits agree.

    Raises:
        ValueError: as ``compare_steps`` does.
    """
    require_whole(reference, current)
    ours, theirs = reference.record, current.record
    is_same = (ours.program_id, ours.layout_id) == (theirs.program_id, theirs.layout_id)
    if is_same and np.array_equal(ours.digests, theirs.digests):
        return None
    return SiteDifferences(reference, current, align(reference, current))


def require_whole(*views: StepView) -> None:
    """Raise ValueError where a step holds another number of digests or layouts than its program has sites."""
    for view in views:
        if not len(view.program) == len(view.layout) == len(view.record.digests):
            raise ValueError(
                f"Step {view.record.step} of rank {view.rank} holds {len(view.record.digests)} digests and "
                f"{len(view.layout)} layouts for the {len(view.program)} sites of its program."
            )


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
    digests = np.array(view.record.digests[:num_sites], dtype=np.uint64)
    record = replace(view.record, program_id=program.id, layout_id=layout.id, digests=digests)
    return replace(view, record=record, program=program, layout=layout)


def describe(found: SiteDifferences, row: int) -> Divergence:
    """Return a differing row as the verdict has it."""
    left, right = found.places(row)
    site, ours, theirs = found.site(row), found.reference, found.current
    layout = theirs.layout.entries[right] if right >= 0 else ours.layout.entries[left]
    is_tensor = layout is not None and site.role not in ("value", "argument", "graph")
    before = ours.program.sites[left] if left >= 0 else site
    return Divergence(
        rank=theirs.rank,
        step=theirs.record.step,
        phase=site.phase,
        module=site.module,
        op=site.op,
        occurrence=site.occurrence,
        output=site.output,
        name=site.name or before.name,
        kind=found.kinds[row],
        source=site.source or before.source,
        shape=layout.shape if layout is not None and is_tensor else None,
        dtype=layout.dtype if layout is not None and is_tensor else None,
        reference_digest=None if left < 0 else f"{int(ours.record.digests[left]):016x}",
        current_digest=None if right < 0 else f"{int(theirs.record.digests[right]):016x}",
        is_origin=found.is_origin(row),
    )


def _finding(found: SiteDifferences, row: int, divergence: Divergence) -> Finding:
    left, right = found.places(row)
    site = found.site(row)
    layouts = (
        (found.reference.layout.entries[left], found.current.layout.entries[right]) if min(left, right) >= 0 else None
    )
    return Finding(
        divergence=divergence,
        position=row,
        role=site.role,
        is_source=found.is_source(row),
        is_rewired=found.is_rewired(row),
        is_passed_on=found.may_be_passed_on(row),
        unread=found.unread,
        layouts=layouts if layouts is not None and layouts[0] != layouts[1] else None,
        arguments=found.arguments.get(row),
        has_equal_samples=divergence.kind == "content" and _has_equal_samples(found, row),
        is_inside_region=found.is_inside_region(row),
        is_written_unseen=found.is_written_unseen(row),
        starts_backward=site.op == STARTS_BACKWARD and found.first_reader(row) == "backward",
        draws=found.draws(row),
        read_in=found.first_reader(row) if site.role == "input" else "",
    )


def _is_state_found(found: SiteDifferences, row: int) -> bool:
    """Return whether a row is a tensor of the state as the step finds it: listed before it, or read first."""
    site = found.site(row)
    if site.op or site.name is None or site.role not in ("named", "input"):
        return False
    return site.role == "input" or (site.phase == "state" and bool(found.is_leading[row]))


def _is_initial(found: SiteDifferences, row: int) -> bool:
    return found.site(row).role == "named" and _is_state_found(found, row)


def _gradients(program: Program) -> frozenset[str]:
    found = np.flatnonzero((program.phases == "gradient") & (program.roles == "named")).tolist()
    return frozenset(name for place in found if (name := program.sites[place].name) is not None)


def _has_equal_samples(found: SiteDifferences, row: int) -> bool:
    """Return whether the order-free digest of a batch tensor's samples, which follows it, agrees."""
    if row + 1 >= len(found.alignment) or row + 1 in found.kinds:
        return False
    site, following = found.site(row), found.site(row + 1)
    return site.phase == "data" and following.role == "samples" and following.name == site.name
