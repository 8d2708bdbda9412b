"""Consecutive steps of an epoch get the same batch; in a followed script, also steps of several epochs.

Example:
    All 5 steps from step 3 to 7 get the previous step's batch (batch[0] and batch[1]). Check
    what the training iterates over: next(iter(loader)) restarts the loader in each step, and an
    iterator may be stuck.
"""

from itertools import pairwise

from det_callbacks.findings.equal_workers import equal_rounds
from det_callbacks.findings.facts import MIN_STEPS, FitFacts
from det_callbacks.findings.rule import Found, Level, found_in, from_to, of_one_process
from det_callbacks.runs.environment import FOLLOWED, OPTIMIZER
from det_callbacks.text import listed

NAME = "repeated_batch"
LEVEL: Level = "state"

MIN_SHARE = 1 / 3  # of steps that repeat the previous step's batch, if at most two in a row do


@of_one_process
def find(fit: FitFacts) -> Found | None:
    if fit.choice("trainer.overfit_batches"):
        return None
    names = _names(fit)
    has_more_data = _has_more_data(fit)
    # a batch of one sample, or of equal samples, may repeat by chance
    if not names or (fit.num_batches == 1 and not has_more_data):
        return None
    if equal_rounds(fit)[0]:  # batches repeat within a round: one worker repeats another's
        return None
    # in a followed script, each iter(loader) begins an epoch
    spans_epochs = has_more_data and fit.choice(FOLLOWED) is not None
    # without a loader the updates of several optimizers are a step each, and may share the batch of an iteration
    has_several = fit.choice(FOLLOWED) is not None and ", " in str(fit.choice(OPTIMIZER))
    programs = {record.step: program.id for program, records in fit.programs for record in records}
    num_pairs, streak, longest, repeated = 0, 0, 0, list[int]()
    for (step, epoch, batch), (next_step, next_epoch, next_batch) in pairwise(fit.batches):
        if next_step != step + 1 or (next_epoch != epoch and not spans_epochs):
            streak = 0
            continue
        num_pairs += 1
        is_other_update = has_several and programs[step] != programs[next_step]
        streak = streak + 1 if batch == next_batch and not is_other_update else 0
        longest = max(longest, streak)
        if streak:
            repeated.append(next_step)
    is_often = len(repeated) >= MIN_STEPS - 1 and len(repeated) >= MIN_SHARE * num_pairs
    if longest < MIN_STEPS - 1 and not is_often:
        return None
    num_steps = sum(repeated[0] <= step <= repeated[-1] for step, *_ in fit.batches)
    which = f"{len(repeated):,} of {num_steps:,}" if len(repeated) < num_steps else f"All {num_steps:,}"
    return found_in(
        fit,
        steps=repeated,
        names=names,
        explanation=f"{which} steps {from_to(repeated)} get the previous step's batch ({listed(names)})",
        advice="Check what the training iterates over: next(iter(loader)) restarts the loader in each step, and an "
        "iterator may be stuck",
    )


def _names(fit: FitFacts) -> list[str]:
    """Return the names in a batch; none if it has no tensor of several samples."""
    sites = [site for program, _ in fit.programs for site in program.sites if site.phase == "data"]
    if not any(site.role == "samples" for site in sites):
        return []
    return list(dict.fromkeys(site.name for site in sites if site.name is not None))


def _has_more_data(fit: FitFacts) -> bool:
    """Return whether a loader certainly has more than the one batch of the training."""
    for loader in fit.loaders:
        length = fit.settings.get((loader, "length of the data set"), "")
        size = fit.settings.get((loader, "batch_size"), "")
        if length.isdecimal() and size.isdecimal() and int(length) > int(size):
            return not fit.has_equal_samples
    return False
