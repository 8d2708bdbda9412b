"""The sites of a new call: their names, arguments and source lines, and what each reads."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from det_callbacks.runs.program import Role, Site, plain_value, subject_of, to_compact_json
from det_callbacks.trace.call_graph import CallGraph, CallNode, is_number
from det_callbacks.trace.components import has_parts
from det_callbacks.trace.modules import source_of
from det_callbacks.trace.overloads import OpPlan
from det_callbacks.trace.places import Places
from det_callbacks.trace.source import is_of_torch


class SpecialName(NamedTuple):
    """Name of a site that is not a plain tensor: a generator's state, a digest of samples, a
    collective's output.
    """

    role: Role
    name: str | None
    key: tuple[Any, ...] = ()  # distinguishes calls whose sites have the same name


InputName = str | SpecialName | None


class ReadSites(Protocol):
    """What the current call reads, for its new node."""

    row_edges: list[tuple[int, ...]]  # the positions that each of its input sites reads

    def positions_read_by_output(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], num_outputs: int
    ) -> list[list[int]] | None:
        """Return the sites that each output of an op on lists of tensors reads,
        or None for other ops.
        """

    def sites(self, node: CallNode) -> Iterator[Site]:
        """Yield the input sites of the current call."""


def build_op(
    graph: CallGraph,
    places: Places,
    read: ReadSites,
    plan: OpPlan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Sequence[Any],
    node: CallNode,
) -> None:
    """Fill in a new node for the call of an op."""
    scope = node.scope
    if node.phase != "optimizer":  # an optimizer's calls make no autograd nodes
        places.backward.note_stack(node)
    node.op_base, node.is_in_place, node.source = plan.base, bool(plan.writes), source_of_call(node)
    gradient_name = None if scope.name is None else f"grad of {scope.name}"
    output_names = [
        name or gradient_name for name in names_of_written(places, node.phase, plan, outputs)
    ]
    varying, arguments = _describe_arguments(graph, plan, args, kwargs, node)
    by_output = read.positions_read_by_output(plan, args, kwargs, len(outputs))
    read_by_call = sorted({position for position in node.read_positions if position is not None})
    common: dict[str, Any] = {
        "phase": node.phase,
        "module": node.module,
        "op": plan.name,
        "varying": varying,
        "recomputed": scope.recomputed,
        "source": node.source,
    }
    sites = list(read.sites(node))
    edges: list[Sequence[int]] = [*read.row_edges]
    if varying:
        sites.append(Site(role="argument", **common))
        edges.append(())
    for index, (output, name) in enumerate(zip(outputs, output_names, strict=True)):
        role: Role = "output" if isinstance(output, Tensor) else "value"
        subject = subject_of(name, phase=node.phase, role=role)
        sites.append(Site(output=index, role=role, arguments=arguments, **subject, **common))
        edges.append(read_by_call if by_output is None else sorted(set(by_output[index])))
    node.sites, node.edges = tuple(sites), edges


def _describe_arguments(
    graph: CallGraph,
    plan: OpPlan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    node: CallNode,
) -> tuple[tuple[str, ...], str]:
    """Set which arguments of a new node are numbers; return their names, and the other arguments
    as JSON (``Site.varying`` and ``Site.arguments``).
    """
    names = list(_names_of_arguments(plan, args, kwargs))
    numbers: list[int] = []
    constants: dict[str, Any] = {}
    for index, (name, value) in enumerate(zip(names, node.consts, strict=True)):
        if is_number(value):
            numbers.append(index)
        else:
            constants[name] = value
    passed = {*plan.argument_names[: len(args)], *kwargs}
    constants.update((name, value) for name, value in plan.defaults.items() if name not in passed)
    node.number_indices = tuple(numbers)
    if plan.number_arguments:
        bases = [name.partition("[")[0] for name in names]
        node.any_number_indices = tuple(
            index for index, base in enumerate(bases) if base in plan.number_arguments
        )
    graph.set_numbers(node, node.consts)
    return tuple([names[index] for index in numbers]), arguments_json(constants)


def names_of_written(
    places: Places, phase: str, plan: OpPlan, outputs: Sequence[Any]
) -> list[str | None]:
    """Return the known name of each output, or None."""
    if plan.is_functional:
        return [None] * len(outputs)
    # outside the backward pass, the name may be that of a gradient; inside it, a tensor may become
    # a gradient only after this op (autograd, DDP), so ``build_op`` takes the
    # name from ``OpScope.name``
    name_of = places.names.of if phase == "backward" else places.names.of_written
    return [
        name_of(output) if isinstance(output, Tensor) and not has_parts(output) else None
        for output in outputs
    ]


def source_of_call(node: CallNode) -> tuple[str, ...]:
    """Return the source lines of the call of an op.

    Where activation checkpointing repeats a module of torch, the stack holds no user code: return
    the lines of the op's first run, unless the module was called from several places.
    """
    source = source_of(node.scope)
    if not node.scope.recomputed or not is_of_torch(source):
        return source
    first_runs: set[tuple[str, ...]] = set()
    earlier = node.previous
    while earlier is not None:
        if (
            earlier.func is node.func
            and earlier.phase == "forward"
            and earlier.module == node.module
        ):
            first_runs.add(earlier.source)
        earlier = earlier.previous
    return first_runs.pop() if len(first_runs) == 1 else source


def _names_of_arguments(
    plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[str]:
    """Yield the names of the arguments that are not tensors, in the recorder's order."""
    for name, value in plan.inputs(args, kwargs):
        if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
            yield from (
                f"{name}[{index}]"
                for index, item in enumerate(value)
                if not isinstance(item, Tensor)
            )
        elif not isinstance(value, Tensor):
            yield name


def arguments_json(arguments: Mapping[str, Any]) -> str:
    return to_compact_json({name: plain_value(value) for name, value in arguments.items()})
