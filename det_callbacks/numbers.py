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
from math import isfinite
from typing import Any

import numpy as np

from det_callbacks.verdict import TensorNumbers

CHUNK_ELEMENTS = 1 << 20
"""Elements that are looked at together; takes some 50 MiB of the host's memory at most."""

_PARTS: Mapping[str, str] = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_QUANTISED: Mapping[str, str] = {"quint8": "uint8", "qint8": "int8", "qint32": "int32"}
_UNSIGNED = frozenset({"bool", "uint8", "uint16", "uint32", "uint64", "float8_e8m0fnu"})
_SIGNED = frozenset({"int8", "int16", "int32", "int64"})
_NATIVE = frozenset({"float16", "float32", "float64"})
_FLOAT8: Mapping[str, tuple[int, int]] = {
    "float8_e4m3fn": (3, 7),
    "float8_e5m2": (2, 15),
    "float8_e4m3fnuz": (3, 8),
    "float8_e5m2fnuz": (2, 16),
}
"""dtype -> bits of the mantissa, bias of the exponent; the names end as in torch: without infinities ("fn"), and
without a negative zero, whose bits are the one NaN ("uz")."""
_POWERS = np.array([1 << power for power in range(64)], dtype=np.uint64)

_Array = np.ndarray[Any, Any]


def tensor_numbers(label: TensorNumbers, reference: _Array, current: _Array) -> TensorNumbers:
    """Return by how much a tensor differs from the reference's.

    Works in chunks of 2**20 elements, in some 150 MiB of the host's memory, and looks closer at elements that differ
    only: 0.1 microseconds each.

    Args:
        label: what the tensor is, its shape and its dtype by torch's name ("bfloat16"); the rest of it is filled in.
            A dtype that is not known, such as a packed one, is counted and has no distances.
        reference: the bytes of its elements, row-major, as uint8.
        current: likewise.

    Raises:
        ValueError: they are not the bytes of tensors of that shape.

    Example:
        >>> label = TensorNumbers(tensor="output 0", shape=(1, 2), dtype="float32")
        >>> one, other = np.array([1, 2], np.float32), np.array([1, 2.0000002384185791], np.float32)
        >>> found = tensor_numbers(label, one.view(np.uint8), other.view(np.uint8))
        >>> found.num_differing, found.max_ulps, found.first, found.ulps
        (1, 1, (0, 1), (1, 1))
    """
    num = label.num_elements
    width = reference.nbytes // num if num else 1
    if reference.nbytes != current.nbytes or reference.nbytes != num * width or (num and not width):
        raise ValueError(
            f"{reference.nbytes} and {current.nbytes} bytes are not two tensors of {num} elements; compare tensors of "
            "one dtype and shape"
        )
    dtype = _QUANTISED.get(label.dtype, label.dtype)
    tally = _Tally(dtype)
    for start in range(0, num, CHUNK_ELEMENTS):
        rows = slice(start * width, (start + CHUNK_ELEMENTS) * width)
        tally.add(start, *(_words(side[rows], dtype, width) for side in (reference, current)))
    found = replace(
        label,
        num_differing=tally.num_differing,
        ulps=tally.histogram(num),
        num_nan=tally.num_nan,
        num_inf=tally.num_inf,
        max_ulps=tally.max_ulps,
        max_absolute=tally.largest(0),
        max_relative=tally.largest(1),
    )
    if tally.first is None or tally.worst is None:
        return found
    return replace(
        found,
        first=_index(tally.first.place, label.shape),
        first_values=tally.first.values,
        worst=_index(tally.worst.place, label.shape),
        worst_values=tally.worst.values,
    )


def _words(content: _Array, dtype: str, width: int) -> _Array:
    """Return the bits of elements as unsigned integers; a complex one, or one of odd width, is a row of several."""
    size = width // 2 if dtype in _PARTS else width
    size = size if size in (1, 2, 4, 8) else 1
    words: _Array = np.ascontiguousarray(content).view(f"u{size}")
    return words if size == width else words.reshape(-1, width // size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Element:
    """One element that differs: how bad that is (NaN, infinity, distance), its flat place and its values as text."""

    rank: tuple[int, int]
    place: int
    values: tuple[str, str]


@dataclass(slots=True)
class _Tally:
    """Gathers the elements that differ, chunk by chunk."""

    dtype: str
    num_differing: int = 0
    num_nan: int = 0
    num_inf: int = 0
    max_ulps: int | None = None
    first: _Element | None = None
    worst: _Element | None = None
    _bins: _Array = field(default_factory=lambda: np.zeros(65, dtype=np.int64))
    _has_distance: bool = True
    _largest: list[float] = field(default_factory=lambda: [-1.0, -1.0])

    def add(self, start: int, reference: _Array, current: _Array) -> None:
        differs = reference != current
        (places,) = np.nonzero(differs if differs.ndim == 1 else differs.any(axis=1))
        if not len(places):
            return
        self.num_differing += len(places)
        one, other = reference[places], current[places]
        distance = _distances(one, other, self.dtype)
        values = _values(one, self.dtype), _values(other, self.dtype)
        is_nan, is_inf = (np.broadcast_to(found, places.shape) for found in self._compare(*values, distance))
        self.num_nan += int(is_nan.sum())
        self.num_inf += int(is_inf.sum())
        is_counted = ~(is_nan | is_inf)
        if distance is None:
            self._has_distance = False
            distance = np.zeros(len(places), dtype=np.uint64)
        elif is_counted.any():
            counted = distance[is_counted]
            # how many powers of two are at most as large: 0 for 0, 1 for 1, 2 for 2 and 3
            self._bins += np.bincount(np.searchsorted(_POWERS, counted, side="right"), minlength=65)
            self.max_ulps = max(self.max_ulps or 0, int(counted.max()))
        badness = np.where(is_nan, 2, np.where(is_inf, 1, 0))
        candidates = np.flatnonzero(badness == badness.max())
        worst = int(candidates[0] if badness.max() else candidates[np.argmax(distance[candidates])])
        for index in (0, worst):
            element = _Element(
                rank=(int(badness[index]), 0 if badness[index] else int(distance[index])),
                place=start + int(places[index]),
                values=(_text(values[0], one, index), _text(values[1], other, index)),
            )
            if index == 0:
                self.first = self.first or element
            if index == worst and (self.worst is None or element.rank > self.worst.rank):
                self.worst = element

    def _compare(
        self, ours: _Array | None, theirs: _Array | None, distance: _Array | None
    ) -> tuple[_Array | bool, _Array | bool]:
        """Note the largest absolute and relative differences; return which elements have a NaN, and an infinity."""
        if ours is None or theirs is None:
            return False, False
        if ours.dtype.kind in "iub":  # in float64 two large integers could be equal; their distance is the difference
            if distance is not None:
                self._note(distance.astype(np.float64), np.abs(ours.astype(np.float64)), np.ones(len(ours), dtype=bool))
            return False, False
        wide = np.complex128 if ours.dtype.kind == "c" else np.float64
        with np.errstate(invalid="ignore"):  # signalling NaNs
            ours, theirs = ours.astype(wide), theirs.astype(wide)
        is_nan = np.isnan(ours) | np.isnan(theirs)
        is_inf = (np.isinf(ours) | np.isinf(theirs)) & ~is_nan
        with np.errstate(over="ignore", invalid="ignore"):
            self._note(np.abs(ours - theirs), np.abs(ours), ~(is_nan | is_inf))
        return is_nan, is_inf

    def _note(self, absolute: _Array, sizes: _Array, is_finite: _Array) -> None:
        if not is_finite.any():
            return
        self._largest[0] = max(self._largest[0], float(absolute[is_finite].max()))
        is_relative = is_finite & (sizes > 0)
        if is_relative.any():
            with np.errstate(over="ignore"):
                relative = float((absolute[is_relative] / sizes[is_relative]).max())
            self._largest[1] = max(self._largest[1], relative)

    def largest(self, kind: int) -> float | None:
        """Return the largest absolute (0) or relative (1) difference; None where there is none in float64."""
        found = self._largest[kind]
        return found if found >= 0 and isfinite(found) else None

    def histogram(self, num_elements: int) -> tuple[int, ...]:
        """Return the elements by distance, equal ones among those of 0 ULPs; () where there are no distances."""
        if not self._has_distance:
            return ()
        bins = self._bins.copy()
        bins[0] += num_elements - self.num_differing
        filled = np.flatnonzero(bins)
        return tuple(bins[: filled[-1] + 1].tolist()) if len(filled) else ()


def _distances(first: _Array, second: _Array, dtype: str) -> _Array | None:
    """Return how far elements are apart as uint64; None for dtypes without a distance."""
    dtype = _PARTS.get(dtype, dtype)
    one, other = _ordered(first, dtype), _ordered(second, dtype)
    if one is None or other is None:
        return None
    # the difference of two 64-bit integers fits 64 bits without a sign, and wraps to it
    difference: _Array = np.maximum(one, other).astype(np.uint64) - np.minimum(one, other).astype(np.uint64)
    return difference if difference.ndim == 1 else difference.max(axis=1)


def _ordered(words: _Array, dtype: str) -> _Array | None:
    """Return the places of elements in the ascending sequence of their dtype."""
    if dtype in _UNSIGNED:
        return words.astype(np.uint64)
    signed = np.dtype(f"i{words.itemsize}")
    integers: _Array = words.view(signed).astype(np.int64)
    if dtype in _SIGNED:
        return integers
    if dtype not in _NATIVE and dtype not in _FLOAT8 and dtype != "bfloat16":
        return None
    lowest = int(np.iinfo(signed).min)
    places = np.where(integers < 0, lowest - integers, integers)
    if dtype.endswith("uz"):
        places[integers == lowest] = -lowest
    return places


def _values(words: _Array, dtype: str) -> _Array | None:
    """Return the numbers that bits stand for, exactly; None for a dtype that is not known."""
    if dtype in _SIGNED or (dtype in _UNSIGNED and dtype != "float8_e8m0fnu") or dtype in _NATIVE:
        return words.view(dtype)
    if dtype in ("complex64", "complex128"):
        return words.view(dtype)[:, 0]
    if dtype == "complex32":
        return words.view(np.float16).astype(np.float32).view(np.complex64)[:, 0]
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype in _FLOAT8 or dtype == "float8_e8m0fnu":
        numbers: _Array = _numbers_of_8_bits(dtype)[words]
        return numbers
    return None


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


def _text(values: _Array | None, words: _Array, index: int) -> str:
    """Return a value as the shortest text that no other number of its dtype has."""
    return str(words[index] if values is None else values[index])


def _index(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(index) for index in np.unravel_index(place, shape)) if shape else ()
