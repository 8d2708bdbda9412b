"""Results of an audit as plain data, and the errors that carry them."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from det_callbacks.errors import DetCallbacksError
from det_callbacks.runs.program import in_module
from det_callbacks.runs.selection import OpPattern

Judgement = Literal["nondeterministic", "transient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpMismatch:
    """One output of an op that differed between two runs on the same inputs.

    Attributes:
        phase: "forward", "backward", "optimizer" or "other".
        module: qualified name, "" outside any module, "?" if unknown;
            a backward op has the module of its forward op.
        op: ``namespace.op.overload``.
        occurrence: number of earlier calls of the op at this place in the block.
        output: index among what the call wrote: its returns first, then the arguments it wrote.
        source: up to four lines of user code, innermost first;
            a backward op has those of its forward op.
        shape: shape of the first run's output; () for a number.
        dtype: name of its dtype, such as "float32"; for a number, its Python class.
        num_elements: number of its elements.
        num_differing: elements whose bits differ; all of them if shape or dtype differs, or if the
            layout is not strided.
        max_ulps: largest distance of two finite elements in units in the last place,
            or None if there are none.
        is_transient: whether the third run agrees with the first or with the second.

    Examples:
        >>> with BitwiseEquivalenceMode() as mode:
        ...     _ = noisy(torch.ones(2))
        >>> (mismatch,) = mode.get_mismatches()
        >>> (
        ...     mismatch.op,
        ...     mismatch.num_differing,
        ...     mismatch.num_elements,
        ...     mismatch.shape,
        ...     mismatch.dtype,
        ... )
        ('examples.noisy.default', 2, 2, (2,), 'float32')
    """

    phase: str
    module: str
    op: str
    occurrence: int
    output: int
    source: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    num_elements: int
    num_differing: int
    max_ulps: int | None
    is_transient: bool

    def __str__(self) -> str:
        module = in_module(self.module, self.op)
        place = f" at {self.source[0]}" if self.source else ""
        distance = "" if self.max_ulps is None else f", by up to {self.max_ulps} ULPs"
        third = "; two of three runs agree, so it may be transient" if self.is_transient else ""
        return (
            f"{self.op}{module}{place} ({self.phase}): {self.num_differing} of "
            f"{self.num_elements} elements of output {self.output} differ{distance}{third}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFinding(OpMismatch):
    """One op that gave different bits when it ran again, with the fields of
    its first ``OpMismatch``.

    Attributes:
        judgement: "transient" if a single call differed, and two of three runs agreed.
        steps: steps in which it differed.
        num_places: number of its outputs and occurrences that differed, over all steps.

    Examples:
        >>> try:
        ...     train(None, mode="audit", extra=noisy)
        ... except AuditError as error:
        ...     (finding,) = error.report.findings
        det_callbacks: 1 op gave different bits: ...
        >>> finding.pattern, finding.judgement, finding.steps
        ('forward/:examples.noisy.default', 'nondeterministic', (0, 1, 2))
    """

    judgement: Judgement
    steps: tuple[int, ...]
    num_places: int

    @classmethod
    def of(cls, mismatches: Sequence[tuple[int, OpMismatch]]) -> "AuditFinding":
        """Return the finding for the mismatches, each with its step,
        of one op in one module and phase.
        """
        first = mismatches[0][1]
        calls = {(step, one.occurrence) for step, one in mismatches}
        known = [one.max_ulps for _, one in mismatches if one.max_ulps is not None]
        return cls(
            **{**asdict(first), "max_ulps": max(known, default=None)},
            judgement="transient" if first.is_transient and len(calls) == 1 else "nondeterministic",
            steps=tuple(sorted({step for step, _ in calls})),
            num_places=len(mismatches),
        )

    @property
    def pattern(self) -> str:
        """The ``[phase/][module:]op`` pattern that matches only this op."""
        return OpPattern.exactly(self.phase, self.module, self.op)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The result of an audit.

    Attributes:
        steps: the steps that were audited.
        num_compared: number of ops that ran again and were compared, over all steps.
        skipped: reason -> number of ops that did not run again.
        findings: ops that differed, ordered by the first step in which they did.

    Examples:
        >>> report = train(None, mode="audit").audit_report
        det_callbacks: every op repeated its bits: ...
        >>> report.steps, report.num_compared, report.findings, report.replay
        ((0, 1, 2), 36, (), ())
    """

    steps: tuple[int, ...]
    num_compared: int
    skipped: dict[str, int]
    findings: tuple[AuditFinding, ...]

    @property
    def replay(self) -> tuple[str, ...]:
        """Patterns of the nondeterministic ops, for the argument ``replay``."""
        return tuple(
            found.pattern for found in self.findings if found.judgement == "nondeterministic"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data: ``audit.json``."""
        form: dict[str, Any] = json.loads(
            json.dumps({"schema": 1, **asdict(self), "replay": self.replay})
        )
        return form


class EquivalenceError(DetCallbacksError):
    """An op, described by ``mismatch``, gave different bits when it ran again on the same inputs.

    Examples:
        >>> try:
        ...     with BitwiseEquivalenceMode(raise_on_mismatch=True):
        ...         noisy(torch.ones(2))
        ... except EquivalenceError as error:
        ...     error.exit_code, error.mismatch.op
        (1, 'examples.noisy.default')
    """

    exit_code = 1
    _data = ("mismatch",)
    mismatch: OpMismatch | None = None


class AuditError(DetCallbacksError):
    """An audit found ops that do not repeat their bits; ``report`` lists them.

    Examples:
        >>> try:
        ...     train(None, mode="audit", extra=noisy)
        ... except AuditError as error:
        ...     error.exit_code, error.report.replay
        det_callbacks: 1 op gave different bits: ...
        (1, ('forward/:examples.noisy.default',))
    """

    exit_code = 1
    _data = ("report",)
    report: AuditReport | None = None
