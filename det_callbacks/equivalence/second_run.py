"""A second run of an op: what it starts from, and whether it gave the same bits as the first.

Every storage that a written argument lies in is copied, and each tensor argument on it is rebuilt there, written or
not; strides, offsets and overlap are kept, and two arguments that view the same bytes still do.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage

# looked at in torch 2.13; _data_address is where the storage begins, and materialises no copy-on-write storage
from torch._C import _data_address, _set_conj, _set_neg  # type: ignore[attr-defined]  # not in torch's stubs

from det_callbacks.digest import INTEGERS, digest_output, digest_tensor, tensor_numbers
from det_callbacks.runs.program import scalar_bits
from det_callbacks.trace.components import has_parts
from det_callbacks.trace.overloads import tensors_in
from det_callbacks.verdict import TensorNumbers

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

_ALIGNMENT = 64
"""Bytes that torch aligns host memory to."""


def copied_call(call: Call, written: Sequence[Tensor]) -> Call | None:
    """Return the arguments of a call with copies of what it writes.

    None where one of them is a sparse, quantised or nested tensor: what of it is shared with the others is not known.
    None, too, where what is written lies in memory that is not torch's own and less aligned: kernels may sum in another
    order there.
    """
    args, kwargs = call
    tensors = {id(tensor): tensor for tensor in tensors_in((*args, *kwargs.values()))}
    if any(is_special(tensor) for tensor in (*tensors.values(), *written)):
        return None
    addresses = {tensor.untyped_storage()._cdata for tensor in written}
    on_storage: dict[int, list[Tensor]] = {}
    for tensor in tensors.values():
        if not torch._is_zerotensor(tensor) and (address := tensor.untyped_storage()._cdata) in addresses:
            on_storage.setdefault(address, []).append(tensor)
    copies: dict[int, Tensor] = {}
    for group in on_storage.values():
        if _data_address(group[0]) % _ALIGNMENT:
            return None
        storage = group[0].untyped_storage().clone()
        copies.update((id(tensor), _rebuilt(tensor, storage)) for tensor in group)

    def replaced(value: Any) -> Any:
        if isinstance(value, Tensor):
            return copies.get(id(value), value)
        return type(value)(map(replaced, value)) if type(value) in (list, tuple) else value

    return replaced(args), {name: replaced(value) for name, value in kwargs.items()}


def has_same_bits(first: Any, second: Any) -> bool:
    """Return whether two outputs are the same, bit for bit; strides are not part of it.

    Raises:
        TypeError: if a tensor has no bits that can be read.
        DetCallbacksError: if its storage is freed.
    """
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return type(first) is type(second) and scalar_bits(first) == scalar_bits(second)
    if first.dtype != second.dtype or first.layout != second.layout or _sizes(first) != _sizes(second):
        return False
    is_plain = not any(is_special(one) or torch._is_zerotensor(one) for one in (first, second))
    if is_plain and not first.is_cpu and first.device == second.device and first.element_size() in INTEGERS:
        words = INTEGERS[first.element_size()]  # on the device: a digest would be taken on the host
        one, other = first.resolve_conj().resolve_neg(), second.resolve_conj().resolve_neg()
        return torch.equal(one.view(words), other.view(words))
    if first.layout is torch.strided and not first.is_nested and first.stride() == second.stride():
        return digest_output(first) == digest_output(second)
    return digest_tensor(first) == digest_tensor(second)


def difference_of(first: Any, second: Any) -> dict[str, Any]:
    """Return shape, dtype and numbers for the ``OpMismatch`` of two outputs that have not the same bits."""
    if isinstance(first, float) and isinstance(second, float):
        one, other = (torch.tensor(value, dtype=torch.float64, device="cpu") for value in (first, second))
        return {**difference_of(one, other), "dtype": "float"}
    if not isinstance(first, Tensor):
        name = type(first).__name__
        return {"shape": (), "dtype": name, "num_elements": 1, "num_differing": 1, "max_ulps": None}
    num_differing, max_ulps = first.numel(), None
    is_plain = isinstance(second, Tensor) and not is_special(first) and not is_special(second)
    if is_plain and first.shape == second.shape and first.dtype == second.dtype:
        numbers = tensor_numbers(TensorNumbers(tensor=""), first, second)
        num_differing, max_ulps = numbers.num_differing, numbers.max_ulps
    return {
        "shape": _sizes(first),
        "dtype": str(first.dtype).removeprefix("torch."),
        "num_elements": first.numel(),
        "num_differing": num_differing,
        "max_ulps": max_ulps,
    }


def is_special(tensor: Tensor) -> bool:
    """Return whether a tensor is more than strided elements on a storage."""
    return has_parts(tensor) or tensor.is_quantized or tensor.is_nested


def _rebuilt(tensor: Tensor, storage: UntypedStorage) -> Tensor:
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        _set_conj(copy, True)
    if tensor.is_neg():
        _set_neg(copy, True)
    if tensor.requires_grad:
        copy.requires_grad_()
    return copy


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape; of a nested tensor the number of its tensors, whose shapes count one by one."""
    return (tensor.size(0),) if tensor.is_nested and tensor.layout is torch.strided else tuple(tensor.shape)
