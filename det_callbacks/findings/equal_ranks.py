"""Ranks get equal batches, or draw equal random numbers in their forward passes.

Example:
    Ranks 0, 1 get the same batches, in steps 0 to 15. Give each rank its share of the data: a DistributedSampler,
    which Lightning adds unless use_distributed_sampler is False, or the rank in what an IterableDataset yields.
"""

from collections.abc import Sequence

from det_callbacks.findings.facts import FORWARD, MIN_BATCHES, MIN_STEPS, START, FitFacts, RunFacts
from det_callbacks.findings.rule import Found, Level, span
from det_callbacks.report.console import capitalised, listed, ranks_text

NAME = "equal_ranks"
LEVEL: Level = "state"

_REPLICATING = (None, "DDPStrategy")  # strategies whose ranks are all to get other batches; None where it is not known


def find(facts: RunFacts) -> Found | None:
    is_replicating = facts.choice("trainer.strategy") in _REPLICATING
    for fits in facts.by_segment():
        if len(fits) > 1 and is_replicating:
            found = _equal_batches(fits) or _equal_draws(fits)
            if found is not None:
                return found
    return None


def _equal_batches(fits: Sequence[FitFacts]) -> Found | None:
    by_step = [{step: batch for step, _, batch in fit.batches} for fit in fits]
    steps = sorted(set.intersection(*(set(known) for known in by_step)))
    batches = [{known[step] for known in by_step} for step in steps]
    is_equal = all(len(batch) == 1 for batch in batches)
    if not is_equal or len(steps) < MIN_STEPS or len(set.union(*batches)) < MIN_BATCHES:
        return None
    return _of(fits, steps, [], "get the same batches")


def _equal_draws(fits: Sequence[FitFacts]) -> Found | None:
    """Return generators that draw in the forward passes, from the same state on every rank."""
    before, after = ([fit.generator_states(point) for fit in fits] for point in (START, FORWARD))
    for name in before[0]:
        states = [known.get(name, {}) for known in before]
        ends = after[0].get(name, {})
        steps = [step for step, state in states[0].items() if ends.get(step, state) != state]
        shared = [step for step in steps if all(known.get(step) == states[0][step] for known in states)]
        if len(steps) >= MIN_STEPS and shared == steps:
            return _of(fits, steps, [name], f"draw the same random numbers from {name} in their forward passes")
    return None


def _of(fits: Sequence[FitFacts], steps: Sequence[int], names: Sequence[str], detail: str) -> Found:
    ranks, segment = tuple(fit.rank for fit in fits), fits[0].segment
    return Found(ranks=ranks, steps=(steps[0], steps[-1]), names=tuple(names), detail=detail, segment=segment)


def explain(found: Found) -> str:
    return f"{capitalised(ranks_text(found.ranks))} {found.detail}, in {span(found)}"


def advise(found: Found) -> str:
    if found.names:
        return (
            "Is that meant? Dropout masks and noise are then the same on all ranks. If not, add the rank to the seed "
            f"of {listed(found.names)} after the model is built"
        )
    return (
        "Give each rank its share of the data: a DistributedSampler, which Lightning adds unless "
        "use_distributed_sampler is False, or the rank in what an IterableDataset yields"
    )
