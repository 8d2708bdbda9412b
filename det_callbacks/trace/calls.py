"""What one call of an op wrote."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from det_callbacks.trace.components import has_parts
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


def tensors_read(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments of a call that it reads, and does not write."""
    written = {id(tensor) for tensor in written_arguments(plan, args, kwargs)}
    if kwargs.get("beta") == 0:  # baddbmm and its like ignore what they would add to
        args = args[1:]
    read: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        items = value if isinstance(value, list | tuple) else (value,)
        read.extend(item for item in items if isinstance(item, Tensor) and id(item) not in written)
    return read


def in_flight(
    plan: OpPlan, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], set[torch.device]]:
    """Return the tensors that a call copies to the host without anybody having waited for it, and where from."""
    index = plan.argument_names.index("non_blocking")
    is_non_blocking = args[index] if index < len(args) else kwargs.get("non_blocking", False)
    written = written_arguments(plan, args, kwargs) if plan.writes else [out] if isinstance(out, Tensor) else []
    on_host = [tensor for tensor in written if tensor.is_cpu] if is_non_blocking else []
    if not on_host:
        return [], set()
    return on_host, {value.device for value in tensors_in(args) if not value.is_cpu}


def goes_to_device(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a copy's target is not on the host: then the host need not have waited for what it reads."""
    if plan.writes:
        return any(not tensor.is_cpu for tensor in written_arguments(plan, args, kwargs))
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != "cpu"


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values and in the lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def comes_apart(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a mode has to take an op apart, because it is composite and nobody did so before.

    Otherwise autograd does, and what still comes is called inside some kernel. Nested tensors, for instance, have
    kernels of their own for it.
    """
    if plan.whole is None:
        return False
    tensors = list(tensors_in((*args, *kwargs.values())))
    if any(has_parts(tensor) or tensor.is_nested or tensor.is_quantized for tensor in tensors):
        return False
    return torch.is_inference_mode_enabled() or (bool(tensors) and all(tensor.is_inference() for tensor in tensors))


def _is_training(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if "training" not in plan.argument_names:
        return True
    index = plan.argument_names.index("training")
    return bool(args[index] if index < len(args) else kwargs.get("training"))
