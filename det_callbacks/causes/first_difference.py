"""No op is proven to be the origin, and nothing earlier explains the difference.

Example:
    Step 7, forward: loss holds different bits; the op that wrote it was not recorded, so where it starts cannot be
    proven.

    Evidence
      initial state: 1 tensor, all equal
"""

from det_callbacks.causes.phrases.steps import explain_first as explain
from det_callbacks.causes.phrases.unrecorded import advise_lost_value as advise
from det_callbacks.causes.rule import Computation, cause_of_op, is_of_parameter
from det_callbacks.compare.facts import Facts

__all__ = ["NAME", "advise", "cause", "explain"]

NAME = "first difference"


def cause(facts: Facts) -> Computation:
    first = facts.first
    if first.role in ("delivered", "graph_output"):
        return "unknown"  # of a collective the other ranks know more: see ``compare/collectives.py``
    if first.role == "named" and first.divergence.phase == "state":
        return _cause_of_state_left(facts)
    return cause_of_op(facts)


def _cause_of_state_left(facts: Facts) -> Computation:
    """Return the cause of state that only differs after the step: an optimizer owns what it has a gradient of."""
    ours, theirs = facts.gradients
    gradients = {*ours, *theirs}
    if is_of_parameter(facts.first) or f"grad of {facts.first.divergence.name}" in gradients:
        return "optimizer"
    return "forward" if gradients else "unknown"  # an update without an optimizer may run anywhere
