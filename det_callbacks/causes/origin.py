"""An op produced different bits although its inputs match, and nothing earlier explains it.

Example:
    Step 7, forward: aten.mul.Tensor #5 in net.chain at train.py:45 in forward produced different bits; its inputs
    match, so the difference starts here.

    Evidence
      initial state: 2 tensors, all equal
"""

from det_callbacks.causes.phrases.steps import explain_first as explain
from det_callbacks.causes.phrases.unrecorded import advise_lost_value as advise
from det_callbacks.causes.rule import Computation, cause_of_op
from det_callbacks.compare.facts import Facts

__all__ = ["NAME", "advise", "cause", "explain"]

NAME = "origin"


def cause(facts: Facts) -> Computation | None:
    return None if facts.origin is None else cause_of_op(facts)
