"""The parts of each rule's file."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from det_callbacks.compare.differences import Finding
from det_callbacks.compare.facts import Facts
from det_callbacks.verdict import Cause

Causes: TypeAlias = tuple[Cause, ...]

CAUSE_OF_PHASE: Mapping[str, Cause] = {
    "forward": "forward",
    "backward": "backward",
    "gradient": "backward",
    "optimizer": "optimizer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of a rule that applies; its sentences have no final stop."""

    cause: Cause
    explanation: str = ""  # what differs and where it starts; "" for ``explain_first``
    advice: str = ""  # what to do about it


class Rule(Protocol):
    """A module with the causes that it may name and a function.

    The first paragraph of the module's docstring says when the rule applies. After "Example:" comes a whole
    explanation, which a test compares with a real verdict. ``make causes`` writes both to
    ``docs/reference/causes.md``.
    """

    CAUSES: Causes

    def find(self, facts: Facts) -> Answer | None:
        """Return the answer if the rule applies, else None."""


def is_of_parameter(finding: Finding) -> bool:
    """Return whether a tensor is a gradient or a state of a parameter."""
    name, module = finding.divergence.name or "", finding.divergence.module
    if not name or not module:
        return " of " in name
    return not name.startswith(f"{module}.")
