"""Nothing earlier explains it: the cause is the phase of the origin, or of the first difference if that is unknown.

Example:
    Step 7, forward: aten.mul.Tensor #5 in net.chain (train.py:45, forward) produced different
    bits; its inputs match, so the difference starts here.
"""

from det_callbacks.causes.phrases.unrecorded import advise_lost_value
from det_callbacks.causes.rule import CAUSE_OF_PHASE, Answer, Causes, is_of_parameter
from det_callbacks.compare.facts import COLLECTIVES, Facts
from det_callbacks.verdict import Cause

CAUSES: Causes = ("forward", "backward", "optimizer", "collective", "unknown")


def find(facts: Facts) -> Answer:
    return Answer(cause=cause_of_first(facts), advice=advise_lost_value(facts))


def cause_of_first(facts: Facts) -> Cause:
    """Return the phase of the origin, or of the first difference if there is no origin."""
    first = facts.first
    if facts.origin is None and first.role in ("delivered", "graph_output"):
        return "unknown"  # the other ranks know more of a collective: ``compare/collectives.py``
    if facts.origin is None and first.role == "named" and first.divergence.phase == "state":
        return _cause_of_state_left(facts)
    found = facts.leading
    if found.divergence.op.startswith(COLLECTIVES):
        return "collective"
    if facts.starts_backward or _is_between_passes(facts):
        return "backward"
    return CAUSE_OF_PHASE.get(found.divergence.phase, "unknown")


def _cause_of_state_left(facts: Facts) -> Cause:
    """Return the cause of state that only differs after the step: the optimizer owns what has a gradient."""
    reference, current = facts.gradients
    gradients = {*reference, *current}
    if is_of_parameter(facts.first) or f"grad of {facts.first.divergence.name}" in gradients:
        return "optimizer"
    return "forward" if gradients else "unknown"  # an update without an optimizer may run anywhere


def _is_between_passes(facts: Facts) -> bool:
    """Return whether the origin, or the first difference, ran between a forward pass and its backward pass."""
    program, position = facts.difference.side(facts.leading.row)
    if program.sites[position].phase != "other":
        return False
    before = (site.phase for site in reversed(program.sites[:position]) if site.op)
    after = (site.phase for site in program.sites[position:] if site.op)  # the loss has a row there
    passes = [next((phase for phase in phases if phase in CAUSE_OF_PHASE), None) for phases in (before, after)]
    return passes == ["forward", "backward"]
