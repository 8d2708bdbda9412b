"""Findings about state and ranks: what stays, moves, is copied, or should be equal."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from det_callbacks.findings.fit_summary import (
    CASTS,
    MIN_BATCHES,
    MIN_STEPS,
    FitSummary,
    Series,
    before_casts,
    forward_readers,
    held_name,
    outputs_of,
)
from det_callbacks.findings.rule import (
    Fits,
    Found,
    found_in,
    from_to,
    of_one_process,
    of_ranks,
    span,
)
from det_callbacks.runs.evidence import AFTER_FORWARD, BATCH_START
from det_callbacks.runs.program import Program
from det_callbacks.text import capitalised, count, listed, ranks_text

# of statistics that changed before: in fewer, a branch of the model may be unused by chance
MIN_LATE_STEPS = 20
MIN_COPY_STEPS = 20  # after which an averaged copy was updated
_STATISTICS = re.compile(r"(.*?)(?:running_mean|running_var)$")
# likewise of spectral_norm: with its weights
_UPDATED_IN_TRAINING = re.compile(rf"{_STATISTICS.pattern}|(.*)(?:weight_u|0\._u)$")
_AVERAGED = re.compile(r"(?i)(?:^|[._])ema(?:$|[._])")

# strategies whose ranks all get different batches; None: unknown
_REPLICATING = (None, "DDPStrategy")


@of_one_process("state")
def stale_state(fit: FitSummary) -> Found | None:
    """The statistics or vectors of a normalisation, or a copy of the weights, stop changing,
    although weights change.

    Example:
        norm.running_mean and norm.running_var never changed in steps 0 to 7, although norm.weight
        did. If you do not intend this, call train(): a module in eval mode does not update its
        statistics; a validation may have called eval().
    """
    return _statistics(fit) or _copies(fit) or _teachers(fit)


def _statistics(fit: FitSummary) -> Found | None:
    weights: dict[str, str] = {}  # statistics that no longer change -> a weight that does
    steps: set[int] = set()
    for name, series in fit.states.items():
        match = _UPDATED_IN_TRAINING.match(name)
        if match is None:
            continue
        still = series.after_last_change
        if len(still.steps) < (MIN_STEPS if series.is_constant else MIN_LATE_STEPS):
            continue
        # without trained weights, frozen statistics look like forgotten ones
        prefix = match[1] if match[1] is not None else match[2]
        weights_of = ("weight", "bias", "weight_orig", "original")
        trained = [f"{prefix}{one}" for one in weights_of if f"{prefix}{one}" in fit.gradients]
        if trained and not fit.states[trained[0]].since(int(still.steps[0])).is_constant:
            weights[name] = trained[0]
            steps.update(still.steps.tolist())
    return _stale(
        fit,
        weights,
        steps,
        "If you do not intend this, call train(): a module in eval mode does not update its "
        "statistics; a validation may have called eval()",
    )


def _copies(fit: FitSummary) -> Found | None:
    """Return averages that began as a copy of a trained weight and never change while it does."""
    initial = fit.initial_digests
    moving = {initial[name]: name for name in fit.gradients if _moves(fit.states.get(name))}
    originals: dict[str, str] = {}
    for name, series in fit.states.items():
        original = moving.get(initial[name])
        stays = series.is_constant and len(series.steps) >= MIN_COPY_STEPS
        if _AVERAGED.search(name) and original is not None and name != original and stays:
            originals[name] = original
    steps = {int(step) for name in originals for step in fit.states[name].steps}
    return _stale(
        fit, originals, steps, "Call the update of the average after each step of the optimizer"
    )


def _moves(series: Series | None) -> bool:
    return series is not None and not series.is_constant


def _stale(fit: FitSummary, moving: dict[str, str], steps: set[int], advice: str) -> Found | None:
    if not moving:
        return None
    return found_in(
        fit,
        steps=steps,
        names=moving,
        explanation=(
            f"{listed(moving)} never changed in {span(steps)}, although {listed(moving.values())} "
            "did"
        ),
        advice=advice,
    )


def _teachers(fit: FitSummary) -> Found | None:
    """Return statistics that the forward pass reads and nothing moves, in a copy whose weights
    something else moves.
    """
    names, steps = dict[str, str](), set[int]()
    readers = [forward_readers(program).keys() for program, _ in fit.programs]
    for name, series in fit.states.items():
        match = _STATISTICS.match(name)
        weight = f"{match[1]}weight" if match is not None else ""
        stays = series.is_constant and len(series.steps) >= MIN_COPY_STEPS
        is_moved_copy = weight not in fit.gradients and _moves(fit.states.get(weight))
        if stays and is_moved_copy and all(name in read for read in readers):
            names[name] = weight
            steps.update(series.steps.tolist())
    return _stale(
        fit,
        names,
        steps,
        "The forward pass reads them: average the buffers of the copy too, or copy them from the "
        "model",
    )


@of_one_process("state")
def moving_statistics(fit: FitSummary) -> Found | None:
    """The statistics of a normalisation move in a part of the model of
    which no parameter is trained.

    Example:
        backbone.norm.running_mean and backbone.norm.running_var changed in steps 0 to 23, although
        no parameter of backbone is trained. requires_grad_(False) does not stop them: call eval()
        on the frozen part after each train().
    """
    trained = {
        *fit.gradients,
        *(name for names in fit.optimized.by_optimizer.values() for name in names),
    }
    parts, steps = dict[str, list[str]](), set[int]()
    for name, series in fit.states.items():
        if _STATISTICS.match(name) and len(series.steps) >= MIN_COPY_STEPS and _moves(series):
            part = _untrained_part(fit, name, trained)
            if part:
                parts.setdefault(part, []).append(name)
                steps.update(series.steps.tolist())
    if not parts:
        return None
    part, names = next(iter(parts.items()))
    return found_in(
        fit,
        steps=steps,
        names=[name for known in parts.values() for name in known],
        explanation=(
            f"{listed(names)} changed in {span(steps)}, although no parameter of {part} is trained"
        ),
        advice=(
            "requires_grad_(False) does not stop them: call eval() on the frozen part after each "
            "train()"
        ),
    )


def _untrained_part(fit: FitSummary, name: str, trained: Collection[str]) -> str:
    """Return the largest part of the model around a normalisation whose weights all stay;
    "" if only itself does.
    """
    path = name.split(".")[:-1]
    for length in range(1, len(path)):
        prefix = ".".join(path[:length])
        weights = [
            one
            for one in fit.states
            if re.fullmatch(rf"{re.escape(prefix)}\.(\S*\.)?(weight|bias)", one)
        ]
        of_others = [one for one in weights if one.rpartition(".")[0] != ".".join(path)]
        if of_others and not any(one.startswith(f"{prefix}.") for one in trained):
            return prefix if all(fit.states[one].is_constant for one in weights) else ""
    return ""


@of_one_process("op")
def stale_copy(fit: FitSummary) -> Found | None:
    """Updates change a parameter, but the forward pass reads a copy of it
    from an earlier step instead.

    Example:
        In 7 steps, from step 1 to 7, updates changed first.weight, first.bias, last.weight and 1
        more, but the forward pass read copies of them that were made before step 1. Make the copies
        in each step: open autocast in each step, not around the loop, and keep no cast or clone of
        a weight.
    """
    made = _copies_made(fit)
    steps: dict[str, list[int]] = {}
    for program, records in fit.programs:
        readers = forward_readers(program)
        unnamed = _unnamed_inputs(program)
        for record in records:
            read = {*record.digests[unnamed].tolist()}
            for name in made:
                if name not in readers and any(
                    step < record.step
                    for step in (made[name].get(digest, record.step) for digest in read)
                ):
                    steps.setdefault(name, []).append(record.step)
    stale = {
        name: known
        for name, known in steps.items()
        if len(known) >= MIN_STEPS
        and _moves(fit.states[name].since(min(known)))
        and {*known} <= {*fit.gradients[name].steps.tolist()}
    }
    if not stale:
        return None
    numbers = {step for known in stale.values() for step in known}
    first = min(numbers)
    return found_in(
        fit,
        steps=numbers,
        names=[name for name in fit.states if name in stale],
        explanation=(
            f"In {count(len(numbers), 'step')}, {from_to(numbers)}, updates changed "
            f"{listed(stale)}, but the forward pass read copies of them that were made before step "
            f"{first}"
        ),
        advice=(
            "Make the copies in each step: open autocast in each step, not around the loop, and "
            "keep no cast or clone of a weight"
        ),
    )


def _copies_made(fit: FitSummary) -> dict[str, dict[int, int]]:
    """Return the digests of trained parameters when the fit begins, and of casts of them:
    name -> digest -> step.
    """
    made = {
        name: {fit.initial_digests[name]: -1}
        for name in fit.gradients
        if name in fit.initial_digests
    }
    for program, records in fit.programs:
        casts = [
            (at, held_name(program.sites[before_casts(program, at)]))
            for at, _ in outputs_of(program, *CASTS)
        ]
        for record in records:
            for at, name in casts:
                if name in made:
                    made[name].setdefault(int(record.digests[at]), record.step)
    return made


def _unnamed_inputs(program: Program) -> np.ndarray:
    """Return the positions of the tensors without a name that the forward pass reads as
    they were before the step.
    """
    read = {
        at for site in program.sites if site.op and site.phase == "forward" for at in site.inputs
    }
    unnamed = [
        at
        for at in sorted(read)
        if program.sites[at].role == "input" and program.sites[at].name is None
    ]
    return np.array(unnamed, dtype=np.int64)


@of_ranks("state")
def equal_ranks(fits: Fits) -> Found | None:
    """Ranks get equal batches, or draw equal random numbers in their forward passes.

    Example:
        Ranks 0 and 1 get the same batches, in steps 0 to 15. Give each rank its share of the data:
        a DistributedSampler, which Lightning adds unless use_distributed_sampler is False, or an
        IterableDataset that yields different samples on each rank.
    """
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
        advice=(
            "Give each rank its share of the data: a DistributedSampler, which Lightning adds "
            "unless use_distributed_sampler is False, or an IterableDataset that yields different "
            "samples on each rank"
        ),
    )


def _equal_draws(fits: Fits) -> Found | None:
    """Return the generator that draws in the forward passes, from the same state on every rank."""
    before, after = (
        [fit.generator_states(point) for fit in fits] for point in (BATCH_START, AFTER_FORWARD)
    )
    for name in before[0]:
        states = [known.get(name, {}) for known in before]
        ends = after[0].get(name, {})
        steps = [step for step, state in states[0].items() if ends.get(step, state) != state]
        shared = [
            step for step in steps if all(known.get(step) == states[0][step] for known in states)
        ]
        if len(steps) >= MIN_STEPS and shared == steps:
            return found_in(
                *fits,
                steps=steps,
                names=[name],
                explanation=(
                    f"{_the_ranks(fits)} draw the same random numbers from {name} in their forward "
                    f"passes, in {span(steps)}"
                ),
                advice=(
                    "Dropout masks and noise are then the same on all ranks. If you do not intend "
                    f"this, add the rank to the seed of {name} after you build the model"
                ),
            )
    return None


def _the_ranks(fits: Fits) -> str:
    return capitalised(ranks_text([fit.rank for fit in fits]))


@of_ranks("state")
def unequal_replicas(fits: Fits) -> Found | None:
    """Weights, or buffers that the forward pass reads, differ between ranks, although DDP or the
    start made them equal.

    Example:
        first.weight, first.bias, norm.weight and 3 more differed between ranks 0 and 1, in steps 0
        to 7. Their gradients are not averaged, or only one rank updates them: check for code that
        bypasses the wrapped module's forward, moves it to another device, or writes weights.
        ReplicaAuditCallback stops at the first difference.
    """
    strategy = fits[0].choice("trainer.strategy")
    if len(fits) < 2 or strategy not in (None, "DDPStrategy"):
        return None
    # ranks of an unknown launcher may hold shards, of which only constants are
    # equal when the fit begins
    is_known = strategy is not None or _began_equal(fits, fits[0].gradients)
    states = [
        {name: fit.states[name] for name in fit.gradients if name in fit.states} for fit in fits
    ]
    weights = {
        name: steps
        for name, steps in _differing(fits, states).items()
        if is_known or _was_equal([state[name] for state in states], min(steps))
    }
    buffers = _differing(fits, [_buffers_read(fit) for fit in fits])
    buffers = {name: steps for name, steps in buffers.items() if _began_equal(fits, [name])}
    differing = weights or buffers
    if not differing:
        return None
    steps = {step for known in differing.values() for step in known}
    began = ", although they were equal before" if strategy is None or not weights else ""
    stops = ". ReplicaAuditCallback stops at the first difference" if strategy is not None else ""
    of_weights = (
        "Their gradients are not averaged, or only one rank updates them: check for code that "
        "bypasses the wrapped module's forward, moves it to another device, or writes weights"
    )
    of_buffers = (
        "The forward pass reads these buffers, and each rank updates its own: reduce what updates "
        "them over all ranks (torch.distributed.all_reduce), or let DDP broadcast them"
    )
    return found_in(
        *fits,
        steps=steps,
        names=differing,
        explanation=(
            f"{listed(differing)} differed between {ranks_text([fit.rank for fit in fits])}, in "
            f"{span(steps)}{began}"
        ),
        advice=f"{of_weights if weights else of_buffers}{stops}",
    )


def _differing(fits: Fits, series: Sequence[Mapping[str, Series]]) -> dict[str, set[int]]:
    """Return the steps in which ranks hold different bits, by name."""
    differing: dict[str, set[int]] = {}
    for name in series[0]:
        of_ranks = [one[name] for one in series if name in one]
        by_step = [
            dict(zip(one.steps.tolist(), one.digests.tolist(), strict=True)) for one in of_ranks
        ]
        common = set.intersection(*(set(one) for one in by_step))
        steps = {step for step in common if len({one[step] for one in by_step}) > 1}
        if len(of_ranks) == len(fits) and len(steps) >= MIN_STEPS:
            differing[name] = steps
    return differing


def _was_equal(series: Sequence[Series], first: int) -> bool:
    """Return whether a tensor changed in the steps before one, in the same way on
    all ranks, as no shards do.
    """
    changes = [one.digests[one.steps < first].tolist() for one in series]
    return len(set(changes[0])) >= MIN_STEPS and all(one == changes[0] for one in changes)


def _buffers_read(fit: FitSummary) -> dict[str, Series]:
    """Return the buffers as their own modules read them, which began with several values, by name.

    DDP reads them too, outside the modules, and then writes those of rank 0. State that begins as a
    constant, such as zeros, may be each rank's own, as statistics of a batch norm are.
    """
    names = {
        name
        for program, _ in fit.programs
        for name, sites in forward_readers(program).items()
        if name not in fit.gradients
        and any(
            site.module and site.module == name.rpartition(".")[0] and "batch_norm" not in site.op
            for site in sites
        )
    } - fit.constants
    return fit.series(
        lambda site: site.name if held_name(site) in names else None, takes_first=True
    )


def _began_equal(fits: Fits, names: Iterable[str]) -> bool:
    """Return whether these were the same on all ranks when the fit began."""
    starts = [[fit.initial_digests.get(name) for name in names] for fit in fits]
    return bool(starts[0]) and None not in starts[0] and all(one == starts[0] for one in starts)
