"""Building an event that no earlier step had: the cold path, where text is made."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from det_callbacks.runs.program import Site
from det_callbacks.trace.cuda_graphs import LeftName
from det_callbacks.trace.deliveries import DeliveredName
from det_callbacks.trace.generators import GeneratorName
from det_callbacks.trace.overloads import OpPlan
from det_callbacks.trace.source import capture_source, is_of_torch
from det_callbacks.trace.tree import (
    VARYING,
    Context,
    Event,
    ProgramTree,
    arguments_json,
    comparable,
    exact_form,
    needs_exact,
)


def build_op_event(
    event: Event,
    plan: OpPlan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    tree: ProgramTree,
    position: int,
    row_edges: Sequence[tuple[int, ...]],
    inputs: Sequence[Sequence[int]] | None,
    outputs: Sequence[Any],
    output_names: Sequence[str | None],
) -> None:
    """Fill in the rows, the source and the constant arguments of a new event of an op.

    Args:
        event: made with what was seen of the call.
        plan: of its overload.
        args: of the call.
        kwargs: of the call.
        tree: knows which arguments change from step to step.
        position: of the next site of the step.
        row_edges: for each input row, the positions it follows from.
        inputs: positions read by each output, where they are not the same for all.
        outputs: tensors and numbers that the call wrote.
        output_names: their names, where they have one.
    """
    context = event.context
    recomputed = False
    if not isinstance(context, str):
        recomputed = context.recomputed
        if context.name is not None:
            output_names = [name or f"grad of {context.name}" for name in output_names]
    event.source = _source_of_event(event)
    event.op_base = plan.base
    event.is_in_place = bool(plan.writes)
    names = list(const_names(plan, args, kwargs))
    assert len(names) == len(event.consts), plan.name
    varying = tree.varying(event, plan.name, names, position)
    varying_names = tuple(names[index] for index in varying)
    event.varying = varying
    consts = [VARYING if index in varying else const for index, const in enumerate(event.consts)]
    if any(
        needs_exact(const, is_number=name.partition("[")[0] in plan.number_arguments)
        for name, const in zip(names, consts, strict=True)
    ):
        event.exact = exact_form(consts, varying)
    event.consts = [comparable(const) for const in consts]
    rows = [
        input_row(name, edges, module=event.module, source=event.source)
        for name, edges in zip(event.names, row_edges, strict=True)
    ]
    if varying:
        rows.append(
            Site(
                phase=event.phase,
                module=event.module,
                op=plan.name,
                occurrence=0,
                output=0,
                role="argument",
                varying=varying_names,
                recomputed=recomputed,
                source=event.source,
            )
        )
    every = tuple(sorted(set(event.reads)))
    given = {*plan.argument_names[: len(args)], *kwargs}
    left_out = {name: value for name, value in plan.defaults.items() if name not in given}
    arguments = arguments_json([*names, *left_out], [*consts, *left_out.values()])
    rows.extend(
        Site(
            phase=event.phase,
            module=event.module,
            op=plan.name,
            occurrence=0,
            output=index,
            role="output" if isinstance(output, Tensor) else "value",
            name=name,
            arguments=arguments,
            varying=varying_names,
            inputs=every if inputs is None else tuple(sorted(set(inputs[index]))),
            recomputed=recomputed,
            source=event.source,
        )
        for index, (output, name) in enumerate(zip(outputs, output_names, strict=True))
    )
    event.rows = tuple(rows)


def input_row(name: str | None, edges: tuple[int, ...], *, module: str, source: tuple[str, ...]) -> Site:
    """Return the site of a tensor, or a generator's state, that an op read and no recorded op of this step wrote."""
    if isinstance(name, DeliveredName):
        return name.row(edges)
    is_left = isinstance(name, LeftName)
    name = name.tensor if isinstance(name, LeftName) else name
    is_generator = isinstance(name, GeneratorName)
    owner = module if name is None else "" if is_generator else owner_of(name)
    return Site(
        phase="rng" if is_generator else "other" if is_left else "input",
        module=owner,
        op="",
        occurrence=0,
        output=0,
        role="generator" if is_generator else "left" if is_left else "input",
        name=None if name is None else str(name),
        inputs=edges,
        source=source if name is None else (),
    )


def owner_of(name: str) -> str:
    """Return the module that a named tensor belongs to: "net.head" for "exp_avg of net.head.weight"."""
    return name.rpartition(" ")[2].rpartition(".")[0]


def const_names(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the arguments that are no tensors, in the order in which the recorder collects them."""
    written = {write.name for write in plan.writes} if plan.is_overwrite else set()
    for name, value in (*zip(plan.argument_names, args, strict=False), *kwargs.items()):
        if name in written or isinstance(value, Tensor):
            continue
        if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
            yield from (f"{name}[{index}]" for index, item in enumerate(value) if not isinstance(item, Tensor))
        else:
            yield name


def source_of(context: Context) -> tuple[str, ...]:
    """Return the user's lines behind the running op, or behind the forward op whose gradient it computes."""
    return capture_source() if isinstance(context, str) or context.source is None else context.source


def light_event(parent: Event, func: Any, plan: OpPlan, phase: str, context: Context) -> Event:
    """Return an event without sites, for an op that is not digested but may own an autograd node."""
    event = Event(parent, func, phase, context, [], [], [], 0)
    event.op_base = plan.base
    event.is_in_place = bool(plan.writes)
    event.source = _source_of_event(event)
    return event


def _source_of_event(event: Event) -> tuple[str, ...]:
    """Return the lines behind an op.

    An op that a checkpoint repeats has none of the user's when the repeated module is torch's own: then those of its
    first run, unless that module was called from several places.
    """
    context = event.context
    source = source_of(context)
    if isinstance(context, str) or not context.recomputed or not is_of_torch(source):
        return source
    first_runs: set[tuple[str, ...]] = set()
    earlier = event.parent
    while earlier is not None:
        if earlier.func is event.func and earlier.phase == "forward" and earlier.module == event.module:
            first_runs.add(earlier.source)
        earlier = earlier.parent
    return first_runs.pop() if len(first_runs) == 1 else source
