"""The workers of a loader return equal tensors: all of a batch, or a part of it, such as noise.

Example:
    The 2 workers of train_dataloader return the same batch[0], in steps 0 to 31. Let each
    worker of an IterableDataset read its share (torch.utils.data.get_worker_info()), and create
    generators in worker_init_fn or on first use, from torch.initial_seed(), which differs from
    worker to worker.
"""

from collections.abc import Sequence

import numpy as np

from det_callbacks.findings.facts import MIN_BATCHES, FitFacts, Series
from det_callbacks.findings.rule import Found, Level, found_in, of_one_process, span
from det_callbacks.text import listed

NAME = "equal_workers"
LEVEL: Level = "state"

MIN_ROUNDS = 4  # of as many steps as there are workers


@of_one_process
def find(fit: FitFacts) -> Found | None:
    steps_of, rounds_of = equal_rounds(fit)
    names = [
        name
        for name, rounds in rounds_of.items()
        if len(rounds) >= MIN_ROUNDS and len(np.unique(rounds)) >= MIN_BATCHES
    ]
    if not names:
        return None
    loader = fit.loaders[0]
    steps = [step for name in names for step in steps_of[name]]
    return found_in(
        fit,
        steps=steps,
        names=names,
        explanation=f"The {fit.settings[(loader, 'num_workers')]} workers of {loader} return the same "
        f"{listed(names)}, in {span(steps)}",
        advice="Let each worker of an IterableDataset read its share (torch.utils.data.get_worker_info()), and create "
        "generators in worker_init_fn or on first use, from torch.initial_seed(), which differs from worker to worker",
    )


def equal_rounds(fit: FitFacts) -> tuple[dict[str, list[int]], dict[str, np.ndarray]]:
    """Return what is equal in each round of steps, one step a worker: its steps and its digests, by name."""
    loader = next(iter(fit.loaders), "")
    workers = fit.settings.get((loader, "num_workers"), "")
    if len(fit.loaders) != 1 or not workers.isdecimal() or int(workers) < 2:
        return {}, {}
    width = int(workers)
    # workers take turns from an epoch's start on
    epochs = [np.array(epoch) for epoch in _whole_epochs(fit) if not _is_drawn_twice(fit, loader, epoch[:width])]
    steps_of, rounds_of = dict[str, list[int]](), dict[str, np.ndarray]()
    for name, series in fit.series(lambda site: site.name if site.phase == "data" else None).items():
        found = [_equal_rounds(series, epoch, width) for epoch in epochs]
        known = [rounds for rounds in found if rounds is not None]
        if len(known) == len(epochs) and any(map(len, known)):
            rounds_of[name] = np.concatenate(known)
            of_rounds = (epoch[: width * len(rounds)] for epoch, rounds in zip(epochs, known, strict=True))
            steps_of[name] = [int(step) for steps in of_rounds for step in steps]
    return steps_of, rounds_of


def _is_drawn_twice(fit: FitFacts, loader: str, steps: Sequence[int]) -> bool:
    """Return whether the sampler drew the same indices for all of these steps, so that no worker repeats another."""
    drawn = {one.step: one.digest for iteration in fit.iterations(loader) for one in iteration}
    return None not in (indices := [drawn.get(step) for step in steps]) and len(set(indices)) == 1


def _whole_epochs(fit: FitFacts) -> list[list[int]]:
    """Return the steps of each epoch from its first step up to the first gap."""
    found: list[list[int]] = []
    last_step, last_epoch = -1, -1
    is_whole = False
    for step, epoch, _ in fit.batches:
        follows = step == last_step + 1
        is_new = epoch != last_epoch
        is_whole = follows and (is_new or is_whole)
        if is_whole and is_new:
            found.append([])
        if is_whole:
            found[-1].append(step)
        last_step, last_epoch = step, epoch
    return found


def _equal_rounds(series: Series, epoch: np.ndarray, width: int) -> np.ndarray | None:
    """Return the digest of each round of an epoch, or None if a round has different steps, or repeats another.

    The last round may have different steps, because workers need not end together.
    """
    values = series.digests[np.isin(series.steps, epoch)]
    if len(values) != len(epoch):
        return None
    rounds = values[: len(values) // width * width].reshape(-1, width)
    is_equal = (rounds == rounds[:, :1]).all(axis=1)
    if len(rounds) and not is_equal[-1]:
        rounds, is_equal = rounds[:-1], is_equal[:-1]
    is_whole = is_equal.all() and len(np.unique(rounds[:, 0])) == len(rounds)
    return rounds[:, 0] if is_whole else None
