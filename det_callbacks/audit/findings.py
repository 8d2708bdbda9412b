"""What an audit found, and the list of patterns that record and verify take to replay it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Judgement = Literal["nondeterministic", "transient", "not held"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFinding:
    """One op that gave other bits when it was run again on the same inputs.

    Attributes:
        judgement: "nondeterministic"; "transient" when one of three runs of one step disagreed with the others; "not
            held" when the runs did not start from the same place: what the op read was not put back.
        phase: of the op.
        module: qualified name; "" outside any module.
        op: ``namespace.op.overload``; "" for something that entered the step (``name`` says what).
        name: of a tensor or generator that entered the step.
        source: lines of the user's code, innermost first; of the forward call for a backward op.
        steps: in which it differed.
        num_places: outputs and occurrences of it that differed, all steps together.
        shape: of the first such output.
        dtype: of the first such output.
        num_elements: that differed in the first such output; None where only digests were compared.
        max_ulps: largest distance among them; None where only digests were compared, or where there is none.
    """

    judgement: Judgement
    phase: str
    module: str
    op: str
    name: str | None = None
    source: tuple[str, ...] = ()
    steps: tuple[int, ...]
    num_places: int
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    num_elements: int | None = None
    max_ulps: int | None = None

    @property
    def pattern(self) -> str:
        """The ``[phase/][module:]op`` that means this op and no other."""
        return f"{self.phase}/{escape_pattern(self.module)}:{escape_pattern(self.op)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as plain data."""
        return {
            "judgement": self.judgement,
            "phase": self.phase,
            "module": self.module,
            "op": self.op,
            "name": self.name,
            "source": list(self.source),
            "steps": list(self.steps),
            "num_places": self.num_places,
            "shape": None if self.shape is None else list(self.shape),
            "dtype": self.dtype,
            "num_elements": self.num_elements,
            "max_ulps": self.max_ulps,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The outcome of an audit.

    Attributes:
        kind: "ops" or "step": what was run again.
        steps: that were audited.
        num_compared: ops (kind "ops") or sites (kind "step") that were compared, all steps together.
        skipped: why ops were not run twice -> how many (kind "ops").
        findings: what differed, in the order of the first step in which it did.
        put_back: names of what the audited steps changed and was put back (kind "step").
    """

    kind: Literal["ops", "step"]
    steps: tuple[int, ...]
    num_compared: int
    skipped: dict[str, int]
    findings: tuple[AuditFinding, ...]
    put_back: tuple[str, ...] = ()

    @property
    def replay(self) -> tuple[str, ...]:
        """Patterns of the nondeterministic ops, for the argument ``replay``."""
        return tuple(found.pattern for found in self.findings if found.judgement == "nondeterministic" and found.op)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data: ``audit.json``."""
        return {
            "schema": 1,
            "kind": self.kind,
            "steps": list(self.steps),
            "num_compared": self.num_compared,
            "skipped": dict(self.skipped),
            "findings": [found.to_dict() for found in self.findings],
            "put_back": list(self.put_back),
            "replay": list(self.replay),
        }


def escape_pattern(text: str) -> str:
    """Return the fnmatch pattern that matches this text only."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in text)


def replay_list(patterns: Sequence[str], comments: Iterable[str] = ()) -> str:
    """Return a YAML list of patterns that the argument ``replay`` takes as it is."""
    lines = [f"# {comment}" for comment in comments]
    lines += [f"- {_quoted(pattern)}" for pattern in patterns] or ["[]"]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
