"""The optimizer was given the gradients of other parameters, or the same ones in another order.

Example:
    Step 7: the optimizer was given 3 gradients in the reference, 2 now; in one run only: grad of head.bias. Give it
    the same parameters in the same order: look at configure_optimizers and requires_grad.
"""

from typing import Literal

from det_callbacks.causes.phrases.steps import place
from det_callbacks.compare.facts import Facts
from det_callbacks.report.console import listed

NAME = "other gradients"


def cause(facts: Facts) -> Literal["optimizer"] | None:
    first = facts.first.divergence
    is_in_one_run = first.phase == "gradient" and not first.op and first.kind in ("missing", "extra")
    ours, theirs = facts.gradients
    are_others = {*ours} != {*theirs}
    is_other_order = len(ours) == len(theirs)
    return "optimizer" if is_in_one_run and (are_others or is_other_order) else None


def explain(facts: Facts) -> str:
    ours, theirs = map(set, facts.gradients)
    if ours == theirs:
        return f"{place(facts)}: the optimizer was given the same gradients in a different order"
    only = listed(sorted(ours ^ theirs))
    counts = f"{len(ours)} gradients in the reference, {len(theirs)} now"
    return f"{place(facts)}: the optimizer was given {counts}; in one run only: {only}"


def advise(facts: Facts) -> str:
    return "Give it the same parameters in the same order: look at configure_optimizers and requires_grad"
