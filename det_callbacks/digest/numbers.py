"""Measures by how much two tensors differ, from their bytes, with NumPy only:
counts, distances, places.

A distance has one definition everywhere: in units in the last place of the element or, if that is
larger, of the root mean square of its tensor, because near zero a unit of the element is
meaningless. The distance of integers is their difference.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np

CHUNK_ELEMENTS = 1 << 20
"""Elements to process at a time, in at most 50 MiB of host memory."""

PARTS: Mapping[str, str] = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
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
_SMALLEST: Mapping[str, float] = {  # positive number of a dtype
    **{"float64": 2**-1074, "float32": 2**-149, "float16": 2**-24, "bfloat16": 2**-133},
    **{"float8_e4m3fn": 2**-9, "float8_e5m2": 2**-16},
}


def epsilon(dtype: str) -> float:
    """Return the distance from 1 to the next number of a dtype; 0 for integers."""
    return _EPSILONS.get(PARTS.get(dtype, dtype), 0.0)


def default_tolerance(dtype: str) -> Tolerance:
    """Return the tolerance of ``torch.testing.assert_close`` for a dtype:
    0 for integers and float8.
    """
    return _TOLERANCES.get(PARTS.get(dtype, dtype), Tolerance(0.0, 0.0))


def coarser(reference: str, current: str) -> str:
    """Return the dtype with the larger epsilon."""
    return max(reference, current, key=epsilon)


def can_measure(dtype: str) -> bool:
    """Return whether ``measure`` supports a dtype."""
    return dtype in _KNOWN or dtype in PARTS


@dataclass(slots=True, kw_only=True)
class Measure:
    """By how much a tensor differs: in bits or, if the dtypes differ, in numbers.

    Attributes:
        num_nan: elements that differ and of which one or both are NaN.
        num_inf: likewise, of which one or both are infinite and none is NaN.
        num_unknown: elements without a distance: NaN or infinite on one side only, of an unknown
            dtype, or float64 cannot represent it.
        max_ulps: largest distance of finite elements that differ, in units in the last place of the
            element, or of the tensor's root mean square if that is larger, rounded up; for
            integers, the difference. None if there is none, or float64 cannot represent it.
        max_relative: likewise, the distance divided by the element, or by the root mean square if
            that is larger.
        max_absolute: likewise, the distance.
        excess: the largest distance divided by its tolerance; infinite for a tolerance of 0 or an
            unknown distance.
        bins: number of elements that differ by 0 ULPs, 1, 2 to 3, 4 to 7 and so on.
        first: flat index and values, as text, of the first element that differs.
        worst: the same, after its rank: NaN, infinity, distance.
    """

    num_elements: int
    num_differing: int = 0
    num_nan: int = 0
    num_inf: int = 0
    num_unknown: int = 0
    max_ulps: int | None = None
    max_relative: float | None = None
    max_absolute: float | None = None
    excess: float = 0.0
    bins: _Array = field(
        default_factory=lambda: np.zeros(65, dtype=np.int64), compare=False, repr=False
    )
    first: tuple[int, tuple[str, str]] | None = None
    worst: tuple[tuple[int, float], int, tuple[str, str]] | None = None

    @property
    def histogram(self) -> tuple[int, ...]:
        """``bins`` with all elements that do not differ at 0 ULPs."""
        bins = self.bins.copy()
        bins[0] += self.num_elements - self.num_differing
        return tuple(np.trim_zeros(bins, "b").tolist())

    @property
    def ulp(self) -> int | None:
        """The distance in units in the last place, or None if an element has none."""
        return None if self.num_unknown else self.max_ulps or 0

    @property
    def relative(self) -> float | None:
        """The relative distance, or None if an element has none."""
        return None if self.num_unknown else self.max_relative or 0.0

    @property
    def absolute(self) -> float | None:
        """The distance, or None if an element has none."""
        return None if self.num_unknown else self.max_absolute or 0.0

    def add(
        self,
        start: int,
        words: Sequence[_Array],
        dtypes: Sequence[str],
        size: float,
        bound: Tolerance,
    ) -> None:
        """Add a chunk of the elements from ``start`` on; ``size`` is the root mean square."""
        differs = words[0] != words[1]
        if dtypes[0] != dtypes[1]:
            reference, current = map(_wide, words, dtypes)
            differs = ~((reference == current) | (np.isnan(reference) & np.isnan(current)))
        (places,) = np.nonzero(differs)
        if not len(places):
            return
        words = [side[places] for side in words]
        self.num_differing += len(places)
        badness, distance = np.zeros(len(places), dtype=np.int8), np.zeros(len(places))
        if _KNOWN.issuperset(dtypes):
            reference, current = map(_wide, words, dtypes)
            badness[np.isinf(reference) | np.isinf(current)] = 1
            badness[np.isnan(reference) | np.isnan(current)] = 2
            is_unknown = (badness > 0) & ~(np.isnan(reference) & np.isnan(current))
            apart, ulps, relative, excess = _distances(
                words, dtypes, reference, current, size, bound
            )
            is_finite = badness == 0
            has_number = is_finite & np.isfinite(apart) & np.isfinite(ulps)
            self.num_unknown += int((is_unknown | (is_finite & ~has_number)).sum())
            self.excess = (
                inf
                if self.num_unknown
                else max(self.excess, float(np.max(excess[has_number], initial=0)))
            )
            for name, sizes in (
                ("max_ulps", ulps),
                ("max_relative", relative),
                ("max_absolute", apart),
            ):
                if is_finite.any():
                    setattr(
                        self, name, max(getattr(self, name) or 0, sizes[is_finite].max().item())
                    )
            self.bins += np.bincount(_bit_lengths(ulps[is_finite]), minlength=65)
            distance = np.where(is_finite, ulps, 0)
        else:
            self.num_unknown += len(places)
            self.excess = inf
        self.num_nan += int((badness == 2).sum())
        self.num_inf += int((badness == 1).sum())
        candidates = np.flatnonzero(badness == badness.max())
        worst = int(candidates[np.argmax(distance[candidates])])
        rank = int(badness[worst]), distance[worst].item()
        values = [*map(_values, words, dtypes)]
        if self.first is None:
            self.first = start + int(places[0]), (str(values[0][0]), str(values[1][0]))
        if self.worst is None or rank > self.worst[0]:
            self.worst = (
                rank,
                start + int(places[worst]),
                (str(values[0][worst]), str(values[1][worst])),
            )


def measure(
    reference: _Array,
    current: _Array,
    dtypes: tuple[str, str],
    *,
    tolerance: Tolerance | None = None,
    root_mean_square: float | None = None,
) -> Measure:
    """Return by how much elements differ; elements of two dtypes are compared as numbers,
    in ULPs of the coarser one.

    ``reference`` and ``current`` are the bytes, uint8, of equally many elements; complex ones count
    as two. NaN equals NaN, and 0 equals -0. For a sample, pass the ``root_mean_square`` of the
    whole tensor. The default ``tolerance`` is that of ``torch.testing`` for the coarser dtype. An
    unknown dtype, such as a packed one, has counts but no distances. Works in chunks, in 150 MiB.
    """
    bound = default_tolerance(coarser(*dtypes)) if tolerance is None else tolerance
    kinds = [PARTS.get(dtype, dtype) for dtype in dtypes]
    words = [
        np.ascontiguousarray(side).view(f"u{_WIDTHS.get(kind, 1)}")
        for side, kind in zip((reference, current), kinds, strict=True)
    ]
    num = len(words[0])
    if num != len(words[1]):
        raise ValueError(
            f"{num} and {len(words[1])} elements have no partners; compare tensors of one shape"
        )
    total = Measure(num_elements=num)
    if kinds[0] == kinds[1] and np.array_equal(words[0], words[1]):
        return total
    size = root_mean_square
    if size is None:
        size = _root_mean_square(words[0], kinds[0]) if kinds[0] in _KNOWN else 0.0
    for start in range(0, num, CHUNK_ELEMENTS):
        total.add(
            start, [side[start : start + CHUNK_ELEMENTS] for side in words], kinds, size, bound
        )
    ulps, relative, absolute = (
        None if largest is None or largest == inf else largest
        for largest in (total.max_ulps, total.max_relative, total.max_absolute)
    )
    return replace(
        total,
        max_ulps=None if ulps is None else ceil(ulps),
        max_relative=relative,
        max_absolute=absolute,
    )


def _distances(
    words: Sequence[_Array],
    dtypes: Sequence[str],
    reference: _Array,
    current: _Array,
    size: float,
    bound: Tolerance,
) -> tuple[_Array, _Array, _Array, _Array]:
    """Return the distances: as they are, in ULPs, relative, and as multiples of the tolerance."""
    dtype = coarser(*dtypes)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        apart, sizes = np.abs(reference - current), np.abs(reference)
        scale = np.maximum(sizes, size)
        scale = np.where(scale > 0, scale, np.abs(current))  # if the reference is zero
        # in float64, two large integers could become equal
        if dtypes[0] == dtypes[1] and not epsilon(dtype):
            ulps = _distance(words, dtype)
            apart = ulps.astype(np.float64)
        else:
            ulps = apart / _spacing(scale, dtype)
        parts = apart / scale, apart / (bound.atol + bound.rtol * sizes)
        return apart, ulps, *(np.where(apart == 0, 0, part) for part in parts)


def _root_mean_square(words: _Array, dtype: str) -> float:
    """Return the root mean square, as if elements that are not finite were zero."""
    squares = 0.0
    for start in range(0, len(words), CHUNK_ELEMENTS):
        values = _wide(words[start : start + CHUNK_ELEMENTS], dtype)
        with np.errstate(over="ignore"):
            squares += float(np.square(values[np.isfinite(values)]).sum())
    size: float = (min(squares, _LARGEST) / max(len(words), 1)) ** 0.5
    return size


def _wide(words: _Array, dtype: str) -> _Array:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return _values(words, dtype).astype(np.float64)


def _distance(words: Sequence[_Array], dtype: str) -> _Array:
    """Return the distance of integers, uint64: the difference of two 64-bit integers fits, and
    wraps to, that type.
    """
    sides = [side.view(f"i{side.itemsize}") if dtype in _SIGNED else side for side in words]
    distance: _Array = np.maximum(*sides).astype(np.uint64) - np.minimum(*sides).astype(np.uint64)
    return distance


def _bit_lengths(ulps: _Array) -> _Array:
    """Return 0 for 0, 1 for distances up to 1, 2 for those up to 3, and so on, at most 64."""
    if ulps.dtype == np.uint64:
        return np.searchsorted(_POWERS, ulps, side="right")
    lengths: _Array = np.frexp(np.minimum(np.ceil(ulps), 2.0**63))[1]
    return lengths


def _spacing(sizes: _Array, dtype: str) -> _Array:
    """Return the distance from each number to the next larger one of the dtype; 1 for integers."""
    if not epsilon(dtype):
        return np.ones_like(sizes)
    _, exponents = np.frexp(sizes)
    spacing: _Array = np.maximum(np.ldexp(epsilon(dtype), exponents - 1), _SMALLEST[dtype])
    return spacing


def _values(words: _Array, dtype: str) -> _Array:
    """Return the exact numbers that bits represent; for an unknown dtype, the bits."""
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "float8_e5m2":  # the upper half of a float16
        return (words.astype(np.uint16) << np.uint16(8)).view(np.float16)
    if dtype == "float8_e4m3fn":  # other bias; NaN replaces the largest numbers
        wide = words.astype(np.uint16)
        scaled: _Array = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).view(np.float16).astype(
            np.float32
        ) * 256
        scaled[(wide & 0x7F) == 0x7F] = np.nan
        return scaled
    return words.view(dtype) if dtype in _KNOWN else words
