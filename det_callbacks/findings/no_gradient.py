"""A trainable parameter never gets a gradient, although its optimizer updates others.

Example:
    unused.weight and unused.bias never got a gradient, although optimizer 0 updated its other
    parameters in 24 steps, from step 0 to 23. Check where the module is called, and whether its
    output reaches the loss: detach(), .data, .item() and torch.no_grad() cut the graph. Leave
    unused parameters out of the optimizer.
"""

from det_callbacks.findings.facts import FitFacts
from det_callbacks.findings.optimized import parameters_of
from det_callbacks.findings.rule import Found, Level, found_in, from_to, of_one_process
from det_callbacks.text import count, listed

NAME = "no_gradient"
LEVEL: Level = "state"

MIN_UPDATES = 20  # by then a rare branch, such as an expert, has a gradient


@of_one_process
def find(fit: FitFacts) -> Found | None:
    for optimizer, names in parameters_of(fit).by_optimizer.items():
        steps = {int(step) for name in names if name in fit.gradients for step in fit.gradients[name].steps}
        without = [name for name in names if name not in fit.gradients]
        if without and len(steps) >= MIN_UPDATES:
            return found_in(
                fit,
                steps=steps,
                names=without,
                explanation=f"{listed(without)} never got a gradient, although {optimizer} updated its other "
                f"parameters in {count(len(steps), 'step')}, {from_to(steps)}",
                advice="Check where the module is called, and whether its output reaches the loss: detach(), .data, "
                ".item() and torch.no_grad() cut the graph. Leave unused parameters out of the optimizer",
            )
    return None
