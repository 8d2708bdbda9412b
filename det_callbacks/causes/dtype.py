"""The weights or the batch enter the step with another dtype in the same shape, and a choice of the dtype differs.

Example:
    trainer.precision: 32-true in the reference, bf16-true now, which explains the first
    difference. Step 0: the initial state has a different structure (net.weight): float32 [64,
    32] in the reference, bfloat16 [64, 32] now; it entered the step that way, so no op is to
    blame.
"""

from det_callbacks.causes.phrases.choices import explained_by
from det_callbacks.causes.phrases.steps import explain_first
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts

CAUSES: Causes = ("settings",)


def find(facts: Facts) -> Answer | None:
    choice = facts.dtype_choice
    if choice is None:
        return None
    return Answer(cause="settings", explanation=explained_by(choice, explain_first(facts)))
