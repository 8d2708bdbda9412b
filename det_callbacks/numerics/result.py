"""The result of comparing two modules, tensor by tensor, as data and as text."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from det_callbacks.digest.numbers import Measure, can_measure
from det_callbacks.errors import DetCallbacksError
from det_callbacks.report.console import Section, Table, to_text
from det_callbacks.report.numerics import COLUMNS, measured, multiple_text, ulps_text
from det_callbacks.runs.files import replace_atomically
from det_callbacks.text import count
from det_callbacks.verdict import as_json

Phase = Literal["initial", "module", "output", "loss", "gradient", "parameter", "buffer"]
Kind = Literal["equal", "content", "structure", "missing", "extra"]

PHASES: Mapping[Phase, str] = {
    "initial": "initial state",
    "module": "submodule output",
    "output": "output",
    "loss": "loss",
    "gradient": "gradient",
    "parameter": "parameter after the step",
    "buffer": "buffer after the step",
}
"""The phases and their names, in the order in which an iteration computes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorComparison:
    """One tensor, or one plain value, of both sides.

    Attributes:
        iteration: number of the iteration, counted from 0.
        phase: "initial" (the state before the first iteration), "module" (the output of a
            submodule), "output", "loss", "gradient", "parameter" or "buffer" (both
            after the optimizer's step).
        name: module, parameter, buffer, or path in the inputs or outputs ("output['logits']").
        kind: "equal" (the same bits), "content" (different bits), "structure" (different shape or
            dtype), "missing" (not in the control) or "extra" (only in the control).
        base: dtype and shape, "float32 [4, 8]"; None if the base does not have it.
        control: the same for the control.
        measure: the largest distances, ``ulp`` in units in the last place, ``relative`` and
            ``absolute``; None if the elements cannot be matched.
        rtol: relative tolerance.
        atol: absolute tolerance.
        excess: the largest difference divided by its tolerance; infinite for a tolerance of 0, and
            without a distance: a NaN or an infinity on one side,
            or a dtype whose numbers are not known.

    Examples:
        >>> layer = torch.nn.LayerNorm(8)
        >>> worst = compare_modules(
        ...     layer, torch.nn.LayerNorm(8, eps=1e-3), torch.ones(4, 8).cumsum(1)
        ... ).worst
        >>> worst.kind, worst.equal, worst.close, worst.excess > 1
        ('content', False, False, True)
    """

    iteration: int
    phase: Phase
    name: str
    kind: Kind
    base: str | None
    control: str | None
    measure: Measure | None = None
    rtol: float = 0.0
    atol: float = 0.0
    excess: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether both sides have the same bits, shape and dtype."""
        return self.kind == "equal"

    @property
    def close(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.excess <= 1

    @property
    def decides(self) -> bool:
        """Whether it affects the outcome; outputs of submodules only locate a difference."""
        return self.phase != "module"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; an infinite excess is the text "inf"."""
        excess = self.excess if self.excess < math.inf else "inf"
        return as_json({**fields_with_measure(self), "close": self.close, "excess": excess})


def fields_with_measure(item: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, and of its measure the distances."""
    content = {field.name: getattr(item, field.name) for field in fields(item)}
    if item.measure is not None:
        names = ("num_elements", "num_differing", "ulp", "relative", "absolute")
        content["measure"] = {name: getattr(item.measure, name) for name in names}
    return content


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsReport:
    """By how much a control differs from its base; prints as a table.

    Attributes:
        base: the class of the base, and whether it is compiled.
        control: the same for the control.
        num_iterations: number of iterations.
        comparisons: all tensors of all iterations, in the order of the computation.
        notes: further remarks, such as what was not compared and how much was compiled.

    Examples:
        >>> layer = torch.nn.Linear(4, 2)
        >>> report = compare_modules(layer, layer, torch.ones(3, 4), iterations=2)
        >>> report.equal, report.close, report.worst
        (True, True, None)
    """

    base: str
    control: str
    num_iterations: int
    comparisons: tuple[TensorComparison, ...]
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether all bits are equal, except in outputs of submodules."""
        return all(tensor.equal for tensor in self.comparisons if tensor.decides)

    @property
    def close(self) -> bool:
        """Whether all tensors are within tolerance, except outputs of submodules."""
        return all(tensor.close for tensor in self.comparisons if tensor.decides)

    @property
    def differing(self) -> tuple[TensorComparison, ...]:
        """All tensors that differ, including outputs of submodules,
        in the order of the computation.
        """
        return tuple(tensor for tensor in self.comparisons if not tensor.equal)

    @property
    def beyond(self) -> tuple[TensorComparison, ...]:
        """All tensors beyond tolerance, including outputs of submodules, in order."""
        return tuple(tensor for tensor in self.comparisons if not tensor.close)

    @property
    def first(self) -> TensorComparison | None:
        """The first tensor beyond tolerance or, if none is, the first that differs;
        includes submodules.
        """
        return next(iter(self.differing if self.close else self.beyond), None)

    @property
    def worst(self) -> TensorComparison | None:
        """The tensor with the largest multiple of its tolerance, or None if all are equal;
        excludes submodules.
        """
        return max(
            (tensor for tensor in self.differing if tensor.decides),
            key=lambda tensor: tensor.excess,
            default=None,
        )

    def assert_close(self) -> None:
        """Raise ``NumericsError``, an AssertionError with the report,
        unless all tensors are within tolerance.
        """
        if not self.close:
            raise NumericsError(str(self), self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: the counts, and all differences."""
        return {
            "schema": 1,
            **{
                name: getattr(self, name)
                for name in ("base", "control", "equal", "close", "num_iterations")
            },
            "counts": {phase: counts for phase, counts, _ in _by_phase(self)},
            **{
                name: tensor and tensor.to_dict()
                for name, tensor in (("first", self.first), ("worst", self.worst))
            },
            "differing": [tensor.to_dict() for tensor in self.differing],
            "notes": list(self.notes),
        }

    def to_json(self, path: str | Path) -> Path:
        """Write ``to_dict()`` to a JSON file, atomically; return its path."""
        content = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        replace_atomically(Path(path), content.encode() + b"\n", instead="name another file")
        return Path(path)

    def __str__(self) -> str:
        return _text(self)


class NumericsError(DetCallbacksError, AssertionError):
    """Two modules differ by more than the tolerance; ``report`` holds all comparisons.

    Examples:
        >>> first, second = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)  # with different weights
        >>> try:
        ...     compare_modules(first, second, torch.ones(3, 4)).assert_close()
        ... except NumericsError as error:
        ...     error.exit_code, error.report.first.name
        (1, 'weight')
    """

    exit_code = 1
    _data = ("report",)
    report: NumericsReport | None = None


def _text(report: NumericsReport) -> str:
    title = "EQUAL" if report.equal else "WITHIN TOLERANCE" if report.close else "BEYOND TOLERANCE"
    deciding = [tensor for tensor in report.comparisons if tensor.decides]
    num_differing = sum(not tensor.equal for tensor in deciding)
    num_beyond = sum(not tensor.close for tensor in deciding)
    sides = f"{report.control} against {report.base}, {count(report.num_iterations, 'iteration')}"
    outcome = (
        f"{num_differing:,} with different bits, {num_beyond or 'none'} beyond the tolerance"
        if num_differing
        else "all bits agree"
    )
    lines = [f"{sides}: {count(len(deciding), 'tensor')} compared, {outcome}."]
    quality = "with different bits" if report.close else "beyond its tolerance"
    named = {f"The first {quality}": report.first}
    named["The largest outside submodule outputs"] = report.worst
    for what, tensor in named.items():
        if tensor is not None:
            place = f"{PHASES[tensor.phase]} {tensor.name} in iteration {tensor.iteration}"
            lines.append(f"{what}: {place}: {_how(tensor)}.")
    head = Section(title=title, lines=lines)
    return to_text([head, Section(table=_summary(report)), Section(lines=report.notes)])


def _by_phase(
    report: NumericsReport,
) -> Iterator[tuple[Phase, dict[str, int], list[TensorComparison]]]:
    """Yield each phase with its counts, and its tensors that differ."""
    for phase in PHASES:
        tensors = [tensor for tensor in report.comparisons if tensor.phase == phase]
        differing = [tensor for tensor in tensors if not tensor.equal]
        if tensors:
            num_beyond = sum(not tensor.close for tensor in tensors)
            counts = {"compared": len(tensors), "differing": len(differing), "beyond": num_beyond}
            yield phase, counts, differing


def _summary(report: NumericsReport) -> Table:
    rows = []
    for phase, counts, differing in _by_phase(report):
        cells, since = ["-"] * len(COLUMNS[1:]), "-"
        if differing:
            measures = [
                tensor.measure
                for tensor in differing
                if tensor.measure is not None and tensor.measure.ulp is not None
            ]
            largest: dict[str, Any] = {
                name: max((getattr(measure, name) for measure in measures), default=None)
                for name in ("ulp", "relative", "absolute")
            }
            cells = measured(**largest, excess=max(tensor.excess for tensor in differing))
            since = f"iteration {min(tensor.iteration for tensor in differing)}"
        rows.append((PHASES[phase], *counts.values(), *cells, since))
    columns = ("compared", "tensors", "differ", "beyond", *COLUMNS[1:], "differ since")
    return Table(columns=columns, rows=rows)


def _how(tensor: TensorComparison) -> str:
    if tensor.measure is None:
        return (
            f"{tensor.base or 'missing'} in the base, {tensor.control or 'missing'} in the control"
        )
    dtype = str(tensor.base).partition(" ")[0]
    size = (
        ulps_text(tensor.measure.ulp)
        if can_measure(dtype)
        else f"{dtype}, whose numbers are not known"
    )
    return f"{size}, {multiple_text(tensor.excess)} x the tolerance"
