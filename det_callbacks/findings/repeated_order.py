"""An epoch draws the previous epoch's indices in the same order, although the loader shuffles.

Example:
    Steps 8 to 11 repeated the previous epoch's samples in the same order, although
    train_dataloader shuffles (RandomSampler). Seed once, before the training, and not in a hook
    that runs each epoch; if the sampler has a seed, call its set_epoch(epoch).
"""

from collections.abc import Sequence
from itertools import pairwise

from det_callbacks.findings.facts import Drawn, FitFacts
from det_callbacks.findings.rule import Found, Level, found_in, of_one_process, span
from det_callbacks.runs.evidence import KIND_OF_SAMPLER, LOADER
from det_callbacks.text import capitalised

NAME = "repeated_order"
LEVEL: Level = "state"

MIN_SAMPLES = 12  # two shuffles of so many are equal by chance once in 479 million
_SHUFFLING = ("RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler", "DistributedSampler")


@of_one_process
def find(fit: FitFacts) -> Found | None:
    for loader in fit.loaders:
        sampler = fit.settings.get((loader, "sampler"), "")
        iterations = fit.iterations(loader)
        if sampler.split(KIND_OF_SAMPLER)[-1] in _SHUFFLING:
            why = f"{loader} shuffles ({sampler})"
        elif fit.settings.get((loader, "set_epoch")) == "True":
            why = f"{loader} has a set_epoch"
        elif generator := _deciding_generator(fit, iterations):
            why = f"the order of {loader} follows the state of {generator}"
        else:
            continue
        for before, after in pairwise(iterations):
            length = min(len(before), len(after))
            is_equal = [one.digest for one in before[:length]] == [one.digest for one in after[:length]]
            if is_equal and _is_shuffled(after[:length]):
                return _repeats(fit, loader, [one.step for one in after[:length]], why)
    return None


def _deciding_generator(fit: FitFacts, iterations: Sequence[Sequence[Drawn]]) -> str | None:
    """Return the generator whose state at the start of each iteration decides the order, in two orders or more."""
    length = min(map(len, iterations), default=0)
    orders = [tuple(one.digest for one in drawn[:length]) for drawn in iterations]
    for name, states in fit.generator_states(LOADER).items():
        starts = [states.get(drawn[0].step) for drawn in iterations]
        pairs = {*zip(starts, orders, strict=True)}
        if None not in starts and 1 < len(pairs) == len({*starts}) == len({*orders}):
            return name
    return None


def _is_shuffled(drawn: Sequence[Drawn]) -> bool:
    """Return whether a shuffle made this order: it has enough samples, and does not only ascend."""
    indices = [index for one in drawn for index in one.indices]
    num_descents = sum(later < earlier for earlier, later in pairwise(indices))
    return len(set(indices)) >= MIN_SAMPLES and num_descents > 1  # one: samples from the start fill the last batch


def _repeats(fit: FitFacts, loader: str, steps: Sequence[int], why: str) -> Found:
    return found_in(
        fit,
        steps=steps,
        names=[loader],
        explanation=f"{capitalised(span(steps))} repeated the previous epoch's samples in the same order, "
        f"although {why}",
        advice="Seed once, before the training, and not in a hook that runs each epoch; if the sampler has a seed, "
        "call its set_epoch(epoch)",
    )
