"""Findings about ranks: what should differ between them and does not, and what should be equal and is not."""

from collections.abc import Iterable, Mapping, Sequence

from det_callbacks.findings.facts import MIN_BATCHES, MIN_STEPS, FitSummary, Series
from det_callbacks.findings.queries import forward_readers, held_name
from det_callbacks.findings.rule import Fits, Found, found_in, of_ranks, span
from det_callbacks.runs.evidence import AFTER_FORWARD, BATCH_START
from det_callbacks.text import capitalised, listed, ranks_text

_REPLICATING = (None, "DDPStrategy")  # strategies whose ranks all get different batches; None: unknown


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


@of_ranks("state")
def unequal_replicas(fits: Fits) -> Found | None:
    """Weights, or buffers that the forward pass reads, differ between ranks, although DDP or the start made them equal.

    Example:
        first.weight, first.bias, norm.weight and 3 more differed between ranks 0 and 1, in steps 0
        to 7. Their gradients are not averaged, or only one rank updates them: check for code that
        bypasses the wrapped module's forward, moves it to another device, or writes weights.
        ReplicaAuditCallback stops at the first difference.
    """
    strategy = fits[0].choice("trainer.strategy")
    if len(fits) < 2 or strategy not in (None, "DDPStrategy"):
        return None
    # ranks of an unknown launcher may hold shards, of which only constants are equal when the fit begins
    is_known = strategy is not None or _began_equal(fits, fits[0].gradients)
    states = [{name: fit.states[name] for name in fit.gradients if name in fit.states} for fit in fits]
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
        "Their gradients are not averaged, or only one rank updates them: check for code that bypasses the wrapped "
        "module's forward, moves it to another device, or writes weights"
    )
    of_buffers = (
        "The forward pass reads these buffers, and each rank updates its own: reduce what updates them over all ranks "
        "(torch.distributed.all_reduce), or let DDP broadcast them"
    )
    return found_in(
        *fits,
        steps=steps,
        names=differing,
        explanation=f"{listed(differing)} differed between {ranks_text([fit.rank for fit in fits])}, in {span(steps)}"
        f"{began}",
        advice=f"{of_weights if weights else of_buffers}{stops}",
    )


def _differing(fits: Fits, series: Sequence[Mapping[str, Series]]) -> dict[str, set[int]]:
    """Return the steps in which ranks hold different bits, by name."""
    found: dict[str, set[int]] = {}
    for name in series[0]:
        known = [one[name] for one in series if name in one]
        by_step = [dict(zip(one.steps.tolist(), one.digests.tolist(), strict=True)) for one in known]
        common = set.intersection(*(set(one) for one in by_step))
        steps = {step for step in common if len({one[step] for one in by_step}) > 1}
        if len(known) == len(fits) and len(steps) >= MIN_STEPS:
            found[name] = steps
    return found


def _was_equal(series: Sequence[Series], first: int) -> bool:
    """Return whether a tensor changed in the steps before one, in the same way on all ranks, as no shards do."""
    known = [one.digests[one.steps < first].tolist() for one in series]
    return len(set(known[0])) >= MIN_STEPS and all(one == known[0] for one in known)


def _buffers_read(fit: FitSummary) -> dict[str, Series]:
    """Return the buffers as their own modules read them, which began with several values, by name.

    DDP reads them too, outside the modules, and then writes those of rank 0. State that begins as a constant, such as
    zeros, may be each rank's own, as statistics of a batch norm are.
    """
    names = {
        name
        for program, _ in fit.programs
        for name, sites in forward_readers(program).items()
        if name not in fit.gradients
        and any(
            site.module and site.module == name.rpartition(".")[0] and "batch_norm" not in site.op for site in sites
        )
    } - fit.constants
    return fit.series(lambda site: site.name if held_name(site) in names else None, takes_first=True)


def _began_equal(fits: Fits, names: Iterable[str]) -> bool:
    """Return whether these were the same on all ranks when the fit began."""
    starts = [[fit.initial_digests.get(name) for name in names] for fit in fits]
    return bool(starts[0]) and None not in starts[0] and all(one == starts[0] for one in starts)
