"""A scheduler, a callback or a hook changed an option of the optimizer during the fit.

Example:
    From step 4 on, lr of group 0 is 0.01 in the reference and 0.011 in the current run. Step 4,
    state: net.0.weight has different bits; the op that wrote it was not recorded, so the
    verdict cannot say where the difference starts. Check what sets lr of group 0 during the
    fit: a learning rate scheduler, a callback, or a hook of the module.
"""

from det_callbacks.causes.phrases.steps import explain_first
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts
from det_callbacks.text import capitalised, listed

CAUSES: Causes = ("optimizer",)


def find(facts: Facts) -> Answer | None:
    if not facts.evidence.options or facts.sources:
        return None
    found = facts.leading.divergence
    if found.op and (found.phase != "optimizer" or found.kind == "content"):
        return None
    # below level op only the updated state shows the update
    if not found.op and found.phase not in ("optimizer", "state"):
        return None
    changes = [
        f"from step {one.since} on, {one.name} is {one.reference} in the reference and {one.current} in the current run"
        for one in facts.evidence.options
    ]
    return Answer(
        cause="optimizer",
        explanation=f"{capitalised(listed(changes, '; '))}. {explain_first(facts)}",
        advice=f"Check what sets {listed(one.name for one in facts.evidence.options)} during the fit: a learning rate "
        "scheduler, a callback, or a hook of the module",
    )
