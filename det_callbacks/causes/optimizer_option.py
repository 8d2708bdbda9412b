"""During the fit, an update used another option of the optimizer: a scheduler or a callback changed it.

Example:
    lr of group 0 is 0.01 in the reference, 0.011 now, from step 4 on. Step 4, state:
    net.0.weight of net.0 holds different bits; the op that wrote it was not recorded, so where
    it starts cannot be proven. Look at what sets it during the fit: a learning rate scheduler,
    a callback, a hook of the module.
"""

from det_callbacks.causes.phrases.steps import explain_first
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts
from det_callbacks.report.console import listed

CAUSES: Causes = ("optimizer",)


def find(facts: Facts) -> Answer | None:
    if not facts.evidence.options or facts.sources:
        return None
    found = facts.leading.divergence
    if found.op and (found.phase != "optimizer" or found.kind == "content"):
        return None
    # below level op the update is seen by the state that it leaves
    if not found.op and found.phase not in ("optimizer", "state"):
        return None
    changes = [
        f"{one.name} is {one.reference} in the reference, {one.current} now, from step {one.since} on"
        for one in facts.evidence.options
    ]
    return Answer(
        cause="optimizer",
        explanation=f"{listed(changes, '; ')}. {explain_first(facts)}",
        advice="Look at what sets it during the fit: a learning rate scheduler, a callback, a hook of the module",
    )
