"""The optimizer was given the gradients of other parameters, or the same ones in another order.

Example:
    Step 7: the optimizer was given 3 gradients in the reference, 2 now; in one run only: grad
    of head.bias. Give it the same parameters in the same order: look at configure_optimizers
    and requires_grad.
"""

from det_callbacks.causes.phrases.steps import place
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts
from det_callbacks.report.console import listed

CAUSES: Causes = ("optimizer",)


def find(facts: Facts) -> Answer | None:
    first = facts.first.divergence
    if first.phase != "gradient" or first.op or first.kind not in ("missing", "extra"):
        return None
    ours, theirs = facts.gradients
    in_one_run = sorted({*ours} ^ {*theirs})
    if in_one_run:
        counts = f"{len({*ours})} gradients in the reference, {len({*theirs})} now"
        what = f"the optimizer was given {counts}; in one run only: {listed(in_one_run)}"
    elif len(ours) == len(theirs):
        what = "the optimizer was given the same gradients in a different order"
    else:
        return None
    return Answer(
        cause="optimizer",
        explanation=f"{place(facts)}: {what}",
        advice="Give it the same parameters in the same order: look at configure_optimizers and requires_grad",
    )
