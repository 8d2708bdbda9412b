"""What comparing two modules found, tensor by tensor."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from det_callbacks.errors import NumericsError
from det_callbacks.report import numerics_text
from det_callbacks.runs.files import replace_atomically

Phase = Literal["initial", "module", "input", "output", "loss", "gradient", "parameter", "buffer"]
Kind = Literal["equal", "content", "structure", "missing", "extra"]

PHASES: tuple[Phase, ...] = ("initial", "module", "input", "output", "loss", "gradient", "parameter", "buffer")
"""What is compared, in the order in which an iteration computes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorComparison:
    """One tensor, or one plain value, of both sides.

    Attributes:
        iteration: counted from 0.
        phase: "initial" (parameters and buffers before the first iteration), "module" (output of a submodule), "input"
            (written in place by the forward pass), "output", "loss", "gradient", "parameter" and "buffer" (both after
            the optimizer's step).
        name: qualified name of the module, parameter or buffer; path in the inputs or outputs ("output['logits']").
        kind: "equal" (the same bits), "content" (other bits), "structure" (another shape, dtype or layout, or another
            kind of value), "missing" (not in the control), "extra" (only in the control).
        base: what the base has: "float32 [4, 8]", "int 3"; None where it has nothing.
        control: likewise.
        num_elements: of the base.
        num_differing: elements with other bits (of two dtypes: with another value); None where the elements cannot be
            matched: another shape, or one side only. So are the next five.
        max_absolute: largest absolute difference of elements that are finite on both sides.
        max_relative: largest difference relative to the base's element; infinite where that is 0.
        max_ulps: largest difference in units in the last place, of the coarser dtype where there are two.
        cosine: of the angle between both; None also where one is zero.
        num_nan: NaNs of the base and of the control.
        num_inf: infinite elements of the base and of the control.
        rtol: tolerance relative to the base's element.
        atol: absolute tolerance.
        excess: largest difference as a multiple of what is tolerated there: above 1 is beyond the tolerance; infinite
            for another structure, for what one side lacks, and for a NaN or infinity on one side alone.
        index: of the element with the largest excess; None where none differs, or elements cannot be matched.
    """

    iteration: int
    phase: Phase
    name: str
    kind: Kind
    base: str | None
    control: str | None
    num_elements: int = 0
    num_differing: int | None = None
    max_absolute: float | None = None
    max_relative: float | None = None
    max_ulps: int | None = None
    cosine: float | None = None
    num_nan: tuple[int, int] | None = None
    num_inf: tuple[int, int] | None = None
    rtol: float = 0.0
    atol: float = 0.0
    excess: float = 0.0
    index: tuple[int, ...] | None = None

    @property
    def equal(self) -> bool:
        """Whether both sides have the same bits, shape and dtype."""
        return self.kind == "equal"

    @property
    def close(self) -> bool:
        """Whether it is within the tolerance."""
        return self.excess <= 1

    @property
    def decides(self) -> bool:
        """Whether it counts for the outcome; outputs of submodules only tell where a difference starts."""
        return self.phase != "module"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; infinite numbers are the texts "inf" and "-inf"."""
        return {
            "iteration": self.iteration,
            "phase": self.phase,
            "name": self.name,
            "kind": self.kind,
            "close": self.close,
            "base": self.base,
            "control": self.control,
            "num_elements": self.num_elements,
            "num_differing": self.num_differing,
            "max_absolute": _plain(self.max_absolute),
            "max_relative": _plain(self.max_relative),
            "max_ulps": self.max_ulps,
            "cosine": self.cosine,
            "num_nan": None if self.num_nan is None else list(self.num_nan),
            "num_inf": None if self.num_inf is None else list(self.num_inf),
            "rtol": self.rtol,
            "atol": self.atol,
            "excess": _plain(self.excess),
            "index": None if self.index is None else list(self.index),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsReport:
    """By how much a control differs from its base; printed, it is a table.

    Attributes:
        base: what the base is: its class.
        control: what the control is.
        num_iterations: that both ran.
        comparisons: of every tensor of every iteration, in the order in which an iteration computes them: gradients
            in the reverse order of the parameters.
        left_out: what was not compared -> how often.
        notes: what else is to be known: how much was compiled.
    """

    base: str
    control: str
    num_iterations: int
    comparisons: tuple[TensorComparison, ...]
    left_out: Mapping[str, int]
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether all bits agree (outputs of submodules do not count)."""
        return all(found.equal for found in self.comparisons if found.decides)

    @property
    def close(self) -> bool:
        """Whether everything is within its tolerance (outputs of submodules do not count)."""
        return all(found.close for found in self.comparisons if found.decides)

    @property
    def differing(self) -> tuple[TensorComparison, ...]:
        """Everything that differs, outputs of submodules included, in order."""
        return tuple(found for found in self.comparisons if not found.equal)

    @property
    def beyond(self) -> tuple[TensorComparison, ...]:
        """Everything beyond its tolerance, outputs of submodules included, in order."""
        return tuple(found for found in self.comparisons if not found.close)

    @property
    def first(self) -> TensorComparison | None:
        """Where to look first: the first beyond its tolerance or, if all is close, the first with other bits.

        First in the order of the computation, outputs of submodules included: what the others differ by may follow from
        it. None when nothing differs.
        """
        found = self.differing if self.close else self.beyond
        return found[0] if found else None

    @property
    def worst(self) -> TensorComparison | None:
        """The largest difference, as a multiple of its tolerance; of equals the first. None when nothing differs."""
        return max((found for found in self.differing if found.decides), key=lambda found: found.excess, default=None)

    def assert_close(self) -> None:
        """Raise unless everything is within its tolerance.

        Raises:
            NumericsError: an AssertionError; its text begins with ``first`` and lists what is beyond its tolerance.
        """
        if not self.close:
            raise NumericsError(str(self), self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: the counts, and all that differs."""
        first, worst = self.first, self.worst
        return {
            "schema": 1,
            "base": self.base,
            "control": self.control,
            "equal": self.equal,
            "close": self.close,
            "num_iterations": self.num_iterations,
            "counts": {
                phase: {
                    "compared": len(found),
                    "differing": sum(not one.equal for one in found),
                    "beyond": sum(not one.close for one in found),
                }
                for phase in PHASES
                if (found := [one for one in self.comparisons if one.phase == phase])
            },
            "first": None if first is None else first.to_dict(),
            "worst": None if worst is None else worst.to_dict(),
            "differing": [found.to_dict() for found in self.differing],
            "left_out": dict(self.left_out),
            "notes": list(self.notes),
        }

    def to_json(self, path: str | Path) -> Path:
        """Write ``to_dict()`` to a JSON file, atomically; return its path."""
        content = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        replace_atomically(Path(path), content.encode() + b"\n")
        return Path(path)

    def __str__(self) -> str:
        return numerics_text(self)


def _plain(number: float | None) -> float | str | None:
    return number if number is None or math.isfinite(number) else repr(number)
