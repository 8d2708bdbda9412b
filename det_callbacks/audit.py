"""What an audit found, and the list of patterns that record and verify take to replay it."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Judgement = Literal["nondeterministic", "transient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFinding:
    """One op that gave other bits when it was run again on the same inputs.

    Attributes:
        judgement: "transient" when a single call of it differed, and its third run agreed with one of the two before.
        phase: of the op.
        module: qualified name; "" outside any module.
        op: ``namespace.op.overload``.
        source: lines of the user's code, innermost first; of the forward call for a backward op.
        steps: in which it differed.
        num_places: outputs and occurrences of it that differed, all steps together.
        shape: of the first such output.
        dtype: of the first such output.
        num_elements: that differed in the first such output.
        max_ulps: largest distance among all of them; None where there is none.
    """

    judgement: Judgement
    phase: str
    module: str
    op: str
    source: tuple[str, ...]
    steps: tuple[int, ...]
    num_places: int
    shape: tuple[int, ...]
    dtype: str
    num_elements: int
    max_ulps: int | None

    @property
    def pattern(self) -> str:
        """The ``[phase/][module:]op`` that means this op and no other."""
        return f"{self.phase}/{_escaped(self.module)}:{_escaped(self.op)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The outcome of an audit.

    Attributes:
        steps: that were audited.
        num_compared: ops that were run again and compared, all steps together.
        skipped: why ops were not run again -> how many.
        findings: what differed, in the order of the first step in which it did.
    """

    steps: tuple[int, ...]
    num_compared: int
    skipped: dict[str, int]
    findings: tuple[AuditFinding, ...]

    @property
    def replay(self) -> tuple[str, ...]:
        """Patterns of the nondeterministic ops, for the argument ``replay``."""
        return tuple(found.pattern for found in self.findings if found.judgement == "nondeterministic")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data: ``audit.json``."""
        form: dict[str, Any] = json.loads(json.dumps({"schema": 1, **asdict(self), "replay": self.replay}))
        return form


def replay_list(patterns: Sequence[str], comments: Iterable[str] = ()) -> str:
    """Return a YAML list of patterns that the argument ``replay`` takes as it is."""
    lines = [f"# {comment}" for comment in comments]
    lines += ["- '" + pattern.replace("'", "''") + "'" for pattern in patterns] or ["[]"]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """Return the fnmatch pattern that matches this text only."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in text)
