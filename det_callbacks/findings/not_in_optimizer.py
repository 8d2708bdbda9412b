"""A parameter gets gradients, no optimizer has it, and it never changes.

Example:
    last.weight and last.bias get gradients and are in no optimizer, so they keep their initial
    values. Pass them to an optimizer: self.parameters() covers only modules that are registered
    before the call, and a list of modules must be an nn.ModuleList. Call requires_grad_(False)
    on parameters that should not change.
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
    if len(names) == 1:
        what = "gets gradients and is in no optimizer, so it keeps its initial value"
    else:
        what = "get gradients and are in no optimizer, so they keep their initial values"
    return found_in(
        fit,
        steps=steps,
        names=names,
        explanation=f"{listed(names)} {what}",
        advice="Pass them to an optimizer: self.parameters() covers only modules that are registered before the call, "
        "and a list of modules must be an nn.ModuleList. Call requires_grad_(False) on parameters that should not "
        "change",
    )
