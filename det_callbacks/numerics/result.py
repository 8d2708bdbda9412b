"""What comparing two modules found, tensor by tensor."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from det_callbacks.errors import NumericsError
from det_callbacks.report.tensors import numerics_text
from det_callbacks.runs.disk import replace_atomically
from det_callbacks.verdict import TensorNumbers, as_json

Phase = Literal["initial", "module", "output", "loss", "gradient", "parameter", "buffer"]
Kind = Literal["equal", "content", "structure", "missing", "extra"]

PHASES: tuple[Phase, ...] = get_args(Phase)
"""What is compared, in the order in which an iteration computes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorComparison:
    """One tensor, or one plain value, of both sides.

    ``phase`` "initial" is the state before the first iteration, "module" the output of a submodule, "parameter" and
    "buffer" are those after the optimizer's step. ``kind`` is "equal" (the same bits), "content" (other bits),
    "structure" (another shape or dtype), "missing" (not in the control) or "extra" (only in the control).
    """

    iteration: int  # counted from 0
    phase: Phase
    name: str  # of the module, parameter or buffer; path in the inputs or outputs ("output['logits']")
    kind: Kind
    base: str | None  # what the base has: "float32 [4, 8]"; None where it has nothing
    control: str | None  # likewise
    numbers: TensorNumbers | None = None  # by how much they differ; None where the elements cannot be matched
    rtol: float = 0.0
    atol: float = 0.0
    excess: float = 0.0  # the largest difference as a multiple of what is tolerated there; infinite where none is

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
        """Whether it counts for the outcome; outputs of submodules only tell where a difference starts."""
        return self.phase != "module"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; an infinite excess is the text "inf"."""
        excess = self.excess if math.isfinite(self.excess) else "inf"
        return {**as_json(replace(self, excess=0.0)), "close": self.close, "excess": excess}


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsReport:
    """By how much a control differs from its base; printed, it is a table.

    Attributes:
        base: the class of the base, and whether it is compiled; ``control`` likewise.
        comparisons: every tensor of each of the ``num_iterations`` iterations, in the order of the computation.
        notes: what else a reader has to know: what was not compared, how much was compiled.
    """

    base: str
    control: str
    num_iterations: int
    comparisons: tuple[TensorComparison, ...]
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
        """Everything that differs, outputs of submodules included, in the order of the computation."""
        return tuple(found for found in self.comparisons if not found.equal)

    @property
    def beyond(self) -> tuple[TensorComparison, ...]:
        """Everything beyond its tolerance, outputs of submodules included, in order."""
        return tuple(found for found in self.comparisons if not found.close)

    @property
    def first(self) -> TensorComparison | None:
        """The first beyond its tolerance or, if all is close, the first with other bits; submodules included."""
        found = self.differing if self.close else self.beyond
        return found[0] if found else None

    @property
    def worst(self) -> TensorComparison | None:
        """The largest difference, as a multiple of its tolerance; None when nothing differs."""
        return max((found for found in self.differing if found.decides), key=lambda found: found.excess, default=None)

    def assert_close(self) -> None:
        """Raise a ``NumericsError``, an AssertionError with the report, unless everything is within its tolerance."""
        if not self.close:
            raise NumericsError(str(self), self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: the counts, and all that differs."""
        first, worst = self.first, self.worst
        counts = {}
        for phase in PHASES:
            if found := [one for one in self.comparisons if one.phase == phase]:
                differing, beyond = sum(not one.equal for one in found), sum(not one.close for one in found)
                counts[phase] = {"compared": len(found), "differing": differing, "beyond": beyond}
        return {
            "schema": 1,
            **{name: getattr(self, name) for name in ("base", "control", "equal", "close", "num_iterations")},
            "counts": counts,
            "first": None if first is None else first.to_dict(),
            "worst": None if worst is None else worst.to_dict(),
            "differing": [found.to_dict() for found in self.differing],
            "notes": list(self.notes),
        }

    def to_json(self, path: str | Path) -> Path:
        """Write ``to_dict()`` to a JSON file, atomically; return its path."""
        content = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        replace_atomically(Path(path), content.encode() + b"\n", instead="name another file")
        return Path(path)

    def __str__(self) -> str:
        return numerics_text(self)
