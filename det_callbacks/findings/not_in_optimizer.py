"""A parameter gets gradients, no optimizer has it, and it never changes.

Example:
    The backward pass computes gradients for last.weight and last.bias, but no optimizer uses
    them, so the initial values never change. Pass the parameters to an optimizer:
    self.parameters() covers only modules that are registered before the call. Call
    requires_grad_(False) on parameters that should not change.
"""

from det_callbacks.findings.facts import MIN_STEPS, FitFacts
from det_callbacks.findings.optimized import parameters_of
from det_callbacks.findings.rule import Found, Level, found_in, of_one_process
from det_callbacks.text import listed

NAME = "not_in_optimizer"
LEVEL: Level = "state"


@of_one_process
def find(fit: FitFacts) -> Found | None:
    names, steps = list[str](), set[int]()
    for name in parameters_of(fit).without_optimizer:
        state = fit.states.get(name)
        # otherwise something else updates it
        if state is not None and len(state.steps) >= MIN_STEPS and state.is_constant:
            names.append(name)
            steps.update(state.steps.tolist())
    if not names:
        return None
    return found_in(
        fit,
        steps=steps,
        names=names,
        explanation=f"The backward pass computes gradients for {listed(names)}, but no optimizer uses them, so the "
        "initial values never change",
        advice="Pass the parameters to an optimizer: self.parameters() covers only modules that are registered before "
        "the call. Call requires_grad_(False) on parameters that should not change",
    )
