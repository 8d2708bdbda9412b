"""What may look at what an op reads and writes before it is digested: to put other bits there, or to keep them."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from det_callbacks.trace.late_sites import LateSites
from det_callbacks.trace.names import NameTable, has_place
from det_callbacks.trace.overloads import OpPlan
from det_callbacks.trace.tree import Context, module_of


class OutputExchange(Protocol):
    """Told of the outputs of the ops it selects, in the order of the step."""

    def selects(self, phase: str, module: str, op: str) -> bool:
        """Return whether it wants the outputs of an op at this place."""

    def exchange(self, phase: str, module: str, op: str, outputs: Sequence[Any], late: LateSites) -> Sequence[Any]:
        """Return what to go on with: the same tensors, perhaps written to, and perhaps other numbers.

        What has to be known of tensors on a device is asked for in ``late``, of the step under way.
        """


def exchange_outputs(
    exchange: OutputExchange,
    plan: OpPlan,
    phase: str,
    context: Context,
    out: Any,
    outputs: Sequence[Any],
    late: LateSites,
) -> tuple[Any, Sequence[Any]]:
    """Let an op's outputs be exchanged; return what the op returns and what it wrote from here on."""
    module = module_of(context)
    if not outputs or not exchange.selects(phase, module, plan.name):
        return out, outputs
    exchanged = exchange.exchange(phase, module, plan.name, outputs, late)
    is_number = len(outputs) == 1 and outputs[0] is out and not isinstance(out, Tensor)
    return exchanged[0] if is_number else out, exchanged


class TensorKeeper(Protocol):
    """Told of the calls of the ops it selects, in the order of the step; it changes nothing."""

    def selects(self, phase: str, module: str, op: str) -> bool:
        """Return whether it wants to know of an op at this place."""

    def begin_call(self, op: str, reads: Sequence[tuple[str, str | None, Tensor]], late: LateSites) -> Any:
        """Take what a call is about to read: argument, qualified name of the tensor, and the tensor itself.

        What has to be known of tensors on a device is asked for in ``late``, of the step under way.

        Returns:
            What stands for the call in ``end_call``; None when it is not kept.
        """

    def end_call(self, call: Any, outputs: Sequence[Any], position: int) -> None:
        """Take what the call wrote; its first site is the first output after this position."""


def begin_kept_call(
    keeper: TensorKeeper,
    names: NameTable,
    plan: OpPlan,
    phase: str,
    context: Context,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    late: LateSites,
) -> Any:
    """Tell a keeper of a call that is about to be made; return what stands for it, None when nobody keeps it."""
    if not keeper.selects(phase, module_of(context), plan.name):
        return None
    reads = [
        (argument, names.of(tensor) if has_place(tensor) else None, tensor)
        for argument, tensor in _tensors_read(plan, args, kwargs)
    ]
    return keeper.begin_call(plan.name, reads, late)


def _tensors_read(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a call reads, by argument: not those that it only writes."""
    written_only = {write.name for write in plan.writes} if plan.is_overwrite else set()
    for name, value in (*zip(plan.argument_names, args, strict=False), *kwargs.items()):
        if name in written_only:
            continue
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                if isinstance(item, Tensor):
                    yield f"{name}[{index}]", item
