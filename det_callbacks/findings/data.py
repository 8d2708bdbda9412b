"""Findings about data and randomness: samples, batches, workers, and generators."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from det_callbacks.causes.programs import advise_on_recomputation
from det_callbacks.compare.differences import recomputed_differently
from det_callbacks.findings.fit_summary import (
    MIN_BATCHES,
    MIN_STEPS,
    Drawn,
    FitSummary,
    Series,
    place,
)
from det_callbacks.findings.rule import Found, found_in, from_to, of_one_process, span
from det_callbacks.runs.evidence import BATCH_START, KIND_OF_SAMPLER, LOADER
from det_callbacks.runs.manifest import FOLLOWED, OPTIMIZER
from det_callbacks.runs.program import HOST_GENERATORS, IDLE, PASSED, StepView
from det_callbacks.text import capitalised, listed

MIN_SAMPLES = 12  # two shuffles of so many are equal by chance once in 479 million
_SHUFFLING = ("RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler", "DistributedSampler")

MIN_EQUAL = 3  # steps whose draws are all equal


@of_one_process("state")
def repeated_order(fit: FitSummary) -> Found | None:
    """An epoch draws the previous epoch's indices in the same order, although the loader shuffles.

    Example:
        Steps 8 to 11 repeated the previous epoch's samples in the same order, although
        train_dataloader shuffles (RandomSampler). Seed once, before the training, and not in a hook
        that runs each epoch; if the sampler has a seed, call its set_epoch(epoch).
    """
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
            is_equal = [one.digest for one in before[:length]] == [
                one.digest for one in after[:length]
            ]
            if is_equal and _is_shuffled(after[:length]):
                return _order_repeats(fit, loader, [one.step for one in after[:length]], why)
    return None


def _deciding_generator(fit: FitSummary, iterations: Sequence[Sequence[Drawn]]) -> str | None:
    """Return the generator whose state at the start of each iteration decides the order,
    in two orders or more.
    """
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
    # one: samples from the start fill the last batch
    return len(set(indices)) >= MIN_SAMPLES and num_descents > 1


def _order_repeats(fit: FitSummary, loader: str, steps: Sequence[int], why: str) -> Found:
    return found_in(
        fit,
        steps=steps,
        names=[loader],
        explanation=(
            f"{capitalised(span(steps))} repeated the previous epoch's samples in the same order, "
            f"although {why}"
        ),
        advice=(
            "Seed once, before the training, and not in a hook that runs each epoch; if the "
            "sampler has a seed, call its set_epoch(epoch)"
        ),
    )


MIN_ROUNDS = 4  # of as many steps as there are workers


@of_one_process("state")
def equal_workers(fit: FitSummary) -> Found | None:
    """The workers of a loader return equal tensors: all of a batch, or a part of it, such as noise.

    Example:
        The 2 workers of train_dataloader return the same batch[0], in steps 0 to 31. Let each
        worker of an IterableDataset read its share (torch.utils.data.get_worker_info()), and create
        generators in worker_init_fn or on first use, from torch.initial_seed(), which differs from
        worker to worker.
    """
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
        explanation=(
            f"The {fit.settings[loader, 'num_workers']} workers of {loader} return the same "
            f"{listed(names)}, in {span(steps)}"
        ),
        advice=(
            "Let each worker of an IterableDataset read its share "
            "(torch.utils.data.get_worker_info()), and create generators in worker_init_fn or on "
            "first use, from torch.initial_seed(), which differs from worker to worker"
        ),
    )


def equal_rounds(fit: FitSummary) -> tuple[dict[str, list[int]], dict[str, np.ndarray]]:
    """Return what is equal in each round of steps, one step a worker: its steps
    and its digests, by name.
    """
    loader = next(iter(fit.loaders), "")
    workers = fit.settings.get((loader, "num_workers"), "")
    if len(fit.loaders) != 1 or not workers.isdecimal() or int(workers) < 2:
        return {}, {}
    width = int(workers)
    # workers take turns from an epoch's start on
    epochs = [
        np.array(epoch)
        for epoch in _whole_epochs(fit)
        if not _is_drawn_twice(fit, loader, epoch[:width])
    ]
    steps_of, rounds_of = dict[str, list[int]](), dict[str, np.ndarray]()
    for name, series in fit.series(
        lambda site: site.name if site.phase == "data" else None
    ).items():
        by_epoch = [_equal_rounds_in(series, epoch, width) for epoch in epochs]
        whole_rounds = [rounds for rounds in by_epoch if rounds is not None]
        if len(whole_rounds) == len(epochs) and any(map(len, whole_rounds)):
            rounds_of[name] = np.concatenate(whole_rounds)
            of_rounds = (
                epoch[: width * len(rounds)]
                for epoch, rounds in zip(epochs, whole_rounds, strict=True)
            )
            steps_of[name] = [int(step) for steps in of_rounds for step in steps]
    return steps_of, rounds_of


def _is_drawn_twice(fit: FitSummary, loader: str, steps: Sequence[int]) -> bool:
    """Return whether the sampler drew the same indices for all of these steps,
    so that no worker repeats another.
    """
    drawn = {one.step: one.digest for iteration in fit.iterations(loader) for one in iteration}
    return None not in (indices := [drawn.get(step) for step in steps]) and len(set(indices)) == 1


def _whole_epochs(fit: FitSummary) -> list[list[int]]:
    """Return the steps of each epoch from its first step up to the first gap."""
    epochs: list[list[int]] = []
    last_step, last_epoch = -1, -1
    is_whole = False
    for step, epoch, _ in fit.batches:
        follows = step == last_step + 1
        is_new = epoch != last_epoch
        is_whole = follows and (is_new or is_whole)
        if is_whole and is_new:
            epochs.append([])
        if is_whole:
            epochs[-1].append(step)
        last_step, last_epoch = step, epoch
    return epochs


def _equal_rounds_in(series: Series, epoch: np.ndarray, width: int) -> np.ndarray | None:
    """Return the digest of each round of an epoch, or None if a round has different
    steps, or repeats another.

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


MIN_SHARE = 1 / 3  # of steps that repeat the previous step's batch, if at most two in a row do


@of_one_process("state")
def repeated_batch(fit: FitSummary) -> Found | None:
    """Consecutive steps of an epoch get the same batch; in a followed script,
    also steps of several epochs.

    Example:
        All 5 steps from step 3 to 7 get the previous step's batch (batch[0] and batch[1]). Check
        what the training iterates over: next(iter(loader)) restarts the loader in each step, and an
        iterator may be stuck.
    """
    if fit.choice("trainer.overfit_batches"):
        return None
    names = _names_in_batch(fit)
    has_more_data = _has_more_data(fit)
    # a batch of one sample, or of equal samples, may repeat by chance
    if not names or (fit.num_batches == 1 and not has_more_data):
        return None
    if equal_rounds(fit)[0]:  # batches repeat within a round: one worker repeats another's
        return None
    # in a followed script, each iter(loader) begins an epoch
    spans_epochs = has_more_data and fit.choice(FOLLOWED) is not None
    repeated, longest, num_pairs = _repeats(fit, spans_epochs=spans_epochs)
    is_often = len(repeated) >= MIN_STEPS - 1 and len(repeated) >= MIN_SHARE * num_pairs
    if longest < MIN_STEPS - 1 and not is_often:
        return None
    num_steps = sum(repeated[0] <= step <= repeated[-1] for step, *_ in fit.batches)
    which = (
        f"{len(repeated):,} of {num_steps:,}" if len(repeated) < num_steps else f"All {num_steps:,}"
    )
    return found_in(
        fit,
        steps=repeated,
        names=names,
        explanation=(
            f"{which} steps {from_to(repeated)} get the previous step's batch ({listed(names)})"
        ),
        advice=(
            "Check what the training iterates over: next(iter(loader)) restarts the loader in each "
            "step, and an iterator may be stuck"
        ),
    )


def _repeats(fit: FitSummary, *, spans_epochs: bool) -> tuple[list[int], int, int]:
    """Return the steps that get the previous step's batch, how many of them are in a row at most,
    and the number of pairs of steps that could have equal batches.
    """
    # without a loader the updates of several optimizers are a step each,
    # and may share the batch of an iteration
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
    return repeated, longest, num_pairs


def _names_in_batch(fit: FitSummary) -> list[str]:
    """Return the names in a batch; none if it has no tensor of several samples."""
    sites = [site for program, _ in fit.programs for site in program.sites if site.phase == "data"]
    if not any(site.role == "samples" for site in sites):
        return []
    return list(dict.fromkeys(site.name for site in sites if site.name is not None))


def _has_more_data(fit: FitSummary) -> bool:
    """Return whether a loader certainly has more than the one batch of the training."""
    for loader in fit.loaders:
        length = fit.settings.get((loader, "length of the data set"), "")
        size = fit.settings.get((loader, "batch_size"), "")
        if length.isdecimal() and size.isdecimal() and int(length) > int(size):
            return not fit.has_equal_samples
    return False


@of_one_process("state")
def reseeded(fit: FitSummary) -> Found | None:
    """A generator returns to the state of an earlier step, because something
    seeds it inside the loop.

    Example:
        At step 8 the generator torch.cpu is back in its state of step 4, so both steps draw the
        same numbers (dropout masks, noise, augmentation). Seed once, before the training: look for
        seed_everything, manual_seed and set_rng_state in training_step, hooks, the data set and the
        validation code.
    """
    states = fit.generator_states(BATCH_START)
    for name, by_step in states.items():
        since: dict[int, int] = {}  # state -> the step that had it last
        before = None
        for step, state in by_step.items():
            if state != before and state in since:
                return _returned(fit, name, since[state], step)
            since[state] = step
            before = state
    # seeding inside a step shows in the states that its ops draw from
    for name, drawn in _drawn_states(fit).items():
        has_moved = len(set(states.get(name, {}).values())) > 1
        first, last = (
            _most_frequent({step: ends[at] for step, ends in drawn.items()}) for at in (1, 2)
        )
        is_put_back = all(begin == end for begin, _, _, end in drawn.values())  # as fork_rng does
        if has_moved and not is_put_back and len(first) >= MIN_EQUAL and first == last:
            return _returned(fit, name, *first[:2])
    return None


def _drawn_states(fit: FitSummary) -> dict[str, dict[int, tuple[int, int, int, int]]]:
    """Return four states of each step that draws: at its begin, of its first
    and last draw, at its end.

    An op that may draw reads the state; it drew if the next reading of the step differs. Attention
    without dropout reads it and draws nothing.
    """
    drawn: dict[str, dict[int, tuple[int, int, int, int]]] = {}
    for program, records in fit.programs:
        readings: dict[str, list[int]] = {}
        for position, site in enumerate(program.sites):
            if site.role == "generator" and site.part != PASSED and site.of not in HOST_GENERATORS:
                readings.setdefault(site.of, []).append(position)
        for name, positions in readings.items():
            # the step itself reads the state first, and last
            of_ops = np.array(
                [program.sites[at].occurrence > 0 for at in positions[:-1]], dtype=bool
            )
            for record in records:
                states = record.digests[positions]
                draws = states[:-1][of_ops & (states[1:] != states[:-1]) & (states[1:] != IDLE)]
                if len(draws):
                    begin = fit.generator_starts.get(name, IDLE) if states[0] == IDLE else states[0]
                    of_step = int(begin), int(draws[0]), int(draws[-1]), int(states[-1])
                    drawn.setdefault(name, {})[record.step] = of_step
    return drawn


def _most_frequent(states: Mapping[int, int]) -> list[int]:
    """Return the steps that have the most frequent state, ascending."""
    by_state: dict[int, list[int]] = {}
    for step, state in sorted(states.items()):
        by_state.setdefault(state, []).append(step)
    return max(by_state.values(), key=len)


def _returned(fit: FitSummary, name: str, first: int, again: int) -> Found:
    return found_in(
        fit,
        steps=(first, again),
        names=[name],
        explanation=(
            f"At step {again} the generator {name} is back in its state of step {first}, so both "
            "steps draw the same numbers (dropout masks, noise, augmentation)"
        ),
        advice=(
            "Seed once, before the training: look for seed_everything, manual_seed and "
            "set_rng_state in training_step, hooks, the data set and the validation code"
        ),
    )


MAX_RECOMPUTED = 8  # steps of a program whose recomputations are compared: the first ones


@of_one_process("op")
def recomputation_differs(fit: FitSummary) -> Found | None:
    """An op that activation checkpointing ran again gave other bits than in its forward pass.

    Example:
        In all 8 examined steps, from step 0 to 7, activation checkpointing ran
        aten.bernoulli_.float again in hidden, at net.py:7 in attended, and it gave other bits than
        in the forward pass, so the gradients belong to another forward pass. Do not pass
        preserve_rng_state=False to torch.utils.checkpoint.
    """
    steps, ops = list[int](), dict[str, tuple[str, bool]]()
    num_examined = 0
    for program, records in fit.programs:
        if not any(site.recomputed for site in program.sites):
            continue
        for record in records[:MAX_RECOMPUTED]:
            num_examined += 1
            layout = fit.layout(record)
            at = recomputed_differently(
                StepView(rank=fit.rank, record=record, program=program, layout=layout)
            )
            if at is not None:
                site = program.sites[at]
                draws = any(program.sites[one].role == "generator" for one in site.inputs)
                ops.setdefault(site.module or site.op, (f"{site.op} again{place(site)}", draws))
                steps.append(record.step)
    if not steps:
        return None
    op, draws = next(iter(ops.values()))
    examined = (
        f"all {num_examined}" if len(steps) == num_examined else f"{len(steps)} of {num_examined}"
    )
    return found_in(
        fit,
        steps=steps,
        names=ops,
        explanation=(
            f"In {examined} examined steps, {from_to(steps)}, activation checkpointing ran {op}, "
            "and it gave other bits than in the forward pass, so the gradients belong to another "
            "forward pass"
        ),
        advice=advise_on_recomputation(draws=draws),
    )
