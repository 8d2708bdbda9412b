"""By how much two tensors differ, from their bytes and in NumPy alone: counts, distances, places.

The bits of a floating-point number of n bits, read as a two's complement integer i, order numbers by size, negative
ones backwards. ``m(i) = i`` for ``i >= 0`` and ``m(i) = -2**(n-1) - i`` below makes that one ascending sequence, in
which neighbouring numbers are neighbouring integers (Bruce Dawson, "Comparing Floating Point Numbers", 2012). The
distance of two numbers in ULPs is ``abs(m(a) - m(b))``: 1 for neighbours, 0 for the two zeros, which differ all the
same. Integers count by their difference.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np

from det_callbacks.verdict import TensorNumbers

CHUNK_ELEMENTS = 1 << 20
"""Elements that are looked at together; takes some 50 MiB of the host's memory at most."""

_PARTS: Mapping[str, str] = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_UNSIGNED = frozenset({"bool", "uint8", "uint16", "uint32", "uint64"})
_SIGNED = frozenset({"int8", "int16", "int32", "int64"})
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"})
_KNOWN = _UNSIGNED | _SIGNED | _FLOATS
_POWERS = np.array([1 << power for power in range(64)], dtype=np.uint64)

_Array = np.ndarray[Any, Any]


def tensor_numbers(label: TensorNumbers, reference: _Array, current: _Array) -> TensorNumbers:
    """Return a label, which says what a tensor is, its shape and torch's name of its dtype, with how much it differs.

    ``reference`` and ``current`` are the bytes of its elements, row-major, as uint8; ValueError where they are not of
    that shape. A complex tensor counts by its parts, as ``torch.view_as_real`` has them; a dtype that is not known,
    such as a packed one, is counted and has no distances. It works in chunks, in some 150 MiB of the host's memory.
    """
    if label.dtype in _PARTS:
        label = replace(label, dtype=_PARTS[label.dtype], shape=(*label.shape, 2))
    num = label.num_elements
    width = reference.nbytes // num if num else 1
    if not reference.nbytes == current.nbytes == num * width or width not in (1, 2, 4, 8):
        raise ValueError(
            f"{reference.nbytes} and {current.nbytes} bytes are not two tensors of {num} elements; compare tensors of "
            "one dtype and shape"
        )
    sides = [np.ascontiguousarray(side).view(f"u{width}") for side in (reference, current)]
    tally = _Tally(label.dtype)
    for start in range(0, num, CHUNK_ELEMENTS):
        tally.add(start, *(side[start : start + CHUNK_ELEMENTS] for side in sides))
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
        (places,) = np.nonzero(reference != current)
        if not len(places):
            return
        self.num_differing += len(places)
        sides = reference[places], current[places]
        ours, theirs = (_values(side, self.dtype) for side in sides)
        distance, badness = np.zeros((2, len(places)), dtype=np.uint64)  # badness: 1 with an infinity, 2 with a NaN
        if self.dtype in _KNOWN:
            left, right = (_ordered(side, self.dtype) for side in sides)
            # the difference of two 64-bit integers fits 64 bits without a sign, and wraps to it
            distance = np.maximum(left, right).astype(np.uint64) - np.minimum(left, right).astype(np.uint64)
            with np.errstate(invalid="ignore", over="ignore"):  # signalling NaNs; distances beyond float64
                wide, other_wide = ours.astype(np.float64), theirs.astype(np.float64)
                badness[np.isinf(wide) | np.isinf(other_wide)] = 1
                badness[np.isnan(wide) | np.isnan(other_wide)] = 2
                # in float64 two large integers could be equal; their distance is exact
                absolute = np.abs(wide - other_wide) if self.dtype in _FLOATS else distance.astype(np.float64)
                absolute = absolute[badness == 0]
                sizes = np.abs(wide[badness == 0])
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
        distance[badness > 0] = 0
        candidates = np.flatnonzero(badness == badness.max())
        worst = int(candidates[np.argmax(distance[candidates])])
        rank = int(badness[worst]), int(distance[worst])
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
        return tuple(np.trim_zeros(bins, "b").tolist())


def _finite(largest: float) -> float | None:
    """Return the largest difference, None where there is none in float64."""
    return largest if 0 <= largest < inf else None


def _ordered(words: _Array, dtype: str) -> _Array:
    """Return the places of elements in the ascending sequence of their dtype."""
    if dtype in _UNSIGNED:
        return words.astype(np.uint64)
    signed = np.dtype(f"i{words.itemsize}")
    integers: _Array = words.view(signed).astype(np.int64)
    return integers if dtype in _SIGNED else np.where(integers < 0, np.iinfo(signed).min - integers, integers)


def _values(words: _Array, dtype: str) -> _Array:
    """Return the numbers that bits stand for, exactly; the bits of a dtype that is not known."""
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "float8_e5m2":  # the upper half of a float16
        return (words.astype(np.uint16) << np.uint16(8)).view(np.float16)
    if dtype == "float8_e4m3fn":  # a float16 but for the bias, and for NaN in the place of the largest numbers
        wide = words.astype(np.uint16)
        scaled: _Array = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).view(np.float16).astype(np.float32) * 256
        scaled[(wide & 0x7F) == 0x7F] = np.nan
        return scaled
    return words.view(dtype) if dtype in _KNOWN else words
