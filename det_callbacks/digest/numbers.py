"""By how much two tensors differ, element by element: counts, distances and places."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from det_callbacks.digest import ulps
from det_callbacks.digest.unobserved import unobserved
from det_callbacks.verdict import TensorNumbers

_POWERS = np.array([1 << power for power in range(64)], dtype=np.uint64)


def tensor_numbers(label: TensorNumbers, reference: Tensor, current: Tensor) -> TensorNumbers:
    """Return by how much a tensor differs from the reference's; see ``digest.ulps`` for what a ULP is.

    Works in chunks of 2**20 elements, in some 150 MiB of the host's memory, and looks closer at elements that differ
    only: 0.1 microseconds each.

    Args:
        label: what the tensor is; the rest of it is filled in.
        reference: an ordinary strided tensor on the host.
        current: one of the same shape and dtype, on the host.

    Raises:
        ValueError: shapes or dtypes differ, or a tensor is not an ordinary strided one.

    Example:
        >>> import torch
        >>> one, other = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.0000002384185791]])
        >>> found = tensor_numbers(TensorNumbers(tensor="output 0"), one, other)
        >>> found.num_differing, found.max_ulps, found.first, found.ulps
        (1, 1, (0, 1), (1, 1))
    """
    if reference.shape != current.shape or reference.dtype != current.dtype:
        raise ValueError(
            f"{reference.dtype} {tuple(reference.shape)} and {current.dtype} {tuple(current.shape)} have no elements "
            "in common; compare tensors of one dtype and shape"
        )
    for tensor in (reference, current):
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise ValueError("only ordinary strided tensors have numbers; compare what this one is made of")
    tally = _Tally(reference.dtype)
    with unobserved():
        for chunk in _chunks(reference.detach(), current.detach()):
            tally.add(*chunk)
    shape = tuple(reference.shape)
    found = replace(
        label,
        shape=shape,
        dtype=str(reference.dtype).removeprefix("torch."),
        num_differing=tally.num_differing,
        ulps=tally.histogram(reference.numel()),
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
        first=_index(tally.first.place, shape),
        first_values=tally.first.values,
        worst=_index(tally.worst.place, shape),
        worst_values=tally.worst.values,
    )


_Chunk = tuple[int, np.ndarray, np.ndarray, Tensor, Tensor]
"""Place of its first element, bits of both, elements of both; all flat, complex bits in rows of two."""


def _chunks(reference: Tensor, current: Tensor) -> Iterator[_Chunk]:
    bits = ulps.paired_bits(reference, current)
    ours, theirs = reference.resolve_conj().resolve_neg().reshape(-1), current.resolve_conj().resolve_neg().reshape(-1)
    for start in range(0, len(ours), ulps.CHUNK_ELEMENTS):
        end = start + ulps.CHUNK_ELEMENTS
        one, other = (side[start:end].numpy() for side in bits)
        yield start, one, other, ours[start:end], theirs[start:end]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Element:
    """One element that differs: how bad that is (NaN, infinity, distance), its flat place and its values as text."""

    rank: tuple[int, int]
    place: int
    values: tuple[str, str]


@dataclass(slots=True)
class _Tally:
    """Gathers the elements that differ, chunk by chunk."""

    dtype: torch.dtype
    num_differing: int = 0
    num_nan: int = 0
    num_inf: int = 0
    max_ulps: int | None = None
    first: _Element | None = None
    worst: _Element | None = None
    _bins: np.ndarray = field(default_factory=lambda: np.zeros(65, dtype=np.int64))
    _has_distance: bool = True
    _largest: list[float] = field(default_factory=lambda: [-1.0, -1.0])

    def add(self, start: int, one: np.ndarray, other: np.ndarray, reference: Tensor, current: Tensor) -> None:
        differs = one != other
        if differs.ndim > 1:
            differs = differs.any(axis=1)
        (places,) = np.nonzero(differs)
        if not len(places):
            return
        self.num_differing += len(places)
        chosen = torch.from_numpy(places)
        distance = ulps.distances(one[places], other[places], self.dtype)
        if distance is not None and distance.ndim > 1:
            distance = distance.max(axis=1)
        is_nan, is_inf = self._compare(reference, current, chosen, distance)
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
        worst = np.flatnonzero(badness == badness.max())
        worst = worst[np.argmax(distance[worst])] if not badness.max() else worst[0]
        for index, is_first in ((0, True), (int(worst), False)):
            at = int(places[index])
            element = _Element(
                rank=(int(badness[index]), 0 if badness[index] else int(distance[index])),
                place=start + at,
                values=(_text(reference[at]), _text(current[at])),
            )
            if is_first:
                self.first = self.first or element
            elif self.worst is None or element.rank > self.worst.rank:
                self.worst = element

    def _compare(
        self, reference: Tensor, current: Tensor, places: Tensor, distance: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Note the largest absolute and relative differences; return which elements have a NaN, and an infinity."""
        none = np.zeros(len(places), dtype=bool)
        is_number = self.dtype.is_floating_point or self.dtype.is_complex
        if not is_number:
            if distance is not None:  # of integers it is the difference; in float64 they could be equal
                ours = reference[places].numpy().astype(np.float64)
                self._note(distance.astype(np.float64), np.abs(ours), ~none)
            return none, none
        wide = torch.complex128 if self.dtype.is_complex else torch.float64
        ours, theirs = (side[places].to(wide).numpy() for side in (reference, current))
        is_nan = np.isnan(ours) | np.isnan(theirs)
        is_inf = (np.isinf(ours) | np.isinf(theirs)) & ~is_nan
        with np.errstate(over="ignore", invalid="ignore"):
            self._note(np.abs(ours - theirs), np.abs(ours), ~(is_nan | is_inf))
        return is_nan, is_inf

    def _note(self, absolute: np.ndarray, sizes: np.ndarray, is_finite: np.ndarray) -> None:
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


def _index(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(index) for index in np.unravel_index(place, shape)) if shape else ()


def _text(element: Tensor) -> str:
    """Return a value as the shortest text that no other number of its dtype has."""
    if element.dtype in (torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128):
        return str(element.numpy()[()])
    if element.dtype.is_floating_point:
        return str(element.to(torch.float32).numpy()[()])
    if element.dtype.is_complex:
        return str(element.to(torch.complex64).numpy()[()])
    return str(element.item())
