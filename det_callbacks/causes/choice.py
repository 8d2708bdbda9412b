"""A setting differs and explains the first difference.

Example:
    optimizer.AdamW.lr is 0.1 in the reference and 0.2 in the current run, which explains the
    first difference. Step 7, optimizer: aten.addcdiv_.default in net was called with different
    arguments (value: -0.1 -> -0.2); its inputs match, so the difference starts here. Use the
    reference's value, or record the reference again.
"""

from det_callbacks.causes.phrases.choices import USE_ONE_VALUE, explained_by
from det_callbacks.causes.phrases.steps import explain_first
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts

CAUSES: Causes = ("settings",)


def find(facts: Facts) -> Answer | None:
    choice = facts.explaining_choice
    if choice is None:
        return None
    return Answer(cause="settings", explanation=explained_by(choice, explain_first(facts)), advice=USE_ONE_VALUE)
