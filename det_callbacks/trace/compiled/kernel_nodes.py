"""What the kernels of a compiled graph compute: nodes of the graph, and ops of eager code."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from operator import getitem
from typing import Any, NamedTuple

from torch import Tensor, fx

from det_callbacks.internals.dynamo import key_of_lowered, node_of_buffer, nodes_of_kernel
from det_callbacks.trace.compiled.graphs import UserOp
from det_callbacks.trace.overloads import OpKind, make_plan
from det_callbacks.trace.source import line_of_trace

# what a node of inductor's graph was before decompositions: the op, and nodes of Dynamo's graph
ORIGINAL_OP, FROM_NODE = "original_aten", "from_node"


class EagerCall(NamedTuple):
    """The call of an op in eager code that makes a tensor: number ``call`` of the ``calls`` of this
    op in this line that a graph computes; the line is "" if only torch's code calls the op.
    """

    op: str
    line: str
    call: int
    calls: int


class KernelNodes:
    """Which nodes each C++ kernel computes, whose code does not say so, and what each buffer holds,
    of the graphs that were compiled in this process.

    Inductor takes other kernels from its caches. For those, nothing is known.
    """

    def __init__(self) -> None:
        self._held: dict[str, dict[str, EagerCall]] = {}
        self._lowered: list[tuple[Any, str, tuple[tuple[str, UserOp], ...]]] = []
        self._known: dict[tuple[str, str], tuple[tuple[str, UserOp], ...]] = {}

    def forget_lowered(self) -> None:
        """Release the graphs that were compiled and never ran."""
        self._lowered.clear()

    def remember_nodes(self, scheduled: Any, kernel: str) -> None:
        """Remember which nodes a kernel computes, when inductor generates it."""
        graph, nodes = nodes_of_kernel(scheduled)
        computing = [node for node in nodes if not _is_view(node.target)] or nodes
        self._lowered.append((graph, kernel, tuple(map(_user_op_of, computing))))

    def remember_buffers(self, graph: Any) -> None:
        """Remember what the buffers of a graph hold, when inductor has generated its module."""
        self._held[key_of_lowered(graph)] = dict(_eager_calls(graph))

    def held_by(self, key: str, buffers: Sequence[str]) -> list[EagerCall | None]:
        """Return which call of eager code makes what each buffer holds; None if it is unknown."""
        held = self._held.get(key, {})
        return [held.get(name) for name in buffers]

    def of(self, key: str, kernel: str, lines: Mapping[str, UserOp]) -> list[UserOp]:
        """Return the nodes of a kernel of the module with this key; none if they are unknown.

        A node of Dynamo's graph, of which ``lines`` are those, has the name that the user wrote.
        """
        lowered, self._lowered = self._lowered, []
        for graph, name, nodes in lowered:
            if lowered_key := key_of_lowered(graph):
                self._known[lowered_key, name] = nodes
            else:  # another thread is compiling it
                self._lowered.append((graph, name, nodes))
        nodes = self._known.get((key, kernel), ())
        ops = []
        for name, op in nodes:
            user = lines.get(name, op)
            if op.line:
                ops.append(user if user.line == op.line else op)
        return ops


def _eager_calls(graph: Any) -> Iterator[tuple[str, EagerCall]]:
    """Yield the buffers of a graph that hold an output of an op of eager code.

    An op may have been decomposed into several nodes. Of those with one shape, the last one is its
    output.
    """
    groups: dict[Hashable, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        is_op = node.op == "call_function" and ORIGINAL_OP in node.meta
        # a backward pass also computes values of the forward pass again
        if is_op and bool(node.meta.get(FROM_NODE)) != graph.is_backward:
            groups.setdefault(_call_of(node), []).append(node)
    places = {
        group: (str(nodes[0].meta[ORIGINAL_OP]), line_of_trace(nodes[0].stack_trace or ""))
        for group, nodes in groups.items()
    }
    num_calls = Counter(places.values())
    numbers = Counter[tuple[str, str]]()
    outputs: dict[fx.Node, EagerCall] = {}
    for group, nodes in groups.items():
        place = places[group]
        last = {shape: node for node in nodes if (shape := _shape_of(node)) is not None}
        call = EagerCall(*place, call=numbers[place], calls=num_calls[place])
        outputs.update(dict.fromkeys(last.values(), call))
        numbers[place] += 1
    for buffer in graph.buffers:
        if (made := outputs.get(node_of_buffer(buffer)())) is not None:
            yield buffer.get_name(), made


def _call_of(node: fx.Node) -> Hashable:
    """Return what is equal for the nodes of one call of an op that was decomposed."""
    if node.target is getitem and isinstance(made := node.args[0], fx.Node):
        return _call_of(made)
    op = str(node.meta[ORIGINAL_OP])
    return node if str(node.target) == op else (op, node.meta.get("seq_nr"))


def _shape_of(node: fx.Node) -> tuple[str, ...] | None:
    """Return the shape of what a node computes, as text, because a size may be a symbol."""
    value = node.meta.get("val")
    return tuple(map(str, value.shape)) if isinstance(value, Tensor) else None


def _is_view(target: Any) -> bool:
    return make_plan(target).kind is OpKind.VIEW


def _user_op_of(node: fx.Node) -> tuple[str, UserOp]:
    """Return the name of a node's origin in Dynamo's graph, and the op with its line."""
    origins = node.meta.get(FROM_NODE) or ()
    op = getattr(node.meta.get(ORIGINAL_OP) or node.target, "__name__", str(node.target)).partition(
        "."
    )[0]
    return origins[0].name if origins else "", UserOp(op, line_of_trace(node.stack_trace or ""))


KERNEL_NODES = KernelNodes()
