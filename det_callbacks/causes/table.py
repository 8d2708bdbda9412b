"""Why two runs differ: the walk from the first difference to its root, and what the root means.

What a node read: ``_row_reads`` for the rows of a step, ``OF_STARTS`` for those with which it
starts, ``change_reads`` for generators, ``READS`` for the other kinds. The walk follows a proven
edge first, else the one that is yielded first. ``CAUSES`` says what a root of each kind means: the
first of its functions that answers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from det_callbacks.causes import data, generators, ops, programs, settings, states
from det_callbacks.causes.data import batch_lines
from det_callbacks.causes.generators import show_change, show_idle
from det_callbacks.causes.graph import Explanation, Graph, Node, Walk
from det_callbacks.causes.sentences import both_values, explain_first
from det_callbacks.causes.states import initial_sources, random_initial
from det_callbacks.compare.metrics import MetricDifference
from det_callbacks.runs.program import UNWRITTEN, Site
from det_callbacks.text import at_most, count
from det_callbacks.verdict import Divergence, TrailEntry, TrailKind

MAX_NODES = 12  # more than any walk has; it could only be longer by a cycle

Reads = Callable[[Graph, Node], Iterator[Node]]
Rule = Callable[[Graph, Walk], Explanation | None]

MAX_LINES = 20  # of evidence


def find_walk(graph: Graph) -> Walk:
    """Walk from the first difference to what it came from, preferring a proven edge to a
    possible one.
    """
    nodes = [_row_node(graph, graph.first.row)]
    while len(nodes) < MAX_NODES:
        read = sorted(_reads(graph, nodes[-1]), key=lambda node: not node.is_proven)
        if not read:
            break
        nodes.append(read[0])
    return Walk(nodes=tuple(nodes))


def find_cause(graph: Graph, walk: Walk) -> Explanation:
    """Return the cause that the root of a walk means: the first answer of its kind,
    or else of the first difference.
    """
    rules = (*CAUSES[walk.root.kind], ops.first_difference)
    explanation = next(known for rule in rules if (known := rule(graph, walk)) is not None)
    return explanation if explanation.text else replace(explanation, text=explain_first(graph))


def first_entry(graph: Graph) -> TrailEntry:
    """Return the first difference of a step as the trail shows it."""
    (entry,) = trail_of(graph, Walk(nodes=(_row_node(graph, graph.first.row),)))
    return entry


def trail_of(graph: Graph, walk: Walk) -> tuple[TrailEntry, ...]:
    """Return a walk as it is shown, the root first; an entry is proven if the
    next one certainly read it.
    """
    difference = graph.difference
    entries = [
        TrailEntry(
            kind=node.kind,
            name=node.name,
            rank=difference.rank,
            segment=difference.segment,
            step=node.step,
            moment=node.moment,
            proven=node.is_proven,
            reference=node.values[0],
            current=node.values[1],
        )
        for node in walk.nodes
    ]
    return tuple(reversed(entries))


def trail_of_metric(metric: MetricDifference) -> tuple[TrailEntry, ...]:
    """Return the trail of a metric: the setting or the row that explains it, if
    one does, and the metric.
    """
    divergence, choice, root = metric.divergence(), metric.explaining_choice, metric.root
    last = TrailEntry(
        kind="metric",
        name=divergence.name or "",
        rank=divergence.rank,
        segment=divergence.segment,
        step=divergence.step,
        moment=metric.readings[1].where,
        proven=True,
        reference=divergence.reference_digest,
        current=divergence.current_digest,
    )
    if choice is not None:
        first = replace(last, kind="setting", name=choice.name, moment="", proven=False)
        values = str(choice.reference), str(choice.current)
    elif root is not None:
        row, values = root[0], root[1:]
        kinds: dict[str, TrailKind] = {
            "length": "loaded",
            "generator": "generator",
            "batch": "batch",
        }
        first = replace(last, kind=kinds[row.kind], name=row.of, proven=False)
    else:
        return (last,)
    return replace(first, reference=values[0], current=values[1]), last


# the rows of the step


def _row_node(graph: Graph, row: int, *, is_proven: bool = True) -> Node:
    divergence, site = graph.difference.describe(row), graph.difference.site(row)
    return Node(
        kind=_kind_of(site),
        name=_name_of(site, divergence),
        step=divergence.step,
        moment=divergence.phase,
        values=(divergence.reference_digest, divergence.current_digest),
        row=row,
        is_proven=is_proven,
    )


def _kind_of(site: Site) -> TrailKind:
    if site.role == "generator" or site.phase == "rng":
        return "generator"
    if site.phase == "data":
        return "batch"
    if site.role in ("sent", "delivered") or site.is_collective:
        return "collective"
    if site.role in ("graph", "region_input", "graph_output") or site.is_region:
        return "region"
    if site.is_kernel:
        return "kernel"
    if site.op or (site.role == "named" and site.phase in ("forward", "other")):
        return "op"
    if site.phase in ("gradient", "backward"):
        return "gradient"
    return "outside" if site.name is None else "state"


def _name_of(site: Site, divergence: Divergence) -> str:
    if site.subject == "generator":
        return site.of
    if divergence.name is not None:
        return divergence.name
    where = f" in {divergence.module}" if divergence.module not in ("", "?") else ""
    return f"{divergence.op}{where}" if divergence.op else "a tensor that no recorded op made"


# what a node read


def _reads(graph: Graph, node: Node) -> Iterator[Node]:
    if node.row is not None:
        yield from _row_reads(graph, node, node.row)
    elif node.kind == "generator" and node.change is not None:
        yield from generators.change_reads(graph, node.change)
    else:
        yield from READS.get(node.kind, _nothing)(graph, node)


def _row_reads(graph: Graph, node: Node, row: int) -> Iterator[Node]:
    """Yield what a row of the step read and that differs, or of which nothing was recorded."""
    difference, start = graph.difference, graph.difference.start(row)
    if start == "read":
        read = {*difference.rows_read(row)} & difference.kinds.keys()
        yield from (_row_node(graph, at) for at in sorted(read))
    elif states.has_lost_state(graph):
        yield generators.checkpoint(graph)
    elif start == "outside":
        yield from OF_STARTS.get(node.kind, _nothing)(graph, node)
    elif start == "unseen writer" and difference.reads_detail(row, UNWRITTEN):
        yield Node(
            kind="unwritten",
            name="memory that no recorded op wrote",
            step=node.step,
            moment=node.moment,
        )
    elif start in ("written since", "unseen writer", "graph replay") or states.is_changed_in_step(
        graph
    ):
        yield Node(kind="outside", name=states.UNSEEN_WRITE, step=node.step, moment=node.moment)
    else:
        yield from _may_have_read(graph, node, row)


def _may_have_read(graph: Graph, node: Node, row: int) -> Iterator[Node]:
    """Yield what a row may have read whose reads were not all recorded: options,
    generators, settings.
    """
    is_unrecorded = graph.difference.start(row) == "not recorded"
    is_older = (
        graph.is_after_gap and graph.origin is None and graph.first.divergence.kind == "content"
    )
    if is_unrecorded and is_older:
        yield Node(kind="outside", name=states.UNRECORDED_STEPS, step=node.step)
        return
    nodes = [*programs.modes_read(graph, row), *settings.options_of_update(graph, row)]
    is_content = graph.difference.kinds[row] == "content"
    is_in_both = graph.difference.kinds[row] not in ("missing", "extra")
    # what ran in one run only may be why a generator moved differently
    is_passed_on = is_in_both and graph.difference.start(row) in ("passed on", "drawn")
    may_be_drawn = (is_unrecorded and is_content) or is_passed_on
    if may_be_drawn and settings.model_setting(graph) is None:
        nodes += generators.moved_within(graph)
    nodes += settings.setting_node(settings.explaining_setting(graph), node.step)
    yield from nodes
    if is_unrecorded and is_in_both and not nodes:
        name = "what wrote it, which was not recorded"
        yield Node(kind="outside", name=name, step=node.step, moment=node.moment)


def _unnamed_reads(graph: Graph, node: Node) -> Iterator[Node]:
    """Yield what a tensor that no recorded op made may hold: numbers that Python or NumPy drew."""
    yield from generators.moved_within(graph)


def _begin_reads(graph: Graph, node: Node) -> Iterator[Node]:
    """Yield the same generator at the moment at which it first differs."""
    if (end := data.epoch_in_one_run(graph, node.step)) is not None:
        yield end
    changes = [change for change in graph.evidence.generators if change.name == node.name]
    if not changes and graph.is_resumed:
        yield generators.checkpoint(graph)
    yield from (generators.generator_node(change, is_proven=True) for change in changes[:1])


def _option_reads(graph: Graph, node: Node) -> Iterator[Node]:
    if graph.is_resumed and node.step == graph.difference.step:
        yield generators.checkpoint(graph)
    yield from settings.setting_node(settings.explaining_setting(graph), node.step)


def _boundary_reads(graph: Graph, node: Node) -> Iterator[Node]:
    if node.change is not None and not _VALIDATIONS.isdisjoint(node.change.points):
        yield from settings.setting_node(settings.validation_setting(graph), node.step)


def _nothing(graph: Graph, node: Node) -> Iterator[Node]:
    return iter(())


_VALIDATIONS = frozenset({"before the sanity check", "before validation"})

OF_STARTS: Mapping[TrailKind, Reads] = {
    "state": states.state_reads,
    "batch": data.batch_reads,
    "generator": _begin_reads,
    "outside": _unnamed_reads,
}
"""What the rows read with which a step starts."""

READS: Mapping[TrailKind, Reads] = {
    "option": _option_reads,
    "indices": data.indices_read,
    "loaded": data.loaded_reads,
    "boundary": _boundary_reads,
}
"""What else reads something, besides rows and generators; the other kinds are roots."""


# what a root means


def _setting(graph: Graph, walk: Walk) -> Explanation | None:
    """A seed takes the cause of the row that it reaches; any other setting is the cause."""
    return (
        _by_reached(graph, walk) if walk.root.change is not None else settings.setting(graph, walk)
    )


def _by_reached(graph: Graph, walk: Walk) -> Explanation | None:
    rules = REACHED.get(walk.reached.kind, (generators.generator,))
    return next((known for rule in rules if (known := rule(graph, walk)) is not None), None)


def _option(graph: Graph, walk: Walk) -> Explanation | None:
    if any(programs.modes_read(graph, walk.reached.row)):
        return programs.module_mode(graph, walk)
    return (
        _by_reached(graph, walk)
        if walk.reached.kind == "batch"
        else settings.optimizer_option(graph, walk)
    )


def _restored_option(graph: Graph, walk: Walk) -> Explanation | None:
    has_option = any(node.kind == "option" for node in walk.nodes)
    return (
        settings.optimizer_option(graph, walk)
        if has_option and walk.reached.kind != "batch"
        else None
    )


def _of_source(graph: Graph, walk: Walk) -> Explanation | None:
    kinds = {node.kind for node in walk.nodes}
    return _by_reached(graph, walk) if kinds & {"batch", "generator"} else None


REACHED: Mapping[TrailKind, Sequence[Rule]] = {
    "state": (states.initial_state,),
    "batch": (ops.other_number_of_batches, data.drawn_before_data, data.batch),
    "generator": (programs.recomputation, generators.generator),
}
"""What a seed, a generator or a loader means, by the first compared row that it reaches."""

_OF_ROWS: Sequence[Rule] = (
    ops.other_number_of_batches,
    programs.another_length,
    programs.recomputation,
    generators.drawn_in_one_run,
    ops.other_gradients,
    programs.compiled_in_one_run,
    programs.collective_in_one_run,
    programs.compiled_graph,
    ops.outside_input,
    programs.scripted_module,
    programs.another_order,
    ops.structure,
)

CAUSES: Mapping[TrailKind, Sequence[Rule]] = {
    "setting": (_setting,),
    "option": (_option,),
    "checkpoint": (states.restored_state, _restored_option, _by_reached),
    "generator": (programs.another_length, _by_reached),
    "indices": (_by_reached,),
    "loaded": (_by_reached,),
    "batch": (_by_reached,),
    "boundary": (data.another_epoch, _by_reached),
    "state": (states.initial_state, *_OF_ROWS),
    "op": _OF_ROWS,
    "gradient": _OF_ROWS,
    "collective": _OF_ROWS,
    "region": _OF_ROWS,
    "kernel": _OF_ROWS,
    "unwritten": (states.uninitialised_memory,),
    "outside": (states.unrecorded_steps, states.external_write, _of_source, *_OF_ROWS),
}
"""What a root means, by its kind."""


def evidence_lines(graph: Graph) -> tuple[str, ...]:
    """Return the evidence: weights, data, generators, settings, in this order."""
    lines = list[str]()
    if graph.evidence.unread:
        lines.append(f"the evidence of generators and data cannot be used: {graph.evidence.unread}")
    if graph.is_first_seen and graph.num_initial:
        lines.append(f"initial state: {_of_initial_state(graph)}")
    lines += batch_lines(graph)
    lines += [show_change(one, graph.evidence) for one in graph.evidence.generators]
    lines += [show_idle(one) for one in graph.evidence.idle]
    lines += [f"setting: {both_values([entry])}" for entry in graph.choices]
    return tuple(at_most(MAX_LINES, lines))


def _of_initial_state(graph: Graph) -> str:
    names = [name for name in initial_sources(graph) if name not in graph.further]
    if not names:
        return f"{count(graph.num_initial, 'tensor')}, all equal"
    text = f"{len(names)} of {graph.num_initial} tensors differ"
    is_all_random = {*names} == random_initial(graph) and len(names) < graph.num_initial
    return f"{text}, all that are not constant" if is_all_random else text
