"""During the fit, an update used another option of the optimizer: a scheduler or a callback changed it.

Example:
    lr of group 0 is 0.01 in the reference, 0.011 now, from step 4 on. Step 4, state: net.0.weight of net.0 holds
    different bits; the op that wrote it was not recorded, so where it starts cannot be proven. Look at what sets it
    during the fit: a learning rate scheduler, a callback, a hook of the module.
"""

from typing import Literal

from det_callbacks.causes.phrases.steps import explain_first
from det_callbacks.compare.facts import Facts
from det_callbacks.report.console import listed

NAME = "optimizer option"


def cause(facts: Facts) -> Literal["optimizer"] | None:
    if not facts.evidence.options or facts.sources:
        return None
    found = (facts.origin or facts.first).divergence
    # below level op the update is seen by the state that it leaves
    is_update = found.phase == "optimizer" or (found.phase == "state" and not found.op)
    return "optimizer" if is_update and (found.kind != "content" or not found.op) else None


def explain(facts: Facts) -> str:
    changes = [
        f"{one.name} is {one.reference} in the reference, {one.current} now, from step {one.since} on"
        for one in facts.evidence.options
    ]
    return f"{listed(changes, '; ')}. {explain_first(facts)}"


def advise(facts: Facts) -> str:
    return "Look at what sets it during the fit: a learning rate scheduler, a callback, a hook of the module"
