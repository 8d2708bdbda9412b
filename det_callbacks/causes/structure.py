"""Only shapes, dtypes or layouts differ, or which ops run; no tensor that both runs have holds other bits.

Example:
    Step 7, forward: aten.slice_copy.Tensor in net at train.py:12 in forward produced a different structure: float32
    [8, 4] in the reference, float32 [8, 3] now; its inputs match, so the difference starts here.
"""

from typing import Literal

from det_callbacks.causes.phrases.steps import explain_first as explain
from det_callbacks.causes.phrases.unrecorded import advise_lost_value as advise
from det_callbacks.compare.facts import Facts

__all__ = ["NAME", "advise", "cause", "explain"]

NAME = "structure"


def cause(facts: Facts) -> Literal["structure"] | None:
    kinds = {*facts.difference.kinds.values()}
    return "structure" if kinds.isdisjoint({"content", "argument"}) else None
