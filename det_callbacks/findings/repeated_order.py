"""An epoch draws the indices of the epoch before, in the same order, though the loader shuffles.

Example:
    Steps 8 to 11 train on the samples of the epoch before in the same order, although train_dataloader shuffles
    (RandomSampler). Seed once, before the training, and not in a hook of each epoch; where the sampler has a seed
    of its own, call its set_epoch(epoch).
"""

from collections.abc import Sequence
from itertools import pairwise

from det_callbacks.findings.facts import Drawn, FitFacts, RunFacts
from det_callbacks.findings.rule import Found, Level, in_fit, in_fits, span
from det_callbacks.report.console import capitalised

NAME = "repeated_order"
LEVEL: Level = "state"

MIN_SAMPLES = 12  # of that many, two shuffles are equal by chance once in 479 million
_SHUFFLING = ("RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler", "DistributedSampler")


def find(facts: RunFacts) -> Found | None:
    return in_fits(facts, _in_fit)


def _in_fit(fit: FitFacts) -> Found | None:
    for loader in fit.loaders:
        sampler = fit.settings.get(f"sampler of {loader}", "")
        if sampler not in _SHUFFLING and fit.settings.get(f"set_epoch of {loader}") != "True":
            continue
        for before, after in pairwise(fit.iterations(loader)):
            length = min(len(before), len(after))
            is_equal = [one.digest for one in before[:length]] == [one.digest for one in after[:length]]
            if is_equal and _is_shuffled(after[:length]):
                detail = f"{loader} shuffles ({sampler})" if sampler in _SHUFFLING else f"{loader} has a set_epoch"
                return in_fit(fit, [one.step for one in after[:length]], [loader], detail)
    return None


def _is_shuffled(drawn: Sequence[Drawn]) -> bool:
    """Return whether this is an order that a shuffle gave: of enough samples, and not one that only goes up."""
    indices = [index for one in drawn for index in one.indices]
    num_descents = sum(later < earlier for earlier, later in pairwise(indices))
    return len(set(indices)) >= MIN_SAMPLES and num_descents > 1  # one: samples from the start fill the last batch


def explain(found: Found) -> str:
    steps = capitalised(span(found))
    verb = "train" if steps.startswith("Steps") else "trains"
    return f"{steps} {verb} on the samples of the epoch before in the same order, although {found.detail}"


def advise(found: Found) -> str:
    return (
        "Seed once, before the training, and not in a hook of each epoch; where the sampler has a seed of its own, "
        "call its set_epoch(epoch)"
    )
