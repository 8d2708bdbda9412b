"""A choice differs without which the two runs would have done the same at the first difference.

Example:
    optimizer.AdamW.lr: 0.1 in the reference, 0.2 now, which explains the first difference. Step
    7, optimizer: aten.addcdiv_.default in net was called with different arguments (value: -0.1
    -> -0.2); its inputs match, so the difference starts here.
"""

from det_callbacks.causes.phrases.choices import explained_by
from det_callbacks.causes.phrases.steps import explain_first
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts

CAUSES: Causes = ("settings",)


def find(facts: Facts) -> Answer | None:
    choice = facts.explaining_choice
    if choice is None:
        return None
    return Answer(cause="settings", explanation=explained_by(choice, explain_first(facts)))
