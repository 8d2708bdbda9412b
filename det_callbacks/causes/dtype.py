"""The weights or the batch have the same shape and a different dtype, and a setting that determines it differs.

Example:
    trainer.precision is 32-true in the reference and bf16-true in the current run, which
    explains the first difference. Step 0: the initial state has a different dtype (net.weight):
    float32 [64, 32] in the reference, bfloat16 [64, 32] in the current run; the step started
    with this difference, so no op caused it. Use the reference's value, or record the reference
    again.
"""

from det_callbacks.causes.phrases.choices import USE_ONE_VALUE, explained_by
from det_callbacks.causes.phrases.steps import explain_first
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts

CAUSES: Causes = ("settings",)


def find(facts: Facts) -> Answer | None:
    choice = facts.dtype_choice
    if choice is None:
        return None
    return Answer(cause="settings", explanation=explained_by(choice, explain_first(facts)), advice=USE_ONE_VALUE)
