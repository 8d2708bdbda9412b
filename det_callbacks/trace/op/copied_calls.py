"""Calls of ops with copies of what they write, so that an op can run again."""

from typing import Any

import torch
from torch import Tensor, UntypedStorage

from det_callbacks.internals.torch import memory_address, storage_address
from det_callbacks.trace.op.components import holds_data
from det_callbacks.trace.op.same_bits import is_special
from det_callbacks.trace.tables.overloads import OPAQUE_WRITES, OpPlan, tensors_in, written_arguments

_ALIGNMENT = 64
"""Bytes that torch aligns host memory to."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


def copied_call(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Return the arguments of a call, those that it writes replaced by copies.

    Copies the storage of every written argument, and rebuilds each tensor argument on the copy, so arguments that
    share bytes still do.

    Raises:
        TypeError: a tensor is sparse, quantised, nested or a negative view, has no data, or is in
            memory that torch did not align, where kernels may sum in a different order.
    """
    scratch = (plan.argument(name, args, kwargs) for name in OPAQUE_WRITES.get(plan.base, ()))
    written = [*written_arguments(plan, args, kwargs), *(value for value in scratch if isinstance(value, Tensor))]
    tensors = {id(tensor): tensor for tensor in tensors_in((*args, *kwargs.values()))}
    if not all(map(holds_data, written)) or any(
        one.is_neg() or is_special(one) for one in (*tensors.values(), *written)
    ):
        raise TypeError("its tensors are not strided, or have no data")
    addresses = {storage_address(tensor.untyped_storage()) for tensor in written}
    on_storage: dict[int, list[Tensor]] = {}
    for tensor in tensors.values():
        if (address := storage_address(tensor.untyped_storage())) in addresses:
            on_storage.setdefault(address, []).append(tensor)
    copies: dict[int, Tensor] = {}
    for group in on_storage.values():
        if memory_address(group[0]) % _ALIGNMENT:
            raise TypeError("its memory is not aligned as torch aligns it")
        storage = group[0].untyped_storage().clone()
        copies.update((id(tensor), _rebuilt(tensor, storage)) for tensor in group)

    def replaced(value: Any) -> Any:
        if isinstance(value, Tensor):
            return copies.get(id(value), value)
        return type(value)(map(replaced, value)) if type(value) in (list, tuple) else value

    return replaced(args), {name: replaced(value) for name, value in kwargs.items()}


def _rebuilt(tensor: Tensor, storage: UntypedStorage) -> Tensor:
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return (copy.conj() if tensor.is_conj() else copy).requires_grad_(tensor.requires_grad)
