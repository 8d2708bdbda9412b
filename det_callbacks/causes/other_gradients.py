"""The optimizer got the gradients of different parameters, in a different order, or in one run only.

Example:
    Step 7: the optimizer got 3 gradients in the reference and 2 in the current run; only one
    run has grad of head.bias. Pass the optimizer the same parameters in the same order: check
    where the script builds the optimizer, and requires_grad.
"""

from det_callbacks.causes.phrases.steps import place
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts
from det_callbacks.text import count, listed

CAUSES: Causes = ("optimizer",)


def find(facts: Facts) -> Answer | None:
    first = facts.first.divergence
    if first.phase != "gradient" or first.op or first.kind not in ("missing", "extra"):
        return None
    reference, current = facts.gradients
    in_one_run = sorted({*reference} ^ {*current})
    if in_one_run and not (reference and current):
        updated, idle = ("reference", "current run") if reference else ("current run", "reference")
        num_gradients = count(len({*reference, *current}), "gradient")
        what = f"the optimizer updated nothing in the {idle}, and got {num_gradients} in the {updated}"
        advice = "Check what calls optimizer.step(): a condition or a gradient scaler may skip it"
    elif in_one_run:
        counts = f"{len({*reference})} gradients in the reference and {len({*current})} in the current run"
        what = f"the optimizer got {counts}; only one run has {listed(in_one_run)}"
        advice = (
            "Pass the optimizer the same parameters in the same order: check where the script builds the optimizer, "
            "and requires_grad"
        )
    elif len(reference) == len(current):
        what = "the optimizer got the same gradients in a different order"
        advice = (
            "Pass the optimizer the same parameters in the same order, and step several optimizers in the same order"
        )
    else:
        return None
    return Answer(
        cause="optimizer",
        explanation=f"{place(facts)}: {what}",
        advice=advice,
    )
