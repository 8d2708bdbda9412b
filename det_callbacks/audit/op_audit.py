"""The ops of training steps, each run twice."""

from dataclasses import dataclass, field

from torch import nn

from det_callbacks.audit.findings import AuditFinding, AuditReport
from det_callbacks.equivalence import BitwiseEquivalenceMode, OpMismatch


@dataclass(slots=True)
class _Found:
    first: OpMismatch
    steps: dict[int, None] = field(default_factory=dict)
    num_places: int = 0
    max_ulps: int | None = None


class OpAudit:
    """Runs every op of the chosen steps twice and keeps what differed.

    Args:
        model: that module names are relative to.

    Attributes:
        mode: which runs them; whoever trains sets its phases.
    """

    def __init__(self, model: nn.Module) -> None:
        self.mode = BitwiseEquivalenceMode.for_training(model)
        self._step = -1
        self._steps: list[int] = []
        self._found: dict[tuple[str, str, str], _Found] = {}

    def begin(self, step: int) -> None:
        """Start a step."""
        self.mode.begin()
        self._step = step

    def end(self) -> None:
        """End the step; nothing is done when none is under way."""
        if not self.mode.is_open:
            return
        mismatches = self.mode.finish()
        self._steps.append(self._step)
        for mismatch in mismatches:
            key = (mismatch.phase, mismatch.module, mismatch.op)
            found = self._found.setdefault(key, _Found(first=mismatch))
            found.steps[self._step] = None
            found.num_places += 1
            if mismatch.max_ulps is not None:
                found.max_ulps = max(found.max_ulps or 0, mismatch.max_ulps)

    def report(self) -> AuditReport:
        """Return what was found so far."""
        return AuditReport(
            kind="ops",
            steps=tuple(self._steps),
            num_compared=self.mode.num_compared,
            skipped=dict(self.mode.skipped),
            findings=tuple(
                AuditFinding(
                    judgement="nondeterministic",
                    phase=phase,
                    module=module,
                    op=op,
                    source=found.first.source,
                    steps=tuple(found.steps),
                    num_places=found.num_places,
                    shape=found.first.shape,
                    dtype=found.first.dtype,
                    num_elements=found.first.num_differing,
                    max_ulps=found.max_ulps,
                )
                for (phase, module, op), found in self._found.items()
            ),
        )
