"""What one call of an op wrote."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from det_callbacks.trace.overloads import OpPlan


def written_arguments(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that a call writes, in the order of the schema."""
    written: list[Tensor] = []
    untouched = plan.hidden_writes if plan.hidden_writes and not _is_training(plan, args, kwargs) else ()
    for write in plan.writes:
        if write.name in untouched:
            continue
        if write.name == plan.declared_only and kwargs.get("grad_scale") is None:
            continue
        value = args[write.index] if write.index < len(args) else kwargs.get(write.name)
        if isinstance(value, Tensor):
            written.append(value)
        elif isinstance(value, list | tuple):
            written.extend(item for item in value if isinstance(item, Tensor))
    return written


def written_by_call(plan: OpPlan, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
    """Return what a call wrote: fresh tensors and numbers first, then the arguments it wrote."""
    if not plan.fresh_returns:
        return written_arguments(plan, args, kwargs)
    returned = out if isinstance(out, list | tuple) and not plan.returns_one else (out,)
    outputs: list[Any] = []
    for index in plan.fresh_returns:
        if index in plan.opaque_outputs or index >= len(returned):
            continue
        value = returned[index]
        if isinstance(value, list | tuple):
            outputs.extend(item for item in value if item is not None)
        elif value is not None:
            outputs.append(value)
    if plan.writes:
        outputs.extend(written_arguments(plan, args, kwargs))
    return outputs


def is_in_flight(plan: OpPlan, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call copies from a device to the host without anybody having waited for it."""
    index = plan.argument_names.index("non_blocking")
    is_non_blocking = args[index] if index < len(args) else kwargs.get("non_blocking", False)
    if not is_non_blocking or not isinstance(out, Tensor) or not out.is_cpu:
        return False
    return any(isinstance(value, Tensor) and not value.is_cpu for value in args)


def _is_training(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if "training" not in plan.argument_names:
        return True
    index = plan.argument_names.index("training")
    return bool(args[index] if index < len(args) else kwargs.get("training"))
