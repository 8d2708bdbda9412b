"""Where the tensors of an iteration go: those of the base are kept, those of the control compared with them at once."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from det_callbacks.numerics.difference import Difference, measure, rms_of
from det_callbacks.numerics.leaves import plain_parts
from det_callbacks.numerics.result import PHASES, Kind, Phase, TensorComparison
from det_callbacks.numerics.tolerances import Tolerance, ToleranceTable

_SHARED_SCALE = ("gradient", "parameter", "initial")
"""Phases in which the largest root mean square counts for all: a gradient that cancels out (that of a bias ahead of a
normalisation, or of the keys of an attention) is nothing but rounding errors of its neighbours, and so becomes a
parameter that began as zero."""
_CANCELLED = 10
"""Tolerances below which a whole gradient counts as cancelled out, and within which it may then differ. Of n terms that
add up to zero the errors add up too, while what does not cancel grows as the square root of n."""


class Sink(Protocol):
    """Takes what a side computes in an iteration."""

    def put(self, phase: Phase, name: str, value: Any) -> None:
        """Take a tensor or a plain value; its name is unique within the phase."""

    def put_input(self, name: str, given: Tensor, written: Tensor | None) -> None:
        """Take an input: as it was given, and what the forward pass made of it if it wrote to it."""


@dataclass(slots=True)
class _Kept:
    """A value of the base: a copy of it, and what else is needed to compare with it."""

    value: Any
    description: str
    rms: float
    position: int


class Record:
    """Copies of what the base computed in one iteration.

    Args:
        device: where copies are kept; None leaves them where they are.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._kept: dict[tuple[Phase, str], _Kept] = {}
        self._scales: dict[Phase, float] = {}
        self._last: tuple[Tensor, int, Tensor, float] | None = None

    def put(self, phase: Phase, name: str, value: Any) -> None:
        """Keep a copy."""
        with unrecorded():
            parts = plain_parts(name, value) if isinstance(value, Tensor) else [(name, value)]
            for part_name, part in parts:
                copy, rms = self._copied(part)
                kept = _Kept(copy, describe(value if len(parts) == 1 else part), rms, len(self._kept))
                self._kept[phase, part_name] = kept
                self._scales[phase] = max(self._scales.get(phase, 0.0), rms)

    def put_input(self, name: str, given: Tensor, written: Tensor | None) -> None:
        """Keep a copy of an input that was written."""
        if written is not None:
            self.put("input", name, written)

    def has(self, phase: Phase, name: str) -> bool:
        """Return whether the base had this, and nobody took it."""
        return (phase, name) in self._kept

    def take(self, phase: Phase, name: str) -> _Kept | None:
        """Return what the base had, and forget it."""
        return self._kept.pop((phase, name), None)

    def absolute(self, phase: Phase, rms: float, tolerance: Tolerance) -> float:
        """Return the absolute tolerance for a tensor with this root mean square."""
        if phase not in _SHARED_SCALE:
            return tolerance.absolute(rms)
        shared = tolerance.absolute(self._scales.get(phase, 0.0))
        is_cancelled = phase == "gradient" and tolerance.is_scaled and rms < _CANCELLED * shared
        return _CANCELLED * shared if is_cancelled else shared

    def rest(self) -> list[tuple[Phase, str, _Kept]]:
        """Return what was not taken."""
        return [(phase, name, kept) for (phase, name), kept in self._kept.items()]

    def _copied(self, value: Any) -> tuple[Any, float]:
        if not isinstance(value, Tensor):
            return value, 0.0
        # the output of a container is that of its last module
        if self._last is not None and self._last[0] is value and self._last[1] == value._version:
            return self._last[2:]
        plain = value.detach().resolve_conj().resolve_neg()
        copy = plain.clone() if self._device is None else plain.to(self._device, copy=True)
        self._last = (value, value._version, copy, rms_of(copy))
        return self._last[2:]


class Comparer:
    """Compares what the control computes in one iteration with a record of the base.

    Args:
        record: of the base, complete; it is emptied.
        iteration: counted from 0.
        tolerances: by dtype.
        check_dtype: whether another dtype is another structure, rather than only less precise.
    """

    def __init__(self, record: Record, *, iteration: int, tolerances: ToleranceTable, check_dtype: bool) -> None:
        self._record = record
        self._iteration = iteration
        self._tolerances = tolerances
        self._check_dtype = check_dtype
        self._found: list[tuple[tuple[int, float], TensorComparison]] = []
        self._last_position = -1.0
        self.left_out: Counter[str] = Counter()

    def put(self, phase: Phase, name: str, value: Any) -> None:
        """Compare with what the base has of that name."""
        with unrecorded():
            parts = plain_parts(name, value) if isinstance(value, Tensor) else [(name, value)]
            for part_name, part in parts:
                kept = self._record.take(phase, part_name)
                description = describe(value if len(parts) == 1 else part)
                if kept is None:
                    self._add_lone(phase, part_name, "extra", None, description, _num_elements(part))
                else:
                    self._last_position = kept.position
                    self._add(phase, part_name, kept, part, description)

    def put_input(self, name: str, given: Tensor, written: Tensor | None) -> None:
        """Compare an input that a side has written; of one that has not, it is as it was given."""
        if written is not None and not self._record.has("input", name):
            self._record.put("input", name, given)
        if self._record.has("input", name):
            self.put("input", name, given if written is None else written)

    def finish(self) -> list[TensorComparison]:
        """Return all comparisons in order, with what only the base has."""
        for phase, name, kept in self._record.rest():
            self._last_position = kept.position
            self._add_lone(phase, name, "missing", kept.description, None, _num_elements(kept.value))
        return [found for _, found in sorted(self._found, key=lambda entry: entry[0])]

    def _add_lone(
        self, phase: Phase, name: str, kind: Kind, base: str | None, control: str | None, num_elements: int
    ) -> None:
        if phase == "module":  # modules may be merged or replaced; only what both ran can tell where it starts
            self.left_out["outputs of submodules that one side alone ran"] += 1
            return
        self._append(
            TensorComparison(
                iteration=self._iteration,
                phase=phase,
                name=name,
                kind=kind,
                base=base,
                control=control,
                num_elements=num_elements,
                excess=math.inf,
            )
        )

    def _add(self, phase: Phase, name: str, kept: _Kept, value: Any, description: str) -> None:
        base = kept.value
        one, other = _as_tensor(base), _as_tensor(value)
        rtol = atol = 0.0
        difference: Difference | None = None
        if one is not None and other is not None and one.shape == other.shape:
            tolerance = self._tolerances.of(one.dtype, other.dtype)
            rtol, atol = tolerance.rtol, self._record.absolute(phase, kept.rms or rms_of(one), tolerance)
            difference = measure(one, other, rtol=rtol, atol=atol)
        elif one is None and other is None:
            is_same = type(base) is type(value) and base == value
            difference = Difference() if is_same else Difference(num_differing=1, excess=math.inf)
        if isinstance(base, Tensor) and isinstance(value, Tensor):
            is_other = difference is None or (self._check_dtype and kept.description != description)
        else:
            is_other = difference is None or type(base) is not type(value)
        is_equal = difference is not None and not difference.num_differing and _is_one_layout(base, value)
        figures: dict[str, Any] = {}
        if difference is not None:
            figures = {item.name: getattr(difference, item.name) for item in fields(difference)}
        if is_other:
            figures["excess"] = math.inf
        self._append(
            TensorComparison(
                iteration=self._iteration,
                phase=phase,
                name=name,
                kind="structure" if is_other else "equal" if is_equal else "content",
                base=kept.description,
                control=description,
                num_elements=_num_elements(base),
                rtol=rtol,
                atol=atol,
                **figures,
            )
        )

    def _append(self, found: TensorComparison) -> None:
        # what only the control has comes after what it computed before it
        self._found.append(((PHASES.index(found.phase), self._last_position), found))


@contextmanager
def unrecorded() -> Iterator[None]:
    """Keep autograd, autocast and inference mode from having to do with copies and comparisons."""
    with torch.no_grad(), no_autocast():
        yield


@contextmanager
def no_autocast() -> Iterator[None]:
    """Switch autocast off where it is on."""
    if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
        yield
        return
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def describe(value: Any) -> str:
    """Return dtype and shape of a tensor, class and value of anything else."""
    if not isinstance(value, Tensor):
        return f"{type(value).__name__} {value!r}"[:80] if value is not None else "None"
    layout = "" if value.layout is torch.strided else f", {str(value.layout).removeprefix('torch.')}"
    shape = "nested" if value.is_nested else list(value.shape)
    return f"{str(value.dtype).removeprefix('torch.')} {shape}{layout}"


def _as_tensor(value: Any) -> Tensor | None:
    """Return a number as a tensor without dimensions, a tensor as it is, None for anything else."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, float | complex):
        return torch.tensor(
            value, dtype=torch.complex128 if isinstance(value, complex) else torch.float64, device="cpu"
        )
    return None


def _num_elements(value: Any) -> int:
    return value.numel() if isinstance(value, Tensor) else 1


def _is_one_layout(base: Any, control: Any) -> bool:
    return not isinstance(base, Tensor) or (isinstance(control, Tensor) and base.dtype == control.dtype)
