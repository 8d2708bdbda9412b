"""How far two tensors may be apart: by dtype, and by the size of the numbers.

The table is that of ``torch.testing.assert_close``: ``abs(base - control) <= atol + rtol * abs(base)``. Its ``atol`` is
made for numbers of the size of 1: a whole wrong gradient of 1e-6 would pass, and a right sum of 10,000 would not. So
here ``atol`` counts in units of a root mean square (RMS), and is at least ``rtol``, since the smallest element of a
tensor carries the rounding errors of the largest. Tolerances that are given are taken as they are.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

STANDARD: Mapping[torch.dtype, tuple[float, float]] = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex32: (1e-3, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
    # not in torch's table: a step to the next number
    torch.float8_e4m3fn: (0.125, 1e-5),
    torch.float8_e4m3fnuz: (0.125, 1e-5),
    torch.float8_e5m2: (0.25, 1e-5),
    torch.float8_e5m2fnuz: (0.25, 1e-5),
}
"""dtype -> (rtol, atol); the documentation of ``torch.testing.assert_close``, torch 2.13. Others have to be equal."""

Given = Mapping[torch.dtype, tuple[float, float]] | tuple[float, float] | torch.dtype | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far two tensors may be apart.

    Attributes:
        rtol: relative to the element of the base.
        atol: absolute, or a multiple of an RMS.
        is_scaled: whether ``atol`` is a multiple of an RMS.
    """

    rtol: float
    atol: float
    is_scaled: bool

    def absolute(self, rms: float) -> float:
        """Return the absolute tolerance where numbers have this root mean square."""
        return max(self.atol, self.rtol) * rms if self.is_scaled else self.atol


class ToleranceTable:
    """Tolerances by dtype.

    Args:
        given: (rtol, atol) for all floating-point and complex dtypes; or dtype -> (rtol, atol) for some of them, the
            others keep the standard; or a dtype whose standard counts for all that are more precise.

    Raises:
        ValueError: a tolerance is negative or not finite, or the dtype has no standard.
        TypeError: it is not a pair, or a key no dtype.
    """

    def __init__(self, given: Given = None) -> None:
        self._all: Tolerance | None = None
        self._least: tuple[torch.dtype, ...] = ()
        self._given: dict[torch.dtype, Tolerance] = {}
        if isinstance(given, torch.dtype):
            if given not in STANDARD:
                raise ValueError(f"{given} has no tolerance of its own; give one of {', '.join(map(str, STANDARD))}")
            self._least = (given,)
        elif isinstance(given, Mapping):
            for dtype, pair in given.items():
                if not isinstance(dtype, torch.dtype):
                    raise TypeError(
                        f"tolerances are given by dtype, as in {{torch.bfloat16: (0.02, 1e-3)}}; got {dtype!r}"
                    )
                self._given[dtype] = _checked(pair)
        elif given is not None:
            self._all = _checked(given)

    def of(self, *dtypes: torch.dtype) -> Tolerance:
        """Return the loosest tolerance of some dtypes; what was given goes before the standard."""
        is_inexact = any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
        if self._all is not None and is_inexact:
            return self._all
        known = [self._given[dtype] for dtype in dtypes if dtype in self._given]
        if not known:
            least = self._least if is_inexact else ()
            pairs = [STANDARD.get(dtype, (0.0, 0.0)) for dtype in (*dtypes, *least)]
            known = [Tolerance(rtol=rtol, atol=atol, is_scaled=True) for rtol, atol in pairs]
        return max(known, key=lambda tolerance: (tolerance.rtol, tolerance.atol))


def _checked(pair: object) -> Tolerance:
    if not isinstance(pair, tuple) or len(pair) != 2 or any(type(value) not in (int, float) for value in pair):
        raise TypeError(f"a tolerance is a pair (rtol, atol) of numbers; got {pair!r}")
    rtol, atol = (float(value) for value in pair)
    if not (0 <= rtol < math.inf and 0 <= atol < math.inf):
        raise ValueError(f"a tolerance is finite and not negative; got (rtol, atol) = ({rtol}, {atol})")
    return Tolerance(rtol=rtol, atol=atol, is_scaled=False)
