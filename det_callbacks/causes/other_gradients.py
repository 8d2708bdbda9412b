"""An optimizer got gradients more often in one run, for different parameters, or in a different order.

Example:
    Step 7: the optimizer got 3 gradients in the reference and 2 in the current run; only one
    run has grad of head.bias. Pass the optimizer the same parameters in the same order: check
    where the script builds the optimizer, and requires_grad.
"""

from collections import Counter

from det_callbacks.causes.phrases.steps import place
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts
from det_callbacks.text import count, listed

CAUSES: Causes = ("optimizer",)

_CHECK_CALLS = "Check what calls optimizer.step(): a condition or a gradient scaler may skip it"


def find(facts: Facts) -> Answer | None:
    first = facts.first.divergence
    if first.phase != "gradient" or first.op or first.kind not in ("missing", "extra"):
        return None
    if facts.explaining_choice is not None:
        return None  # an optimizer with other options may take gradients more often
    found = _other_updates(facts) or _other_parameters(facts)
    if found is None:
        return None
    what, advice = found
    return Answer(cause="optimizer", explanation=f"{place(facts)}: {what}", advice=advice)


def _other_updates(facts: Facts) -> tuple[str, str] | None:
    """Return what differs, and what to do, if an optimizer got gradients more often in one run."""
    reference, current = facts.updates
    if not (reference and current) or Counter(reference) == Counter(current):
        return None
    if len(facts.evidence.optimizers) == 1:
        times = f"{count(len(reference), 'time')} in the reference and {count(len(current), 'time')} in the current run"
        return f"the optimizer got its gradients {times}", _CHECK_CALLS
    for longer, shorter, updated, idle in (
        (reference, current, "reference", "current run"),
        (current, reference, "current run", "reference"),
    ):
        skipped = [number for number in dict.fromkeys(longer) if number not in shorter]
        if skipped and [number for number in longer if number in shorter] == shorter:
            who = listed(f"optimizer {number}" for number in skipped)
            what = f"{who} updated nothing in the {idle}, and got gradients in the {updated}"
            return what, _CHECK_CALLS
    order = f"{', '.join(reference)} in the reference and {', '.join(current)} in the current run"
    return f"the optimizers got their gradients in the order {order}", _CHECK_CALLS


def _other_parameters(facts: Facts) -> tuple[str, str] | None:
    reference, current = facts.gradients
    in_one_run = sorted({*reference} ^ {*current})
    if in_one_run and not (reference and current):
        updated, idle = ("reference", "current run") if reference else ("current run", "reference")
        num_gradients = count(len({*reference, *current}), "gradient")
        return f"the optimizer updated nothing in the {idle}, and got {num_gradients} in the {updated}", _CHECK_CALLS
    if in_one_run:
        counts = f"{len({*reference})} gradients in the reference and {len({*current})} in the current run"
        advice = (
            "Pass the optimizer the same parameters in the same order: check where the script builds the optimizer, "
            "and requires_grad"
        )
        return f"the optimizer got {counts}; only one run has {listed(in_one_run)}", advice
    if len(reference) == len(current):
        advice = (
            "Pass the optimizer the same parameters in the same order, and step several optimizers in the same order"
        )
        return "the optimizer got the same gradients in a different order", advice
    return None
