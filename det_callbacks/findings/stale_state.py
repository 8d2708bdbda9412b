"""The statistics of a normalisation, or an averaged copy of the weights, stay while the weights that go with them move.

Example:
    norm.running_mean, norm.running_var never change in steps 0 to 7, while norm.weight does. Is that meant? A
    module in eval mode keeps its statistics, also when something called eval() for a validation and not train()
    after it.
"""

import re

from det_callbacks.findings.facts import MIN_STEPS, FitFacts, RunFacts, Series
from det_callbacks.findings.rule import Found, Level, in_fit, in_fits, span
from det_callbacks.report.console import listed

NAME = "stale_state"
LEVEL: Level = "state"

MIN_COPY_STEPS = 20  # after which a copy that is averaged has been updated
_STATISTICS = re.compile(r"(.*?)(?:running_mean|running_var)$")
_AVERAGED = re.compile(r"(?i)(?:^|[._])ema(?:$|[._])")


def find(facts: RunFacts) -> Found | None:
    return in_fits(facts, _in_fit)


def _in_fit(fit: FitFacts) -> Found | None:
    return _statistics(fit) or _copies(fit)


def _statistics(fit: FitFacts) -> Found | None:
    names, weights, steps = list[str](), list[str](), set[int]()
    for name, series in fit.states.items():
        match = _STATISTICS.match(name)
        # in a module without trained weights nothing tells frozen statistics from forgotten ones
        weight = match and next((one for one in ("weight", "bias") if f"{match[1]}{one}" in fit.gradients), None)
        if not match or not weight or not _stays(series, MIN_STEPS):
            continue
        trained = f"{match[1]}{weight}"
        if not fit.states[trained].is_constant:
            names.append(name)
            weights.append(trained)
            steps |= {int(step) for step in series.steps}
    return in_fit(fit, steps, names, f"while {listed(weights)}\n1") if names else None


def _copies(fit: FitFacts) -> Found | None:
    """Return what is called an average, began as a copy of a trained weight, and stays while that moves."""
    initial = fit.series(lambda site: site.name if site.phase == "state" else None, takes_first=True)
    moving = {int(initial[name].digests[0]): name for name in fit.gradients if _moves(fit.states.get(name))}
    names, originals, steps = list[str](), list[str](), set[int]()
    for name, series in fit.states.items():
        original = moving.get(int(initial[name].digests[0]))
        if _AVERAGED.search(name) and original is not None and name != original and _stays(series, MIN_COPY_STEPS):
            names.append(name)
            originals.append(original)
            steps |= {int(step) for step in series.steps}
    return in_fit(fit, steps, names, f"while {listed(originals)}\n") if names else None


def _stays(series: Series, least: int) -> bool:
    return len(series.steps) >= least and series.is_constant


def _moves(series: Series | None) -> bool:
    return series is not None and not series.is_constant


def explain(found: Found) -> str:
    moving, _ = found.detail.split("\n")
    verb = "do" if "," in moving else "does"
    never = "changes" if len(found.names) == 1 else "change"
    return f"{listed(found.names)} never {never} in {span(found)}, {moving} {verb}"


def advise(found: Found) -> str:
    if found.detail.endswith("1"):
        return (
            "Is that meant? A module in eval mode keeps its statistics, also when something called eval() for a "
            "validation and not train() after it"
        )
    return "Call the update of the average after each step of the optimizer"
