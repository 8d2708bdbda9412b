"""How far two tensors are apart: differing elements, and units in the last place (ULPs).

The bits of a floating-point number of n bits, read as a two's complement integer i, order numbers by size, negative
ones backwards. ``m(i) = i`` for ``i >= 0`` and ``m(i) = -2**(n-1) - i`` below makes that one ascending sequence, in
which neighbouring numbers are neighbouring integers (Bruce Dawson, "Comparing Floating Point Numbers", 2012). The
distance of two numbers is ``abs(m(a) - m(b))``: 1 for neighbours, 0 for the two zeros, which differ all the same. NaNs
lie beyond infinity: one that appears has a large distance, another payload that of the payloads.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 20
"""Elements that are looked at together; takes some 50 MiB of the host's memory at most."""

_BITS: dict[int, tuple[torch.dtype, type[np.signedinteger[Any]], type[np.unsignedinteger[Any]]]] = {
    1: (torch.uint8, np.int8, np.uint8),
    2: (torch.int16, np.int16, np.uint16),
    4: (torch.int32, np.int32, np.uint32),
    8: (torch.int64, np.int64, np.uint64),
}
# One NaN and no negative zero: the bits of that zero are the NaN.
_FINITE_UNSIGNED_ZERO = frozenset({torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
_UNSIGNED = frozenset({torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float8_e8m0fnu})
_SIGNED = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})
_FLOATS = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2}
)
_PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def count_differing(first: Tensor, second: Tensor) -> tuple[int, int | None]:
    """Return how many elements differ in their bits, and the largest distance among them in ULPs.

    Integers and bools count by their absolute difference, complex numbers by the larger of the distances of their two
    parts. Works in chunks; of tensors on other devices only the elements that differ come to the host, after one
    synchronisation a chunk. Tensors that are not dense in the same order are copied once.

    Args:
        first: an ordinary strided tensor.
        second: one of the same shape and dtype, on any device.

    Returns:
        The number of elements, and the distance: 0 when none differs, None for dtypes without one (packed and
        sub-byte ones).

    Raises:
        ValueError: if shapes, dtypes or layouts differ, or a tensor is not an ordinary strided one.

    Example:
        >>> import torch
        >>> count_differing(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002384185791]))
        (1, 1)
    """
    if first.shape != second.shape or first.dtype != second.dtype:
        raise ValueError(
            f"elements of {first.dtype} {tuple(first.shape)} and {second.dtype} {tuple(second.shape)} have no order in "
            "common; compare tensors of one dtype and shape"
        )
    for tensor in (first, second):
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise ValueError("only ordinary strided tensors can be counted; compare what this one is made of")
    if first.device != second.device:
        first, second = first.cpu(), second.cpu()
    num_differing, largest = 0, 0
    for one, other in _chunks(paired_bits(first, second)):
        differs = one != other
        if differs.dim() > 1:
            differs = differs.any(1)
        num = int(differs.sum())
        if num:
            num_differing += num
            distance = _largest_distance(one[differs], other[differs], first.dtype)
            largest = -1 if distance is None or largest < 0 else max(largest, distance)
    return num_differing, None if largest < 0 else largest


def paired_bits(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bits of two tensors of one shape and dtype as integers, row-major; a complex one is a row of two."""
    first, second = first.detach().resolve_conj().resolve_neg(), second.detach().resolve_conj().resolve_neg()
    rows: tuple[int, ...] = (first.numel(),)
    if first.dtype in _PARTS:
        first, second = torch.view_as_real(first), torch.view_as_real(second)
        rows = (*rows, 2)
    bits, _, _ = _BITS[first.element_size()]
    return first.view(bits).reshape(rows), second.view(bits).reshape(rows)


def _chunks(pair: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, pair[0].shape[0], CHUNK_ELEMENTS):
        yield pair[0][start : start + CHUNK_ELEMENTS], pair[1][start : start + CHUNK_ELEMENTS]


def _largest_distance(first: Tensor, second: Tensor, dtype: torch.dtype) -> int | None:
    found = distances(first.cpu().numpy(), second.cpu().numpy(), dtype)
    return None if found is None else int(found.max())


def distances(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any], dtype: torch.dtype) -> np.ndarray | None:
    """Return how far elements are apart, element by element.

    Args:
        first: bits, as ``paired_bits`` gives them.
        second: of as many elements.
        dtype: of the tensors they are of.

    Returns:
        uint64, of the same shape; None for dtypes without a distance.
    """
    dtype = _PARTS.get(dtype, dtype)
    one, other = _ordered(first, dtype), _ordered(second, dtype)
    if one is None or other is None:
        return None
    high, low = np.maximum(one, other), np.minimum(one, other)
    # the difference of two 64-bit integers fits 64 bits without a sign, and wraps to it
    difference: np.ndarray = high.astype(np.uint64) - low.astype(np.uint64)
    return difference


def _ordered(bits: np.ndarray[Any, Any], dtype: torch.dtype) -> np.ndarray[Any, Any] | None:
    """Return the places of elements in the ascending sequence of their dtype."""
    _, signed, unsigned = _BITS[bits.itemsize]
    if dtype in _UNSIGNED:
        return bits.view(unsigned).astype(np.uint64)
    integers = bits.view(signed).astype(np.int64)
    if dtype in _SIGNED:
        return integers
    if dtype not in _FLOATS and dtype not in _FINITE_UNSIGNED_ZERO:
        return None
    lowest = int(np.iinfo(signed).min)
    places = np.where(integers < 0, lowest - integers, integers)
    if dtype in _FINITE_UNSIGNED_ZERO:
        places[integers == lowest] = -lowest
    return places
