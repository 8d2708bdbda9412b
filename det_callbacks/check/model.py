"""What a check found: plain frozen data."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from det_callbacks.verdict import Verdict

CHECK_SCHEMA = 1

RECORDING = "recording"
PLAIN = "plain"

Outcome = Literal["recorded", "match", "diverged", "not_comparable", "failed", "not_run"]
Problem = Literal[
    "",
    "ended",
    "killed",
    "nothing recorded",
    "incomplete",
    "no verdict",
    "unreadable",
    "not varied",
    "plain pair",
]
"""Why a run led to nothing: the script ended by itself, a signal ended it, no callback recorded, the recording is
incomplete, no verdict was written, a file cannot be read, the factor cannot be varied, the plain pair is no match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """One process of a check.

    Attributes:
        name: "recording", "plain" or the factor.
        change: what it has different from the recording, "2 workers instead of 0"; "" for nothing.
        command: its words; none where it was not started.
        folder: in which it was started.
        outcome: of it.
        breaks_bits: other bits came out, and nothing but what was changed (or nothing at all) explains them; False of
            every factor where the plain pair does not agree, since nothing can be told of it then.
        status: of the process, negative for a signal; None where it was not started.
        problem: why it led to nothing, "" where it led to an outcome.
        detail: of the problem, or what the outcome does not say; "" where there is nothing to add.
        verdict: None without one.
    """

    name: str
    change: str = ""
    command: tuple[str, ...] = ()
    folder: Path
    outcome: Outcome
    breaks_bits: bool = False
    status: int | None = None
    problem: Problem = ""
    detail: str = ""
    verdict: Verdict | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "change": self.change,
            "command": list(self.command),
            "folder": str(self.folder),
            "outcome": self.outcome,
            "breaks_bits": self.breaks_bits,
            "status": self.status,
            "problem": self.problem,
            "detail": self.detail,
            "verdict": None if self.verdict is None else self.verdict.to_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The runs of a check: the recording first, then the plain one, then one for each factor.

    Attributes:
        command: the script and its arguments, as they were given.
        folder: that holds the reference and a folder for each run.
        runs: in order.
        variables: environment variables that all runs had, and the caller's environment has not.
        is_hash_seed_random: each process had a ``PYTHONHASHSEED`` of its own.
    """

    command: tuple[str, ...]
    folder: Path
    runs: tuple[CheckedRun, ...]
    variables: Mapping[str, str]
    is_hash_seed_random: bool

    @property
    def breaking(self) -> tuple[CheckedRun, ...]:
        """The runs that broke the bits."""
        return tuple(run for run in self.runs if run.breaks_bits)

    @property
    def exit_code(self) -> int:
        """1 where a run broke the bits, else 2 where one led to nothing, else 3 where one is not comparable, else 0."""
        outcomes = {run.outcome for run in self.runs}
        if self.breaking:
            return 1
        if "failed" in outcomes or not outcomes & {"match", "not_comparable"}:
            return 2
        return 3 if "not_comparable" in outcomes else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, as ``det-callbacks check --json`` prints it and ``check.json`` holds it."""
        return {
            "schema": CHECK_SCHEMA,
            "exit_code": self.exit_code,
            "command": list(self.command),
            "folder": str(self.folder),
            "variables": dict(self.variables),
            "breaking": [run.name for run in self.breaking],
            "runs": [run.to_dict() for run in self.runs],
        }
