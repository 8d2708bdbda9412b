"""The evidence of a verdict, one fact per line."""

from det_callbacks.causes.data import batch_lines
from det_callbacks.causes.generators import show_change, show_idle
from det_callbacks.causes.graph import Graph
from det_callbacks.causes.sentences import both_values
from det_callbacks.causes.states import initial_sources, random_initial
from det_callbacks.text import at_most, count

MAX_LINES = 20  # of evidence


def evidence_lines(graph: Graph) -> tuple[str, ...]:
    """Return the evidence in chronological order: weights, data, generators, settings."""
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
