"""A parameter gets gradients, no optimizer has it, and it never changes.

Example:
    last.weight, last.bias get gradients and are in no optimizer, so they keep their first values. Give them to an
    optimizer: self.parameters() has what is registered by then, lists of modules need nn.ModuleList. What is to
    stay as it is needs no gradient: requires_grad_(False).
"""

from det_callbacks.findings.facts import MIN_STEPS, FitFacts, RunFacts
from det_callbacks.findings.optimized import parameters_of
from det_callbacks.findings.rule import Found, Level, in_fit, in_fits
from det_callbacks.report.console import listed

NAME = "not_in_optimizer"
LEVEL: Level = "state"


def find(facts: RunFacts) -> Found | None:
    return in_fits(facts, _in_fit)


def _in_fit(fit: FitFacts) -> Found | None:
    states = {name: fit.states.get(name) for name in parameters_of(fit).without_optimizer}
    known = {name: state for name, state in states.items() if state is not None and len(state.steps) >= MIN_STEPS}
    names = [name for name, state in known.items() if state.is_constant]  # else something else updates it
    return in_fit(fit, {int(step) for name in names for step in known[name].steps}, names) if names else None


def explain(found: Found) -> str:
    what = "gets gradients and is" if len(found.names) == 1 else "get gradients and are"
    kept = "it keeps its first value" if len(found.names) == 1 else "they keep their first values"
    return f"{listed(found.names)} {what} in no optimizer, so {kept}"


def advise(found: Found) -> str:
    return (
        "Give them to an optimizer: self.parameters() has what is registered by then, lists of modules need "
        "nn.ModuleList. What is to stay as it is needs no gradient: requires_grad_(False)"
    )
