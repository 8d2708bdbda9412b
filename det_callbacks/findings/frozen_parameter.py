"""A parameter never changes, although its gradients change and exceed rounding error.

Example:
    last.weight and last.bias had gradients in 8 updates, from step 0 to 7, and never changed.
    Check the learning rate of their parameter group, code that restores them, and their dtype:
    bfloat16 rounds a small update away.
"""

from det_callbacks.findings.facts import MIN_STEPS, FitFacts
from det_callbacks.findings.optimized import parameters_of
from det_callbacks.findings.rule import Found, Level, found_in, from_to, of_one_process
from det_callbacks.text import count, listed

NAME = "frozen_parameter"
LEVEL: Level = "state"


@of_one_process
def find(fit: FitFacts) -> Found | None:
    names, steps = list[str](), set[int]()
    for name in parameters_of(fit).with_large_gradient:
        state, gradient = fit.states.get(name), fit.gradients.get(name)
        if state is None or gradient is None or not state.is_constant:
            continue
        if len(gradient.steps) >= MIN_STEPS and not gradient.is_constant:
            names.append(name)
            steps.update(gradient.steps.tolist())
    if not names:
        return None
    return found_in(
        fit,
        steps=steps,
        names=names,
        explanation=f"{listed(names)} had gradients in {count(len(steps), 'update')}, {from_to(steps)}, and never "
        "changed",
        advice="Check the learning rate of their parameter group, code that restores them, and their dtype: bfloat16 "
        "rounds a small update away",
    )
