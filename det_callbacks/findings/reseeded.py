"""A generator returns to the state of an earlier step, because something seeds it inside the loop.

Example:
    At step 8 the generator torch.cpu is back in its state of step 4, so both steps draw the
    same numbers (dropout masks, noise, augmentation). Seed once, before the training: look for
    seed_everything, manual_seed and set_rng_state in training_step, hooks, the data set and the
    validation code.
"""

from det_callbacks.findings.facts import FitFacts, Series
from det_callbacks.findings.rule import Found, Level, found_in, of_one_process
from det_callbacks.runs.evidence import BATCH_START
from det_callbacks.runs.program import Site

NAME = "reseeded"
LEVEL: Level = "state"

MIN_EQUAL = 3  # steps whose draws are all equal


@of_one_process
def find(fit: FitFacts) -> Found | None:
    states = fit.generator_states(BATCH_START)
    for name, known in states.items():
        since: dict[int, int] = {}  # state -> the step that had it last
        before = None
        for step, state in known.items():
            if state != before and state in since:
                return _returned(fit, name, since[state], step)
            since[state] = step
            before = state
    # seeding inside a step shows in the states that its ops read
    first, last = (fit.series(_draws, takes_first=takes_first) for takes_first in (True, False))
    for name, series in first.items():
        has_moved = len(set(states.get(name, {}).values())) > 1
        equal = _most_frequent(series)
        if has_moved and len(equal) >= MIN_EQUAL and _most_frequent(last[name]) == equal:
            return _returned(fit, name, *equal[:2])
    return None


def _draws(site: Site) -> str | None:
    """Return the generator whose state an op reads before it draws; a step first reads that state without an op."""
    is_read = site.role == "generator" and site.occurrence > 0
    return site.name if is_read and site.name is not None and site.name.startswith("torch.") else None


def _most_frequent(series: Series) -> list[int]:
    """Return the steps that have the most frequent state."""
    by_state: dict[int, list[int]] = {}
    for step, state in zip(series.steps.tolist(), series.digests.tolist(), strict=True):
        by_state.setdefault(state, []).append(step)
    return max(by_state.values(), key=len)


def _returned(fit: FitFacts, name: str, first: int, again: int) -> Found:
    return found_in(
        fit,
        steps=(first, again),
        names=[name],
        explanation=f"At step {again} the generator {name} is back in its state of step {first}, so both steps draw "
        "the same numbers (dropout masks, noise, augmentation)",
        advice="Seed once, before the training: look for seed_everything, manual_seed and set_rng_state in "
        "training_step, hooks, the data set and the validation code",
    )
