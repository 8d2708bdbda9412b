"""The workers of a loader return equal tensors: all of a batch, or a part of it, such as noise.

Example:
    The 2 workers of train_dataloader return the same batch[0], in steps 0 to 29. Let each
    worker of an IterableDataset read its share (torch.utils.data.get_worker_info()), and create
    generators in worker_init_fn or on first use, from torch.initial_seed(), which differs from
    worker to worker.
"""

import numpy as np

from det_callbacks.findings.facts import FitFacts, Series
from det_callbacks.findings.rule import Found, Level, found_in, of_one_process, span
from det_callbacks.text import listed

NAME = "equal_workers"
LEVEL: Level = "state"

MIN_GROUPS = 4  # of as many steps as there are workers, in an epoch


@of_one_process
def find(fit: FitFacts) -> Found | None:
    return in_groups(fit)


def in_groups(fit: FitFacts) -> Found | None:
    """Return what is equal in each group of steps, one step a worker, and differs between groups."""
    loader = next(iter(fit.loaders), "")
    workers = fit.settings.get(f"num_workers of {loader}", "")
    if len(fit.loaders) != 1 or not workers.isdecimal() or int(workers) < 2:
        return None
    names, steps = list[str](), list[int]()
    # workers take turns from an epoch's start on
    epochs = [np.array(group) for group in _whole_epochs(fit)]
    for name, series in fit.series(lambda site: site.name if site.phase == "data" else None).items():
        equal = [part for epoch in epochs if len(part := _equal_steps(series, epoch, int(workers)))]
        if equal:
            names.append(name)
            steps += [int(step) for part in equal for step in part]
    if not names:
        return None
    return found_in(
        fit,
        steps=steps,
        names=names,
        explanation=f"The {workers} workers of {loader} return the same {listed(names)}, in {span(steps)}",
        advice="Let each worker of an IterableDataset read its share (torch.utils.data.get_worker_info()), and create "
        "generators in worker_init_fn or on first use, from torch.initial_seed(), which differs from worker to worker",
    )


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


def _equal_steps(series: Series, epoch: np.ndarray, width: int) -> np.ndarray:
    """Return the steps of an epoch, without the last group, if each group has equal steps that no other group has."""
    values = series.digests[np.isin(series.steps, epoch)]
    num_groups = len(values) // width - 1
    if len(values) != len(epoch) or num_groups < MIN_GROUPS:
        return epoch[:0]
    groups = values[: num_groups * width].reshape(num_groups, width)
    is_equal = (groups == groups[:, :1]).all() and len(np.unique(groups[:, 0])) == num_groups
    return epoch[: num_groups * width] if is_equal else epoch[:0]
