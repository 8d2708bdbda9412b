"""Whether two outputs have the same bits, and how far they are apart."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from det_callbacks.digest import digest_output, digest_tensor
from det_callbacks.digest.numbers import tensor_numbers
from det_callbacks.equivalence.copies import is_special
from det_callbacks.runs.values import scalar_bits
from det_callbacks.trace.components import has_parts, parts_of
from det_callbacks.verdict import TensorNumbers

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How two outputs differ; see ``OpMismatch``."""

    shape: tuple[int, ...]
    dtype: str
    num_elements: int
    num_differing: int
    max_ulps: int | None


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
    if first.layout is not torch.strided or first.is_nested:
        return digest_tensor(first) == digest_tensor(second)
    if (
        not first.is_cpu
        and not any(is_special(one) or torch._is_zerotensor(one) for one in (first, second))
        and first.element_size() in _BITS
        and first.device == second.device
    ):
        bits = _BITS[first.element_size()]  # on the device: a digest would be taken on the host
        one, other = first.resolve_conj().resolve_neg(), second.resolve_conj().resolve_neg()
        return torch.equal(one.view(bits), other.view(bits))
    if first.stride() == second.stride():
        return digest_output(first) == digest_output(second)
    return digest_tensor(first) == digest_tensor(second)


def difference_of(first: Any, second: Any) -> Difference:
    """Return how two outputs that have not the same bits differ."""
    if not isinstance(first, Tensor):
        return _difference_of_numbers(first, second)
    counted: tuple[int, int | None] = (first.numel(), None)
    if isinstance(second, Tensor) and _sizes(first) == _sizes(second) and first.dtype == second.dtype:
        pairs = [*zip(_elements(first), _elements(second), strict=False)]
        if pairs and all(one.shape == other.shape and one.dtype == other.dtype for one, other in pairs):
            counts = [tensor_numbers(TensorNumbers(tensor=""), one, other) for one, other in pairs]
            known = [one.max_ulps for one in counts if one.max_ulps is not None]
            # parts that differ in nothing that is counted: a scale, a flag
            counted = sum(one.num_differing for one in counts) or first.numel(), max(known, default=None)
    return Difference(
        shape=_sizes(first),
        dtype=str(first.dtype).removeprefix("torch."),
        num_elements=first.numel(),
        num_differing=counted[0],
        max_ulps=counted[1],
    )


def _difference_of_numbers(first: Any, second: Any) -> Difference:
    distance = None
    if type(first) is type(second):
        if isinstance(first, bool | int):
            distance = abs(int(first) - int(second))
        elif isinstance(first, float | complex):
            dtype = torch.float64 if isinstance(first, float) else torch.complex128
            one, other = (torch.tensor(value, dtype=dtype, device="cpu") for value in (first, second))
            distance = tensor_numbers(TensorNumbers(tensor=""), one, other).max_ulps
    return Difference(shape=(), dtype=type(first).__name__, num_elements=1, num_differing=1, max_ulps=distance)


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape; of a nested tensor the number of its tensors, whose shapes count one by one."""
    return (tensor.size(0),) if tensor.is_nested and tensor.layout is torch.strided else tuple(tensor.shape)


def _elements(tensor: Tensor) -> list[Tensor]:
    """Return ordinary strided tensors that hold a tensor's elements, none where they cannot be had."""
    if tensor.is_nested and tensor.layout is torch.strided:
        return [*tensor.unbind()]
    if has_parts(tensor):
        return [part for part in parts_of(tensor) if not is_special(part)]
    return [tensor.int_repr()] if tensor.is_quantized else [tensor]
