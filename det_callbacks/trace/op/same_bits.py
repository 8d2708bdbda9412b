"""Whether two outputs of an op have the same bits, and by how much they differ."""

from typing import Any

import torch
from torch import Tensor

from det_callbacks.digest.components import INTEGERS, digest_tensor, measure_tensors, require_storage
from det_callbacks.digest.numbers import Measure
from det_callbacks.internals.torch import is_zero_tensor
from det_callbacks.runs.program import scalar_bits
from det_callbacks.trace.op.components import has_parts


def has_same_bits(first: Any, second: Any) -> bool:
    """Return whether two outputs have the same bits, whatever their strides; raise as ``digest_tensor`` does."""
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return type(first) is type(second) and scalar_bits(first) == scalar_bits(second)
    if first.dtype != second.dtype or first.layout != second.layout or _sizes(first) != _sizes(second):
        return False
    is_plain = not any(is_special(one) or one.is_conj() or one.is_neg() for one in (first, second))
    if is_plain and first.device == second.device and (words := INTEGERS.get(first.element_size())) is not None:
        require_storage(first)
        require_storage(second)
        # compares where the tensors are; a digest would copy them to the host
        return torch.equal(first.view(words), second.view(words))
    return digest_tensor(first) == digest_tensor(second)


def difference_of(first: Any, second: Any) -> dict[str, Any]:
    """Return shape, dtype and numbers for the ``OpMismatch`` of two outputs whose bits differ."""
    if not isinstance(first, Tensor):
        name = type(first).__name__
        return {"shape": (), "dtype": name, "num_elements": 1, "num_differing": 1, "max_ulps": None}
    dtype = str(first.dtype).removeprefix("torch.")
    found = Measure(num_elements=first.numel(), num_differing=first.numel())
    is_plain = isinstance(second, Tensor) and not is_special(first) and not is_special(second)
    if is_plain and first.shape == second.shape and first.dtype == second.dtype:
        found = measure_tensors(first, second)
    counts = {name: getattr(found, name) for name in ("num_elements", "num_differing", "max_ulps")}
    return {"shape": _sizes(first), "dtype": dtype, **counts}


def is_special(tensor: Tensor) -> bool:
    """Return whether a tensor is anything but strided elements in a storage."""
    return has_parts(tensor) or tensor.is_quantized or tensor.is_nested or is_zero_tensor(tensor)


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape; for a nested tensor, the number of its tensors."""
    return (tensor.size(0),) if tensor.is_nested and tensor.layout is torch.strided else tuple(tensor.shape)
