"""By how much two tensors differ, from their bytes and in NumPy alone: counts, distances, places.

The bits of a floating-point number of n bits, read as a two's complement integer i, order numbers by size, negative
ones backwards. ``m(i) = i`` for ``i >= 0`` and ``m(i) = -2**(n-1) - i`` below makes that one ascending sequence, in
which neighbouring numbers are neighbouring integers (Bruce Dawson, "Comparing Floating Point Numbers", 2012). The
distance of two numbers in ULPs is ``abs(m(a) - m(b))``: 1 for neighbours, 0 for the two zeros, which differ all the
same. Integers count by their difference, complex numbers by the larger distance of their parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from typing import Any

import numpy as np

from det_callbacks.verdict import TensorNumbers

CHUNK_ELEMENTS = 1 << 20
"""Elements that are looked at together; takes some 50 MiB of the host's memory at most."""

_PARTS: Mapping[str, str] = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_UNSIGNED = frozenset({"bool", "uint8", "uint16", "uint32", "uint64", "float8_e8m0fnu"})
_SIGNED = frozenset({"int8", "int16", "int32", "int64"})
_FLOAT8: Mapping[str, tuple[int, int]] = {
    "float8_e4m3fn": (3, 7),
    "float8_e5m2": (2, 15),
    "float8_e4m3fnuz": (3, 8),
    "float8_e5m2fnuz": (2, 16),
}
"""dtype -> bits of the mantissa, bias of the exponent; the names end as in torch: without infinities ("fn"), and
without a negative zero, whose bits are the one NaN ("uz")."""
_KNOWN = _UNSIGNED | _SIGNED | {"float16", "bfloat16", "float32", "float64", *_FLOAT8, *_PARTS}
_POWERS = np.array([1 << power for power in range(64)], dtype=np.uint64)

_Array = np.ndarray[Any, Any]


def tensor_numbers(label: TensorNumbers, reference: _Array, current: _Array) -> TensorNumbers:
    """Return a label, which says what a tensor is, its shape and torch's name of its dtype, with how much it differs.

    ``reference`` and ``current`` are the bytes of its elements, row-major, as uint8; ValueError where they are not of
    that shape. A dtype that is not known, such as a packed one, is counted and has no distances. It works in chunks, in
    some 150 MiB of the host's memory, and takes 0.1 microseconds for each element that differs.
    """
    num = label.num_elements
    width = reference.nbytes // num if num else 1
    if reference.nbytes != current.nbytes or reference.nbytes != num * width or (num and not width):
        raise ValueError(
            f"{reference.nbytes} and {current.nbytes} bytes are not two tensors of {num} elements; compare tensors of "
            "one dtype and shape"
        )
    tally = _Tally(label.dtype)
    for start in range(0, num, CHUNK_ELEMENTS):
        rows = slice(start * width, (start + CHUNK_ELEMENTS) * width)
        tally.add(start, *(_words(side[rows], label.dtype, width) for side in (reference, current)))
    found = replace(
        label,
        num_differing=tally.num_differing,
        ulps=tally.histogram(num),
        num_nan=tally.num_nan,
        num_inf=tally.num_inf,
        max_ulps=tally.max_ulps,
        max_absolute=_finite(tally.max_absolute),
        max_relative=_finite(tally.max_relative),
    )
    if tally.first is None or tally.worst is None:
        return found
    (place, values), (_, worst, worst_values) = tally.first, tally.worst
    first, worst_place = (tuple(map(int, np.unravel_index(at, label.shape))) for at in (place, worst))
    return replace(found, first=first, first_values=values, worst=worst_place, worst_values=worst_values)


def _words(content: _Array, dtype: str, width: int) -> _Array:
    """Return the bits of elements as unsigned integers; a complex one, or one of odd width, is a row of several."""
    size = width // 2 if dtype in _PARTS else width
    size = size if size in (1, 2, 4, 8) else 1
    words: _Array = np.ascontiguousarray(content).view(f"u{size}")
    return words if size == width else words.reshape(-1, width // size)


@dataclass(slots=True)
class _Tally:
    """Gathers the elements that differ, chunk by chunk; places are flat, and values text."""

    dtype: str
    num_differing: int = 0
    num_nan: int = 0
    num_inf: int = 0
    max_ulps: int | None = None
    max_absolute: float = -1.0  # where no difference is finite
    max_relative: float = -1.0
    first: tuple[int, tuple[str, str]] | None = None
    worst: tuple[tuple[int, int], int, tuple[str, str]] | None = None  # led by how bad: NaN, infinity, then distance
    _bins: _Array = field(default_factory=lambda: np.zeros(65, dtype=np.int64))

    def add(self, start: int, reference: _Array, current: _Array) -> None:
        differs = reference != current
        (places,) = np.nonzero(differs if differs.ndim == 1 else differs.any(axis=1))
        if not len(places):
            return
        self.num_differing += len(places)
        sides = reference[places], current[places]
        ours, theirs = (_values(side, self.dtype) for side in sides)
        distance = _distances(*sides, self.dtype)
        badness = np.zeros(len(places), dtype=np.int64)  # 1 with an infinity, 2 with a NaN
        if self.dtype in _KNOWN:
            with np.errstate(invalid="ignore", over="ignore"):  # signalling NaNs; distances beyond float64
                wide = np.complex128 if self.dtype in _PARTS else np.float64
                one, other = ours.astype(wide), theirs.astype(wide)
                badness[np.isinf(one) | np.isinf(other)] = 1
                badness[np.isnan(one) | np.isnan(other)] = 2
                # in float64 two large integers could be equal; their distance is exact
                absolute = distance.astype(np.float64) if ours.dtype.kind in "iub" else np.abs(one - other)
                absolute, sizes = absolute[badness == 0], np.abs(one[badness == 0])
                relative = absolute[sizes > 0] / sizes[sizes > 0]
            self.max_absolute = float(np.max(absolute, initial=self.max_absolute))
            self.max_relative = float(np.max(relative, initial=self.max_relative))
            counted = distance[badness == 0]
            # how many powers of two are at most as large: 0 for 0, 1 for 1, 2 for 2 and 3
            self._bins += np.bincount(np.searchsorted(_POWERS, counted, side="right"), minlength=65)
            if len(counted):
                self.max_ulps = max(self.max_ulps or 0, int(counted.max()))
        self.num_nan += int((badness == 2).sum())
        self.num_inf += int((badness == 1).sum())
        worst_badness = int(badness.max())
        candidates = np.flatnonzero(badness == worst_badness)
        worst = int(candidates[0] if worst_badness else candidates[np.argmax(distance[candidates])])
        rank = worst_badness, 0 if worst_badness else int(distance[worst])
        if self.first is None:
            self.first = start + int(places[0]), (str(ours[0]), str(theirs[0]))
        if self.worst is None or rank > self.worst[0]:
            self.worst = rank, start + int(places[worst]), (str(ours[worst]), str(theirs[worst]))

    def histogram(self, num_elements: int) -> tuple[int, ...]:
        """Return the elements by distance, equal ones among those of 0 ULPs; () where there are no distances."""
        if self.num_differing and self.dtype not in _KNOWN:
            return ()
        bins = self._bins.copy()
        bins[0] += num_elements - self.num_differing
        filled = np.flatnonzero(bins)
        return tuple(bins[: filled[-1] + 1].tolist()) if len(filled) else ()


def _finite(largest: float) -> float | None:
    """Return the largest difference, None where there is none in float64."""
    return largest if 0 <= largest < inf else None


def _distances(first: _Array, second: _Array, dtype: str) -> _Array:
    """Return how far elements are apart as uint64; 0 for dtypes without a distance."""
    dtype = _PARTS.get(dtype, dtype)
    if dtype not in _KNOWN:
        return np.zeros(len(first), dtype=np.uint64)
    one, other = _ordered(first, dtype), _ordered(second, dtype)
    # the difference of two 64-bit integers fits 64 bits without a sign, and wraps to it
    difference: _Array = np.maximum(one, other).astype(np.uint64) - np.minimum(one, other).astype(np.uint64)
    return difference if difference.ndim == 1 else difference.max(axis=1)


def _ordered(words: _Array, dtype: str) -> _Array:
    """Return the places of elements in the ascending sequence of their dtype."""
    if dtype in _UNSIGNED:
        return words.astype(np.uint64)
    signed = np.dtype(f"i{words.itemsize}")
    integers: _Array = words.view(signed).astype(np.int64)
    if dtype in _SIGNED:
        return integers
    lowest = int(np.iinfo(signed).min)
    places = np.where(integers < 0, lowest - integers, integers)
    if dtype.endswith("uz"):
        places[integers == lowest] = -lowest
    return places


def _values(words: _Array, dtype: str) -> _Array:
    """Return the numbers that bits stand for, exactly; the bits of a dtype that is not known."""
    if dtype in _FLOAT8 or dtype == "float8_e8m0fnu":
        numbers: _Array = _numbers_of_8_bits(dtype)[words]
        return numbers
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "complex32":
        return words.view(np.float16).astype(np.float32).view(np.complex64)[:, 0]
    if dtype in _PARTS:
        return words.view(dtype)[:, 0]
    return words.view(dtype) if dtype in _KNOWN else words


@cache
def _numbers_of_8_bits(dtype: str) -> _Array:
    """Return the number of each of the 256 values of a byte."""
    bits = np.arange(256)
    if dtype == "float8_e8m0fnu":  # a power of two and nothing else
        return np.where(bits == 255, np.nan, 2.0 ** (bits - 127.0)).astype(np.float32)
    num_bits, bias = _FLOAT8[dtype]
    exponent, mantissa = (bits & 0x7F) >> num_bits, bits & ((1 << num_bits) - 1)
    hidden = np.where(exponent > 0, 1 << num_bits, 0)
    numbers = (mantissa + hidden) * 2.0 ** (np.maximum(exponent, 1) - bias - num_bits)
    if dtype == "float8_e5m2":
        numbers[exponent == 31] = np.where(mantissa[exponent == 31], np.nan, np.inf)
    elif dtype == "float8_e4m3fn":
        numbers[0x7F] = numbers[0xFF] = np.nan
    numbers = np.where(bits & 0x80, -numbers, numbers)
    if dtype.endswith("uz"):
        numbers[0x80] = np.nan
    narrow: _Array = numbers.astype(np.float32)
    return narrow
