"""Measures by how much two tensors differ, from their bytes, with NumPy only: counts, distances, places.

The bits of an n-bit floating-point number, read as a two's complement integer i, order numbers by size, negative ones
backwards. ``m(i) = i`` for ``i >= 0``, else ``m(i) = -2**(n-1) - i``, makes one ascending sequence in which
neighbouring numbers are neighbouring integers (Bruce Dawson, "Comparing Floating Point Numbers", 2012). The distance of
two numbers in ULPs is ``abs(m(a) - m(b))``: 1 for neighbours, and 0 for the two zeros, although their bits differ. The
distance of integers is their difference.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np

from det_callbacks.verdict import TensorNumbers

CHUNK_ELEMENTS = 1 << 20
"""Elements to process at a time, in at most 50 MiB of host memory."""

_PARTS: Mapping[str, str] = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_UNSIGNED = frozenset({"bool", "uint8", "uint16", "uint32", "uint64"})
_SIGNED = frozenset({"int8", "int16", "int32", "int64"})
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"})
_KNOWN = _UNSIGNED | _SIGNED | _FLOATS
_WIDTHS = {dtype: int(re.sub(r"\D*(\d*).*", r"\1", dtype) or 8) // 8 for dtype in _KNOWN}
_LARGEST = float(np.finfo(np.float64).max)
_POWERS = np.array([1 << power for power in range(64)], dtype=np.uint64)

_Array = np.ndarray[Any, Any]


class Tolerance(NamedTuple):
    """``abs(reference - current) <= atol + rtol * abs(reference)``, element by element."""

    rtol: float
    atol: float


_TOLERANCES: Mapping[str, Tolerance] = {
    "float16": Tolerance(1e-3, 1e-5),
    "bfloat16": Tolerance(1.6e-2, 1e-5),
    "float32": Tolerance(1.3e-6, 1e-5),
    "float64": Tolerance(1e-7, 1e-7),
}
_EPSILONS: Mapping[str, float] = {
    **{"float64": 2**-52, "float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7},
    **{"float8_e4m3fn": 2**-3, "float8_e5m2": 2**-2},
}


def epsilon(dtype: str) -> float:
    """Return the distance from 1 to the next number of a dtype; 0 for integers."""
    return _EPSILONS.get(_PARTS.get(dtype, dtype), 0.0)


def default_tolerance(dtype: str) -> Tolerance:
    """Return the tolerance of ``torch.testing.assert_close`` for a dtype: 0 for integers and float8."""
    return _TOLERANCES.get(_PARTS.get(dtype, dtype), Tolerance(0.0, 0.0))


def coarser(reference: str, current: str) -> str:
    """Return the dtype with the larger epsilon."""
    return max(reference, current, key=epsilon)


def can_measure(dtype: str) -> bool:
    """Return whether ``measure`` supports a dtype."""
    return dtype in _KNOWN or dtype in _PARTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """By how much a tensor differs: for each attribute, the largest value of all compared elements.

    ``ulp``, ``relative`` and ``absolute`` are None if an element is infinite or NaN on one side only.

    Attributes:
        ulp: units in the last place of the element, or of the tensor's root mean square if that is larger, rounded up;
            for integers, the difference.
        relative: the difference divided by the element, or by the root mean square if that is larger.
        excess: the difference divided by the tolerance; infinite for a tolerance of 0.
    """

    num_elements: int
    num_differing: int = 0
    ulp: int | None = 0
    relative: float | None = 0.0
    absolute: float | None = 0.0
    excess: float = 0.0


def measure(
    reference: _Array,
    current: _Array,
    dtypes: tuple[str, str],
    *,
    tolerance: Tolerance | None = None,
    root_mean_square: float | None = None,
) -> Measure:
    """Return by how much elements differ; elements of two dtypes are compared as numbers, in ULPs of the coarser one.

    ``reference`` and ``current`` are the bytes, uint8, of equally many elements. NaN equals NaN, and 0 equals -0. For a
    sample, pass the ``root_mean_square`` of the whole tensor. The default ``tolerance`` is that of ``torch.testing``
    for the coarser dtype. Works in chunks, in 100 MiB of memory.
    """
    dtype = coarser(*dtypes)
    rtol, atol = default_tolerance(dtype) if tolerance is None else tolerance
    sides = [_words(side, kind) for side, kind in zip((reference, current), dtypes, strict=True)]
    num = len(sides[0][0])
    if num != len(sides[1][0]):
        raise ValueError(f"{num} and {len(sides[1][0])} elements have no partners; compare tensors of one shape")
    if dtypes[0] == dtypes[1] and np.array_equal(sides[0][0], sides[1][0]):
        return Measure(num_elements=num)
    size = root_mean_square
    if size is None:
        size = statistics(*sides[0])["norm"] / max(num, 1) ** 0.5
    num_differing, is_finite, ulp, relative, absolute, excess = 0, True, 0.0, 0.0, 0.0, 0.0
    for start in range(0, num, CHUNK_ELEMENTS):
        chunks = [(words[start : start + CHUNK_ELEMENTS], kind) for words, kind in sides]
        reference_values, current_values = (_wide(*chunk) for chunk in chunks)
        with np.errstate(invalid="ignore"):  # infinities
            apart = np.abs(reference_values - current_values)
        if dtypes[0] == dtypes[1] and not epsilon(dtype):  # in float64, two large integers could become equal
            apart = _distance(*(_ordered(*chunk) for chunk in chunks)).astype(float)
        is_same = (reference_values == current_values) | (np.isnan(reference_values) & np.isnan(current_values))
        has_number = np.isfinite(apart)
        differs = np.where(has_number, apart > 0, ~is_same)
        num_differing += int(differs.sum())
        is_finite = is_finite and not bool((differs & ~has_number).any())
        (places,) = np.nonzero(differs & has_number)
        apart, sizes = apart[places], np.abs(reference_values[places])
        scale = np.maximum(sizes, size)
        scale = np.where(scale > 0, scale, np.abs(current_values[places]))  # if the reference is zero
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            relative = max(relative, float(np.max(apart / scale, initial=0)))
            excess = max(excess, float(np.max(apart / (atol + rtol * sizes), initial=0)))
            ulp = max(ulp, float(np.max(apart / _spacing(scale, dtype), initial=0)))
        absolute = max(absolute, float(np.max(apart, initial=0)))
    if not is_finite or not np.isfinite([ulp, relative, absolute]).all():
        nothing: dict[str, Any] = dict.fromkeys(("ulp", "relative", "absolute"))
        return Measure(num_elements=num, num_differing=num_differing, excess=inf, **nothing)
    sizes_of: dict[str, Any] = {"ulp": ceil(ulp), "relative": relative, "absolute": absolute, "excess": excess}
    return Measure(num_elements=num, num_differing=num_differing, **sizes_of)


def statistics(words: _Array, dtype: str) -> dict[str, Any]:
    """Return norm, mean and largest magnitude of the finite elements, and the counts of NaNs and infinities."""
    squares = total = largest = 0.0
    num_finite = num_nan = num_inf = 0
    for start in range(0, len(words), CHUNK_ELEMENTS):
        values = _wide(words[start : start + CHUNK_ELEMENTS], dtype)
        finite = values[np.isfinite(values)]
        num_nan += int(np.isnan(values).sum())
        num_inf += int(np.isinf(values).sum())
        num_finite += len(finite)
        with np.errstate(over="ignore"):
            squares += float(np.square(finite).sum())
        total += float(finite.sum())
        largest = max(largest, float(np.max(np.abs(finite), initial=0)))
    figures = {"norm": min(squares, _LARGEST) ** 0.5, "mean": total / max(num_finite, 1), "largest": largest}
    return {**figures, "nan": num_nan, "inf": num_inf}


def _words(content: _Array, dtype: str) -> tuple[_Array, str]:
    """Return the elements as integers of the same size, and their dtype; split complex elements into parts."""
    dtype = _PARTS.get(dtype, dtype)
    return np.ascontiguousarray(content).view(f"u{_WIDTHS[dtype]}"), dtype


def _wide(words: _Array, dtype: str) -> _Array:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return _values(words, dtype).astype(np.float64)


def _distance(reference: _Array, current: _Array) -> _Array:
    """Return the distance of integers, uint64: the difference of two 64-bit integers fits, and wraps to, that type."""
    distance: _Array = np.maximum(reference, current).astype(np.uint64) - np.minimum(reference, current).astype(
        np.uint64
    )
    return distance


def _spacing(sizes: _Array, dtype: str) -> _Array:
    """Return the distance from each number to the next larger one of the dtype; 1 for integers."""
    if not epsilon(dtype):
        return np.ones_like(sizes)
    _, exponents = np.frexp(sizes)
    spacing: _Array = np.ldexp(epsilon(dtype), exponents - 1)
    return spacing


def tensor_numbers(label: TensorNumbers, reference: _Array, current: _Array) -> TensorNumbers:
    """Return ``label``, which holds the name, shape and dtype of a tensor, completed with the differences.

    ``reference`` and ``current`` are the bytes of the elements, row-major, uint8; ValueError if they do not fit the
    shape. The elements of a complex tensor are split as by ``torch.view_as_real``; for an unknown dtype, such as a
    packed one, there are counts but no distances. Works in chunks, in 150 MiB of host memory.
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
    """Gathers the elements that differ, chunk by chunk, with flat indices, and values as text."""

    dtype: str
    num_differing: int = 0
    num_nan: int = 0
    num_inf: int = 0
    max_ulps: int | None = None
    max_absolute: float = -1.0  # if no difference is finite
    max_relative: float = -1.0
    first: tuple[int, tuple[str, str]] | None = None
    worst: tuple[tuple[int, int], int, tuple[str, str]] | None = None  # first by badness: NaN, infinity, distance
    _bins: _Array = field(default_factory=lambda: np.zeros(65, dtype=np.int64))

    def add(self, start: int, reference: _Array, current: _Array) -> None:
        (places,) = np.nonzero(reference != current)
        if not len(places):
            return
        self.num_differing += len(places)
        sides = reference[places], current[places]
        reference_values, current_values = (_values(side, self.dtype) for side in sides)
        distance, badness = np.zeros((2, len(places)), dtype=np.uint64)  # badness: 1 for an infinity, 2 for a NaN
        if self.dtype in _KNOWN:
            distance = _distance(*(_ordered(side, self.dtype) for side in sides))
            with np.errstate(invalid="ignore", over="ignore"):  # signalling NaNs; distances beyond float64
                reference_wide, current_wide = reference_values.astype(np.float64), current_values.astype(np.float64)
                badness[np.isinf(reference_wide) | np.isinf(current_wide)] = 1
                badness[np.isnan(reference_wide) | np.isnan(current_wide)] = 2
                # in float64, two large integers could become equal; their distance is exact
                is_float = self.dtype in _FLOATS
                absolute = np.abs(reference_wide - current_wide) if is_float else distance.astype(np.float64)
                absolute = absolute[badness == 0]
                sizes = np.abs(reference_wide[badness == 0])
                relative = absolute[sizes > 0] / sizes[sizes > 0]
            self.max_absolute = float(np.max(absolute, initial=self.max_absolute))
            self.max_relative = float(np.max(relative, initial=self.max_relative))
            counted = distance[badness == 0]
            # number of powers of two up to the distance: 0 for 0, 1 for 1, 2 for 2 and 3
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
            self.first = start + int(places[0]), (str(reference_values[0]), str(current_values[0]))
        if self.worst is None or rank > self.worst[0]:
            self.worst = rank, start + int(places[worst]), (str(reference_values[worst]), str(current_values[worst]))

    def histogram(self, num_elements: int) -> tuple[int, ...]:
        """Return counts of elements by distance, with equal ones at 0 ULPs; () if there are no distances."""
        if self.num_differing and self.dtype not in _KNOWN:
            return ()
        bins = self._bins.copy()
        bins[0] += num_elements - self.num_differing
        return tuple(np.trim_zeros(bins, "b").tolist())


def _finite(largest: float) -> float | None:
    """Return the largest difference, or None if float64 cannot represent it."""
    return largest if 0 <= largest < inf else None


def _ordered(words: _Array, dtype: str) -> _Array:
    """Return the index of each element in the ascending sequence of the dtype."""
    if dtype in _UNSIGNED:
        return words.astype(np.uint64)
    signed = np.dtype(f"i{words.itemsize}")
    integers: _Array = words.view(signed).astype(np.int64)
    return integers if dtype in _SIGNED else np.where(integers < 0, np.iinfo(signed).min - integers, integers)


def _values(words: _Array, dtype: str) -> _Array:
    """Return the exact numbers that bits represent; for an unknown dtype, the bits."""
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "float8_e5m2":  # the upper half of a float16
        return (words.astype(np.uint16) << np.uint16(8)).view(np.float16)
    if dtype == "float8_e4m3fn":  # other bias; NaN replaces the largest numbers
        wide = words.astype(np.uint16)
        scaled: _Array = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).view(np.float16).astype(np.float32) * 256
        scaled[(wide & 0x7F) == 0x7F] = np.nan
        return scaled
    return words.view(dtype) if dtype in _KNOWN else words
