"""A generator returns to the state of an earlier step, because something seeds it inside the loop.

Example:
    At step 8 the generator torch.cpu is back in its state of step 4, so both steps draw the
    same numbers (dropout masks, noise, augmentation). Seed once, before the training: look for
    seed_everything, manual_seed and set_rng_state in training_step, hooks, the data set and the
    validation code.
"""

from collections.abc import Mapping

import numpy as np

from det_callbacks.findings.facts import FitFacts
from det_callbacks.findings.rule import Found, Level, found_in, of_one_process
from det_callbacks.runs.evidence import BATCH_START
from det_callbacks.runs.program import IDLE, PASSED

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
    # seeding inside a step shows in the states that its ops draw from
    for name, drawn in _drawn_states(fit).items():
        has_moved = len(set(states.get(name, {}).values())) > 1
        first, last = (_most_frequent({step: ends[at] for step, ends in drawn.items()}) for at in (0, 1))
        if has_moved and len(first) >= MIN_EQUAL and first == last:
            return _returned(fit, name, *first[:2])
    return None


def _drawn_states(fit: FitFacts) -> dict[str, dict[int, tuple[int, int]]]:
    """Return the states from which the first and the last draw of each step began: generator -> step -> both.

    An op that may draw reads the state; it drew if the next reading of the step differs. Attention without
    dropout reads it and draws nothing.
    """
    found: dict[str, dict[int, tuple[int, int]]] = {}
    for program, records in fit.programs:
        readings: dict[str, list[int]] = {}
        for position, site in enumerate(program.sites):
            if site.role == "generator" and site.part != PASSED and site.of.startswith("torch."):
                readings.setdefault(site.of, []).append(position)
        for name, positions in readings.items():
            # the step itself reads the state first, and last
            of_ops = np.array([program.sites[at].occurrence > 0 for at in positions[:-1]], dtype=bool)
            for record in records:
                states = record.digests[positions]
                draws = states[:-1][of_ops & (states[1:] != states[:-1]) & (states[1:] != IDLE)]
                if len(draws):
                    found.setdefault(name, {})[record.step] = int(draws[0]), int(draws[-1])
    return found


def _most_frequent(states: Mapping[int, int]) -> list[int]:
    """Return the steps that have the most frequent state, ascending."""
    by_state: dict[int, list[int]] = {}
    for step, state in sorted(states.items()):
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
