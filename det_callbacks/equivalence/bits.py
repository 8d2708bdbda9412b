"""Whether two outputs of an op have the same bits, and by how much they differ."""

from typing import Any

import torch
from torch import Tensor

from det_callbacks.digest import digest_output, digest_tensor
from det_callbacks.digest.numbers import tensor_numbers
from det_callbacks.equivalence.copies import is_special
from det_callbacks.runs.values import scalar_bits
from det_callbacks.verdict import TensorNumbers

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    if is_plain and not first.is_cpu and first.device == second.device and first.element_size() in _WORDS:
        words = _WORDS[first.element_size()]  # on the device: a digest would be taken on the host
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
        return {
            "shape": (),
            "dtype": type(first).__name__,
            "num_elements": 1,
            "num_differing": 1,
            "max_ulps": None,
        }
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


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape; of a nested tensor the number of its tensors, whose shapes count one by one."""
    return (tensor.size(0),) if tensor.is_nested and tensor.layout is torch.strided else tuple(tensor.shape)
