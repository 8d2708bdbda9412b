"""A parameter goes into updates with gradients that change and are more than rounding, and never changes itself.

Example:
    last.weight, last.bias had gradients in 8 updates, from step 0 to 7, and never changed. Look at the learning
    rate of their parameter group, at what writes them back, and at their dtype: in bfloat16 a small update is
    rounded away.
"""

from det_callbacks.findings.facts import MIN_STEPS, FitFacts, RunFacts
from det_callbacks.findings.optimized import parameters_of
from det_callbacks.findings.rule import Found, Level, in_fit, in_fits
from det_callbacks.report.console import count, listed

NAME = "frozen_parameter"
LEVEL: Level = "state"


def find(facts: RunFacts) -> Found | None:
    return in_fits(facts, _in_fit)


def _in_fit(fit: FitFacts) -> Found | None:
    names, steps = list[str](), set[int]()
    for name in parameters_of(fit).with_large_gradient:
        state, gradient = fit.states.get(name), fit.gradients.get(name)
        is_trained = gradient is not None and len(gradient.steps) >= MIN_STEPS and gradient.num_values > 1
        if gradient is not None and is_trained and state is not None and state.is_constant:
            names.append(name)
            steps |= {int(step) for step in gradient.steps}
    return in_fit(fit, steps, names, count(len(steps), "update")) if names else None


def explain(found: Found) -> str:
    first, last = found.steps
    return f"{listed(found.names)} had gradients in {found.detail}, from step {first} to {last}, and never changed"


def advise(found: Found) -> str:
    return (
        "Look at the learning rate of their parameter group, at what writes them back, and at their dtype: in bfloat16 "
        "a small update is rounded away"
    )
