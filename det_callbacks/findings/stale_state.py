"""The statistics of a normalisation, or an averaged copy of the weights, stop changing, although the weights change.

Example:
    norm.running_mean and norm.running_var never changed in steps 0 to 7, although norm.weight
    did. If you do not intend this, call train(): a module in eval mode does not update its
    statistics; a validation may have called eval().
"""

import re

from det_callbacks.findings.facts import MIN_STEPS, FitFacts, Series
from det_callbacks.findings.rule import Found, Level, found_in, of_one_process, span
from det_callbacks.text import listed

NAME = "stale_state"
LEVEL: Level = "state"

MIN_LATE_STEPS = 20  # of statistics that changed before: in fewer, a branch of the model may be unused by chance
MIN_COPY_STEPS = 20  # after which an averaged copy was updated
_STATISTICS = re.compile(r"(.*?)(?:running_mean|running_var)$")
_AVERAGED = re.compile(r"(?i)(?:^|[._])ema(?:$|[._])")


@of_one_process
def find(fit: FitFacts) -> Found | None:
    return _statistics(fit) or _copies(fit)


def _statistics(fit: FitFacts) -> Found | None:
    weights: dict[str, str] = {}  # statistics that no longer change -> a weight that does
    steps: set[int] = set()
    for name, series in fit.states.items():
        match = _STATISTICS.match(name)
        if match is None:
            continue
        still = series.after_last_change
        if len(still.steps) < (MIN_STEPS if series.is_constant else MIN_LATE_STEPS):
            continue
        # without trained weights, frozen statistics look like forgotten ones
        trained = [f"{match[1]}{one}" for one in ("weight", "bias") if f"{match[1]}{one}" in fit.gradients]
        if trained and not fit.states[trained[0]].since(int(still.steps[0])).is_constant:
            weights[name] = trained[0]
            steps.update(still.steps.tolist())
    return _stale(
        fit,
        weights,
        steps,
        "If you do not intend this, call train(): a module in eval mode does not update its statistics; a validation "
        "may have called eval()",
    )


def _copies(fit: FitFacts) -> Found | None:
    """Return averages that began as a copy of a trained weight and never change while it does."""
    initial = fit.series(lambda site: site.name if site.phase == "state" else None, takes_first=True)
    moving = {int(initial[name].digests[0]): name for name in fit.gradients if _moves(fit.states.get(name))}
    originals: dict[str, str] = {}
    for name, series in fit.states.items():
        original = moving.get(int(initial[name].digests[0]))
        stays = series.is_constant and len(series.steps) >= MIN_COPY_STEPS
        if _AVERAGED.search(name) and original is not None and name != original and stays:
            originals[name] = original
    steps = {int(step) for name in originals for step in fit.states[name].steps}
    return _stale(fit, originals, steps, "Call the update of the average after each step of the optimizer")


def _moves(series: Series | None) -> bool:
    return series is not None and not series.is_constant


def _stale(fit: FitFacts, moving: dict[str, str], steps: set[int], advice: str) -> Found | None:
    if not moving:
        return None
    return found_in(
        fit,
        steps=steps,
        names=moving,
        explanation=f"{listed(moving)} never changed in {span(steps)}, although {listed(moving.values())} did",
        advice=advice,
    )
