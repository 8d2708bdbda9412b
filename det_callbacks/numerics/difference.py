"""By how much two tensors differ: absolute, relative, in ULPs, in direction, and against a tolerance."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from det_callbacks.digest.ulps import count_differing

HOST_ELEMENTS, DEVICE_ELEMENTS = 1 << 16, 1 << 21
"""Elements that are looked at together: on the host what its caches hold, on a device enough to keep it busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Figures on two tensors of one shape; of elements that are finite on both sides, where nothing else is said.

    Attributes:
        num_differing: elements with other bits; where the dtypes differ, with another value.
        max_absolute: largest absolute difference.
        max_relative: largest difference relative to the base; infinite where the base has a zero.
        max_ulps: largest distance in units in the last place, of the coarser dtype where there are two; None for
            dtypes without one.
        cosine: of the angle between the two; None where one is zero.
        num_nan: elements that are NaN in the base, and in the control.
        num_inf: elements that are infinite in the base, and in the control.
        excess: largest difference as a multiple of the tolerance; infinite where one side alone is NaN or infinite.
        index: of the element with the largest excess; None where no element differs.
    """

    num_differing: int = 0
    max_absolute: float = 0.0
    max_relative: float = 0.0
    max_ulps: int | None = 0
    cosine: float | None = 1.0
    num_nan: tuple[int, int] = (0, 0)
    num_inf: tuple[int, int] = (0, 0)
    excess: float = 0.0
    index: tuple[int, ...] | None = None


def measure(base: Tensor, control: Tensor, *, rtol: float, atol: float) -> Difference:
    """Return by how much two ordinary strided tensors of one shape differ.

    Reads both in chunks, in double precision, where the base lies; what lies elsewhere is brought there.

    Args:
        base: the tensor that relative differences are relative to.
        control: of the same shape.
        rtol: relative tolerance.
        atol: absolute tolerance.
    """
    base, control = base.detach(), control.detach()
    if base.device != control.device:
        base, control = base.cpu(), control.cpu()
    is_one_dtype = base.dtype == control.dtype
    num_differing, max_ulps = count_differing(base, control) if is_one_dtype else (None, None)
    if not (_is_inexact(base) or _is_inexact(control)) or not _is_readable(base) or not _is_readable(control):
        return _of_exact(base, control, num_differing, max_ulps)
    if num_differing == 0:
        nan, inf = _count_special(base)
        return Difference(num_nan=(nan, nan), num_inf=(inf, inf))
    sums = _Sums()
    for start, one, other in _chunks(base, control):
        sums.add(one, other, start=start, rtol=rtol, atol=atol)
    return Difference(
        num_differing=sums.num_differing if num_differing is None else num_differing,
        max_absolute=sums.max_absolute,
        max_relative=sums.max_relative,
        max_ulps=max_ulps if is_one_dtype and sums.is_finite else _ulps_of_finite(base, control),
        cosine=sums.cosine,
        num_nan=(sums.num_nan[0], sums.num_nan[1]),
        num_inf=(sums.num_inf[0], sums.num_inf[1]),
        excess=sums.excess,
        index=None if sums.place is None else _index_of(sums.place, base.shape),
    )


def rms_of(tensor: Tensor) -> float:
    """Return the root mean square of the finite elements of a tensor; 0 for integers and empty tensors."""
    if not _is_inexact(tensor) or not _is_readable(tensor):
        return 0.0
    tensor = tensor.detach()
    largest = 1.0
    if tensor.dtype in (torch.float64, torch.complex128):  # whose squares double precision may not hold
        largest = max((float(values.abs().max()) for values in _finite_chunks(tensor)), default=0.0)
    if not largest:
        return 0.0
    total, num = 0.0, 0
    for values in _finite_chunks(tensor):
        total += float((values.abs() / largest).square().sum())
        num += values.numel()
    return largest * math.sqrt(total / num) if num else 0.0


class _Sums:
    """What is added up over the chunks of two tensors."""

    def __init__(self) -> None:
        self.num_differing = 0
        self.max_absolute = self.max_relative = self.excess = 0.0
        self.num_nan, self.num_inf = [0, 0], [0, 0]
        self.place: int | None = None
        self.is_finite = True
        self._dot = self._base = self._control = 0.0

    def add(self, base: Tensor, control: Tensor, *, start: int, rtol: float, atol: float) -> None:
        for side, values in enumerate((base, control)):
            self.num_nan[side] += int(torch.isnan(values).sum())
            self.num_inf[side] += int(torch.isinf(values).sum())
        same = (base == control) | (torch.isnan(base) & torch.isnan(control))
        finite = torch.isfinite(base) & torch.isfinite(control)
        self.is_finite = self.is_finite and bool(finite.all())
        self.num_differing += int((~same).sum())
        base, control = base.masked_fill(~finite, 0), control.masked_fill(~finite, 0)
        size = base.abs()
        distance = (base - control).abs()
        zero = torch.zeros_like(distance)
        # a quotient of 0 and 0 is no difference
        relative = torch.where(distance == 0, zero, distance / size)
        excess = torch.where(distance == 0, zero, distance / (atol + rtol * size))
        excess = torch.where(finite | same, excess, torch.full_like(excess, torch.inf))
        self.max_absolute = max(self.max_absolute, float(distance.max()))
        self.max_relative = max(self.max_relative, float(relative.max()))
        largest, place = excess.max(0)
        if (~same).any() and (self.place is None or float(largest) > self.excess):
            self.excess, self.place = float(largest), start + int(place)
        self._dot += float((base.conj() * control).real.sum())
        self._base += float(size.square().sum())
        self._control += float(control.abs().square().sum())

    @property
    def cosine(self) -> float | None:
        lengths = math.sqrt(self._base) * math.sqrt(self._control)
        return self._dot / lengths if 0 < lengths < math.inf else None


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _is_readable(tensor: Tensor) -> bool:
    """Return whether the elements become double precision: packed and sub-byte ones do not."""
    return tensor.dtype not in _PACKED


# torch 2.13: two elements in a byte; no conversion
_PACKED = frozenset({torch.float4_e2m1fn_x2})


def _chunks(base: Tensor, control: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    flat = base.reshape(-1), control.reshape(-1)
    size = HOST_ELEMENTS if base.is_cpu else DEVICE_ELEMENTS
    for start in range(0, flat[0].numel(), size):
        one, other = (_widened(tensor[start : start + size]) for tensor in flat)
        yield start, one, other


def _finite_chunks(tensor: Tensor) -> Iterator[Tensor]:
    for _, values, _ in _chunks(tensor, tensor):
        finite = values[torch.isfinite(values)]
        if finite.numel():
            yield finite


def _widened(values: Tensor) -> Tensor:
    return values.to(torch.complex128 if values.dtype.is_complex else torch.float64)


def _count_special(tensor: Tensor) -> tuple[int, int]:
    nan = inf = 0
    for _, values, _ in _chunks(tensor, tensor):
        nan += int(torch.isnan(values).sum())
        inf += int(torch.isinf(values).sum())
    return nan, inf


def _ulps_of_finite(base: Tensor, control: Tensor) -> int | None:
    if base.dtype.is_complex != control.dtype.is_complex or not (_is_inexact(base) and _is_inexact(control)):
        return None
    coarser = max(base.dtype, control.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    largest: int | None = 0
    flat = base.reshape(-1), control.reshape(-1)
    size = HOST_ELEMENTS if base.is_cpu else DEVICE_ELEMENTS
    for start in range(0, flat[0].numel(), size):
        one, other = (tensor[start : start + size].to(coarser) for tensor in flat)
        finite = torch.isfinite(_widened(one)) & torch.isfinite(_widened(other))
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(one.element_size())
        if bits is None:  # complex128: no integer is as wide, and indexing it works
            distance = count_differing(one[finite], other[finite])[1]
        else:  # float8 has no indexing by a mask
            chosen = one.view(bits)[finite].view(coarser), other.view(bits)[finite].view(coarser)
            distance = count_differing(*chosen)[1]
        largest = None if distance is None or largest is None else max(largest, distance)
    return largest


def _of_exact(base: Tensor, control: Tensor, num_differing: int | None, max_ulps: int | None) -> Difference:
    """Return the figures of integers and of what has no numbers: the distance is the difference."""
    if num_differing is None:  # integers of two dtypes
        differs = (base != control).reshape(-1)
        num_differing = int(differs.sum())
        distances = [abs(one - other) for one, other in zip(*_differing(base, control), strict=True)]
        max_ulps = max(distances, default=0)
    if not num_differing:
        return Difference()
    if _is_readable(base):
        one, other = base.reshape(-1), control.reshape(-1)
        index = _index_of(int((one != other).nonzero()[0]), base.shape)
    else:
        index = None
    return Difference(
        num_differing=num_differing,
        max_absolute=math.inf if max_ulps is None else float(max_ulps),
        max_relative=math.inf,
        max_ulps=max_ulps,
        cosine=None,
        excess=math.inf,
        index=index,
    )


def _differing(base: Tensor, control: Tensor) -> tuple[list[int], list[int]]:
    differs = base != control
    return [int(value) for value in base[differs].tolist()], [int(value) for value in control[differs].tolist()]


def _index_of(place: int, shape: torch.Size) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        index.append(place % size)
        place //= size
    return tuple(reversed(index))
