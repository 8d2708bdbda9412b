"""What each file of a rule has; ``table.py`` lists the rules in the order in which they are asked."""

from collections.abc import Mapping
from typing import Literal, Protocol

from det_callbacks.compare.differences import Finding
from det_callbacks.compare.facts import COLLECTIVES, Facts
from det_callbacks.verdict import Cause

Computation = Literal["forward", "backward", "optimizer", "collective", "unknown"]
"""The causes that follow from where something ran, where nothing earlier explains it."""

CAUSE_OF_PHASE: Mapping[str, Literal["forward", "backward", "optimizer"]] = {
    "forward": "forward",
    "backward": "backward",
    "gradient": "backward",
    "optimizer": "optimizer",
}
"""Phase of a site -> cause."""


class Rule(Protocol):
    """One way to a cause: a module with a name and three functions, and an example of the whole message.

    The module's docstring says in its first paragraph when the rule applies. The example follows "Example:". The page
    ``docs/reference/causes.md`` is made of both (``make causes``), and a test compares the example with a real verdict.
    """

    NAME: str

    def cause(self, facts: Facts) -> Cause | None:
        """Return the cause where the rule applies, else None; the annotation lists the causes that it may name."""

    def explain(self, facts: Facts) -> str:
        """Return what differs and where it starts, without a final stop."""

    def advise(self, facts: Facts) -> str:
        """Return what to do about it, without a final stop; "" where there is nothing to add."""


def cause_of_op(facts: Facts) -> Computation:
    """Return the cause that follows from where the origin ran, or what differs first where none is proven."""
    found = facts.origin or facts.first
    if found.divergence.op.startswith(COLLECTIVES):
        return "collective"
    if facts.starts_backward or _is_between_passes(facts):
        return "backward"
    return CAUSE_OF_PHASE.get(found.divergence.phase, "unknown")


def _is_between_passes(facts: Facts) -> bool:
    """Return whether the origin, or what differs first, ran after a forward pass and before its backward pass."""
    program, position = facts.difference.side((facts.origin or facts.first).row)
    if program.sites[position].phase != "other":
        return False
    before = (site.phase for site in reversed(program.sites[:position]) if site.op)
    after = (site.phase for site in program.sites[position:] if site.op)  # the loss has a row of its own there
    passes = [next((phase for phase in phases if phase in CAUSE_OF_PHASE), None) for phases in (before, after)]
    return passes == ["forward", "backward"]


def is_of_parameter(finding: Finding) -> bool:
    """Return whether a tensor is a gradient or a state of a parameter: its name does not begin with its module's."""
    name, module = finding.divergence.name or "", finding.divergence.module
    if not name or not module:
        return " of " in name
    return not name.startswith(f"{module}.")
