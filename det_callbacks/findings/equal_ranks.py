"""Ranks get equal batches, or draw equal random numbers in their forward passes.

Example:
    Ranks 0 and 1 get the same batches, in steps 0 to 15. Give each rank its share of the data:
    a DistributedSampler, which Lightning adds unless use_distributed_sampler is False, or an
    IterableDataset that yields different samples on each rank.
"""

from det_callbacks.findings.facts import MIN_BATCHES, MIN_STEPS
from det_callbacks.findings.rule import Fits, Found, Level, found_in, span
from det_callbacks.runs.evidence import AFTER_FORWARD, BATCH_START
from det_callbacks.text import capitalised, ranks_text

NAME = "equal_ranks"
LEVEL: Level = "state"

_REPLICATING = (None, "DDPStrategy")  # strategies whose ranks all get different batches; None: unknown


def find(fits: Fits) -> Found | None:
    if len(fits) < 2 or fits[0].choice("trainer.strategy") not in _REPLICATING:
        return None
    return _equal_batches(fits) or _equal_draws(fits)


def _equal_batches(fits: Fits) -> Found | None:
    by_step = [{step: batch for step, _, batch in fit.batches} for fit in fits]
    steps = sorted(set.intersection(*(set(known) for known in by_step)))
    batches = [{known[step] for known in by_step} for step in steps]
    is_equal = all(len(batch) == 1 for batch in batches)
    if not is_equal or len(steps) < MIN_STEPS or len(set.union(*batches)) < MIN_BATCHES:
        return None
    return found_in(
        *fits,
        steps=steps,
        names=(),
        explanation=f"{_the_ranks(fits)} get the same batches, in {span(steps)}",
        advice="Give each rank its share of the data: a DistributedSampler, which Lightning adds unless "
        "use_distributed_sampler is False, or an IterableDataset that yields different samples on each rank",
    )


def _equal_draws(fits: Fits) -> Found | None:
    """Return the generator that draws in the forward passes, from the same state on every rank."""
    before, after = ([fit.generator_states(point) for fit in fits] for point in (BATCH_START, AFTER_FORWARD))
    for name in before[0]:
        states = [known.get(name, {}) for known in before]
        ends = after[0].get(name, {})
        steps = [step for step, state in states[0].items() if ends.get(step, state) != state]
        shared = [step for step in steps if all(known.get(step) == states[0][step] for known in states)]
        if len(steps) >= MIN_STEPS and shared == steps:
            return found_in(
                *fits,
                steps=steps,
                names=[name],
                explanation=f"{_the_ranks(fits)} draw the same random numbers from {name} in their forward passes, "
                f"in {span(steps)}",
                advice="Dropout masks and noise are then the same on all ranks. If you do not intend this, add the "
                f"rank to the seed of {name} after you build the model",
            )
    return None


def _the_ranks(fits: Fits) -> str:
    return capitalised(ranks_text([fit.rank for fit in fits]))
