"""The trail of a verdict: what the first difference came from, by walking back along what was read.

A node is something that a step depended on, in both runs. ``_READS`` has a function for each kind, which returns the
nodes that such a node read and that differ, or of which nothing was recorded. The walk follows a proven edge before
one that may be, and ends at a node that read no such node: the root.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from det_callbacks.causes.phrases.generators import what_ran
from det_callbacks.compare.evidence import GeneratorChange
from det_callbacks.compare.facts import COLLECTIVES, Facts
from det_callbacks.compare.metrics import MetricDifference
from det_callbacks.runs.program import AFTER_STEP, REGION, UNWRITTEN, Site
from det_callbacks.text import listed
from det_callbacks.verdict import Divergence, EnvironmentDifference, TrailEntry, TrailKind

MAX_ENTRIES = 12  # more than any walk has; it could only be longer by a cycle


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Something that a step depended on; ``source`` is what its kind's function looks at."""

    kind: TrailKind
    name: str
    step: int
    moment: str = ""
    values: tuple[str | None, str | None] = (None, None)  # in the reference and the current run
    source: "int | GeneratorChange | None" = None  # a row of the step, or how a generator changed
    is_proven: bool = True  # whether the edge that led here is


def find_trail(facts: Facts) -> tuple[TrailEntry, ...]:
    """Return the trail of the first difference of a step, the root first."""
    nodes = [_of_row(facts, facts.first.row)]
    while len(nodes) < MAX_ENTRIES:
        read = sorted(_READS[nodes[-1].kind](facts, nodes[-1]), key=lambda node: not node.is_proven)
        if not read:
            break
        nodes.append(read[0])
    is_proven = [True, *(node.is_proven for node in nodes[1:])]
    found = [_entry(facts, node, is_known) for node, is_known in zip(nodes, is_proven, strict=True)]
    return tuple(reversed(found))


def trail_of_metric(metric: MetricDifference) -> tuple[TrailEntry, ...]:
    """Return the trail of a metric: the setting that explains it, if one does, and the metric."""
    found, choice = metric.divergence(), metric.explaining_choice
    last = TrailEntry(
        kind="metric",
        name=found.name or "",
        rank=found.rank,
        segment=found.segment,
        step=found.step,
        moment=metric.readings[1].where,
        proven=True,
        reference=found.reference_digest,
        current=found.current_digest,
    )
    if choice is None:
        return (last,)
    reference, current = str(choice.reference), str(choice.current)
    setting = replace(last, kind="setting", name=choice.name, moment="", proven=False)
    return replace(setting, reference=reference, current=current), last


def _entry(facts: Facts, node: Node, is_proven: bool) -> TrailEntry:
    reference, current = node.values
    return TrailEntry(
        kind=node.kind,
        name=node.name,
        rank=facts.difference.rank,
        segment=facts.difference.segment,
        step=node.step,
        moment=node.moment,
        proven=is_proven,
        reference=reference,
        current=current,
    )


# nodes


def _of_row(facts: Facts, row: int, *, is_proven: bool = True) -> Node:
    divergence, site = facts.difference.describe(row), facts.difference.site(row)
    return Node(
        kind=_kind_of(site),
        name=_name_of(divergence),
        step=divergence.step,
        moment=divergence.phase,
        values=(divergence.reference_digest, divergence.current_digest),
        source=row,
        is_proven=is_proven,
    )


def _kind_of(site: Site) -> TrailKind:
    if site.role == "generator":
        return "generator"
    if site.phase == "data":
        return "batch"
    if site.role in ("sent", "delivered") or site.op.startswith(COLLECTIVES):
        return "collective"
    if site.role in ("graph", "region_input", "graph_output") or site.op.startswith(REGION):
        return "region"
    if site.op or (site.role == "named" and site.phase in ("forward", "other")):
        return "op"
    if site.phase in ("gradient", "backward"):
        return "gradient"
    return "outside" if site.name is None else "state"


def _name_of(divergence: Divergence) -> str:
    if divergence.name is not None:
        return divergence.name.removesuffix(AFTER_STEP)
    where = f" in {divergence.module}" if divergence.module not in ("", "?") else ""
    return f"{divergence.op}{where}" if divergence.op else "a tensor that no recorded op made"


def _of_choice(choice: EnvironmentDifference, step: int) -> Node:
    """A setting that may affect what differs; which rows a setting affects was not recorded."""
    values = (str(choice.reference), str(choice.current))
    return Node(kind="setting", name=choice.name, step=step, values=values, is_proven=False)


def _of_generator(change: GeneratorChange, *, is_proven: bool) -> Node:
    step, point = change.differs_at
    return Node(kind="generator", name=change.name, step=step, moment=point, source=change, is_proven=is_proven)


def _outside(facts: Facts, name: str, moment: str = "", *, is_proven: bool = True) -> Node:
    return Node(kind="outside", name=name, step=facts.difference.step, moment=moment, is_proven=is_proven)


def _checkpoint(facts: Facts) -> Node:
    step = facts.difference.step
    return Node(kind="checkpoint", name="the resume", step=step, moment="resume", is_proven=False)


# what they read


def _reads_of_row(facts: Facts, node: Node) -> Iterator[Node]:
    """Yield what a row of the step read."""
    row, difference = node.source, facts.difference
    if not isinstance(row, int):
        return
    start = difference.start(row)
    if start == "read":
        yield from _rows_read(facts, row)
    elif start == "outside":
        yield from _BEFORE_STEP[node.kind](facts, node)
    elif start == "unseen writer" and difference.reads_detail(row, UNWRITTEN):
        yield Node(kind="unwritten", name="memory that no recorded op wrote", step=node.step, moment=node.moment)
    elif start in ("written since", "unseen writer", "graph replay"):
        yield _outside(facts, "a write that was not recorded", node.moment)
    elif start == "not recorded" and facts.explaining_choice is None:
        yield _outside(facts, "what wrote it, which was not recorded", node.moment)
    if start != "outside" and facts.is_of_update(row):
        for option in facts.evidence.options:
            values = (option.reference, option.current)
            yield Node(kind="option", name=option.name, step=option.since, values=values, is_proven=False)
    if facts.is_resumed and (facts.restored or facts.unrestored or facts.lost_inputs):
        yield _checkpoint(facts)
    if start in ("here", "not recorded") and facts.explaining_choice is not None:
        yield _of_choice(facts.explaining_choice, node.step)


def _rows_read(facts: Facts, row: int) -> Iterator[Node]:
    """Yield the rows that a row of either run read and that differ, in the order of the step."""
    read = {*facts.difference.rows_read(row)} & facts.difference.kinds.keys()
    yield from (_of_row(facts, at) for at in sorted(read))


def _reads_of_state(facts: Facts, node: Node) -> Iterator[Node]:
    """Yield what the state at the start of a step came from: the state at the end of the previous step."""
    if facts.is_resumed:
        yield _checkpoint(facts)
    elif facts.is_after_gap:
        yield _outside(facts, "steps that were not recorded")
    elif not (facts.num_initial or facts.is_first_seen):
        yield _outside(facts, "a write that was not recorded", "between the steps")
    else:
        for change in facts.evidence.other_starts:
            if change.is_reseeded:
                yield _seed(change, is_proven=False)
        if (choice := facts.dtype_choice or facts.explaining_choice) is not None:
            yield _of_choice(choice, node.step)


def _reads_of_batch(facts: Facts, node: Node) -> Iterator[Node]:
    batch = facts.evidence.batch
    if batch.is_loaded_alike:
        yield _outside(facts, "code that changes the batch", "between the loader and the step")
    elif batch.indices is not None or batch.settings:
        yield Node(kind="loaded", name=_loader_of(facts), step=node.step, moment="data")
    else:
        yield from _drawn_before(facts)
        yield _outside(facts, "the source of the batch", "data", is_proven=False)


def _reads_of_loaded(facts: Facts, node: Node) -> Iterator[Node]:
    batch = facts.evidence.batch
    if batch.indices not in (None, "same"):
        _, _, reference, current = batch.first_index or ("", 0, None, None)
        yield Node(kind="indices", name=node.name, step=node.step, moment="data", values=(reference, current))
        return
    yield from _loader_options(facts)
    yield from _drawn_before(facts)
    yield _outside(facts, "the samples of the data set", "data", is_proven=False)


def _reads_of_indices(facts: Facts, node: Node) -> Iterator[Node]:
    yield from _loader_options(facts)
    yield from _drawn_before(facts)


def _loader_options(facts: Facts) -> Iterator[Node]:
    for name, values in facts.evidence.batch.settings.items():
        yield Node(kind="option", name=name, step=facts.difference.step, values=values)


def _drawn_before(facts: Facts) -> Iterator[Node]:
    """Yield the generators that differed when the batch was drawn; that it was drawn from them is not recorded."""
    for change in facts.evidence.generators:
        if facts.is_before_step(change):
            yield _of_generator(change, is_proven=False)


def _loader_of(facts: Facts) -> str:
    first, settings = facts.evidence.batch.first_index, facts.evidence.batch.settings
    if first is not None:
        return first[0]
    return next((name.rpartition(" of ")[2] for name in settings), "the loader")


def _reads_of_begin(facts: Facts, node: Node) -> Iterator[Node]:
    """Yield the same generator at the moment at which it first differs."""
    changes = [change for change in facts.evidence.generators if change.name == node.name]
    if not changes and facts.is_resumed:
        yield _checkpoint(facts)
    yield from (_of_generator(change, is_proven=True) for change in changes[:1])


def _reads_of_generator(facts: Facts, node: Node) -> Iterator[Node]:
    """Yield the seed, or what ran since the generator last matched."""
    change = node.source
    if not isinstance(change, GeneratorChange):
        yield from _reads_of_row(facts, node)
    elif change.is_reseeded:
        yield _seed(change)
    elif change.equal_at is None or change.has_other_start:
        name = f"draws from {change.name}" if change.seeds is not None else f"another state of {change.name}"
        yield _checkpoint(facts) if facts.is_resumed else _outside(facts, name, "before the fit")
    else:
        ran = listed(dict.fromkeys(what_ran((*change.points, change.differs_at[1]), facts.evidence)))
        sides = {"the reference": change.only_reference, "the current run": change.only_current}
        only = listed((f"only in {side}: {', '.join(points)}" for side, points in sides.items() if points), "; ")
        step, point = change.equal_at
        moment = f"{point}{f'; {only}' if only else ''}"
        yield Node(
            kind="boundary", name=ran or "code outside the training's hooks", step=step, moment=moment, source=change
        )


def _reads_of_option(facts: Facts, node: Node) -> Iterator[Node]:
    if facts.explaining_choice is not None:
        yield _of_choice(facts.explaining_choice, node.step)


def _reads_of_boundary(facts: Facts, node: Node) -> Iterator[Node]:
    if facts.validation_choice is not None:
        yield _of_choice(facts.validation_choice, node.step)


def _seed(change: GeneratorChange, *, is_proven: bool = True) -> Node:
    reference, current = change.seeds or (None, None)
    values = (str(reference), str(current))
    return Node(
        kind="setting", name=f"seed of {change.name}", step=change.differs_at[0], values=values, is_proven=is_proven
    )


def _nothing(facts: Facts, node: Node) -> Iterator[Node]:
    return iter(())


_READS: Mapping[TrailKind, Callable[[Facts, Node], Iterator[Node]]] = {
    "setting": _nothing,
    "option": _reads_of_option,
    "checkpoint": _nothing,
    "generator": _reads_of_generator,
    "indices": _reads_of_indices,
    "loaded": _reads_of_loaded,
    "batch": _reads_of_row,
    "boundary": _reads_of_boundary,
    "state": _reads_of_row,
    "op": _reads_of_row,
    "gradient": _reads_of_row,
    "collective": _reads_of_row,
    "region": _reads_of_row,
    "kernel": _reads_of_row,
    "unwritten": _nothing,
    "outside": _nothing,
    "metric": _nothing,
}
_BEFORE_STEP: Mapping[TrailKind, Callable[[Facts, Node], Iterator[Node]]] = {
    **dict.fromkeys(_READS, _nothing),
    "state": _reads_of_state,
    "batch": _reads_of_batch,
    "generator": _reads_of_begin,
}
"""What the rows with which a step starts came from."""
