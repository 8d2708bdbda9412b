"""Only shapes, dtypes, layouts or the ops differ; tensors that both runs have are equal.

Example:
    Step 7, forward: aten.slice_copy.Tensor in net (train.py:12, forward) produced a different
    shape: float32 [8, 4] in the reference, float32 [8, 3] in the current run; its inputs match,
    so the difference starts here.
"""

from det_callbacks.causes.phrases.unrecorded import advise_lost_value
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts

CAUSES: Causes = ("structure",)


def find(facts: Facts) -> Answer | None:
    if not {"content", "argument"}.isdisjoint(facts.difference.kinds.values()):
        return None
    return Answer(cause="structure", advice=advise_lost_value(facts))
