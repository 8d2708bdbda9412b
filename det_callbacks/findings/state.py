"""Findings about state that stays, moves, or is copied, although it should not."""

import re
from collections.abc import Collection

import numpy as np

from det_callbacks.findings.facts import MIN_STEPS, FitSummary, Series
from det_callbacks.findings.queries import CASTS, before_casts, forward_readers, held_name, outputs_of
from det_callbacks.findings.rule import Found, found_in, from_to, of_one_process, span
from det_callbacks.runs.program import Program
from det_callbacks.text import count, listed

MIN_LATE_STEPS = 20  # of statistics that changed before: in fewer, a branch of the model may be unused by chance
MIN_COPY_STEPS = 20  # after which an averaged copy was updated
_STATISTICS = re.compile(r"(.*?)(?:running_mean|running_var)$")
# likewise of spectral_norm: with its weights
_UPDATED_IN_TRAINING = re.compile(rf"{_STATISTICS.pattern}|(.*)(?:weight_u|0\._u)$")
_AVERAGED = re.compile(r"(?i)(?:^|[._])ema(?:$|[._])")


@of_one_process("state")
def stale_state(fit: FitSummary) -> Found | None:
    """The statistics or vectors of a normalisation, or a copy of the weights, stop changing, although weights change.

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
        "If you do not intend this, call train(): a module in eval mode does not update its statistics; a validation "
        "may have called eval()",
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
    return _stale(fit, originals, steps, "Call the update of the average after each step of the optimizer")


def _moves(series: Series | None) -> bool:
    return series is not None and not series.is_constant


def _stale(fit: FitSummary, moving: dict[str, str], steps: set[int], advice: str) -> Found | None:
    if not moving:
        return None
    return found_in(
        fit,
        steps=steps,
        names=moving,
        explanation=f"{listed(moving)} never changed in {span(steps)}, although {listed(moving.values())} did",
        advice=advice,
    )


def _teachers(fit: FitSummary) -> Found | None:
    """Return statistics that the forward pass reads and nothing moves, in a copy whose weights something else moves."""
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
        "The forward pass reads them: average the buffers of the copy too, or copy them from the model",
    )


@of_one_process("state")
def moving_statistics(fit: FitSummary) -> Found | None:
    """The statistics of a normalisation move in a part of the model of which no parameter is trained.

    Example:
        backbone.norm.running_mean and backbone.norm.running_var changed in steps 0 to 23, although
        no parameter of backbone is trained. requires_grad_(False) does not stop them: call eval()
        on the frozen part after each train().
    """
    trained = {*fit.gradients, *(name for names in fit.optimized.by_optimizer.values() for name in names)}
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
        explanation=f"{listed(names)} changed in {span(steps)}, although no parameter of {part} is trained",
        advice="requires_grad_(False) does not stop them: call eval() on the frozen part after each train()",
    )


def _untrained_part(fit: FitSummary, name: str, trained: Collection[str]) -> str:
    """Return the largest part of the model around a normalisation whose weights all stay; "" if only itself does."""
    path = name.split(".")[:-1]
    for length in range(1, len(path)):
        prefix = ".".join(path[:length])
        weights = [one for one in fit.states if re.fullmatch(rf"{re.escape(prefix)}\.(\S*\.)?(weight|bias)", one)]
        of_others = [one for one in weights if one.rpartition(".")[0] != ".".join(path)]
        if of_others and not any(one.startswith(f"{prefix}.") for one in trained):
            return prefix if all(fit.states[one].is_constant for one in weights) else ""
    return ""


@of_one_process("op")
def stale_copy(fit: FitSummary) -> Found | None:
    """Updates change a parameter, but the forward pass reads a copy of it from an earlier step instead.

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
                    step < record.step for step in (made[name].get(digest, record.step) for digest in read)
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
        explanation=f"In {count(len(numbers), 'step')}, {from_to(numbers)}, updates changed {listed(stale)}, but the "
        f"forward pass read copies of them that were made before step {first}",
        advice="Make the copies in each step: open autocast in each step, not around the loop, and keep no cast or "
        "clone of a weight",
    )


def _copies_made(fit: FitSummary) -> dict[str, dict[int, int]]:
    """Return the digests of trained parameters when the fit begins, and of casts of them: name -> digest -> step."""
    made = {name: {fit.initial_digests[name]: -1} for name in fit.gradients if name in fit.initial_digests}
    for program, records in fit.programs:
        casts = [(at, held_name(program.sites[before_casts(program, at)])) for at, _ in outputs_of(program, *CASTS)]
        for record in records:
            for at, name in casts:
                if name in made:
                    made[name].setdefault(int(record.digests[at]), record.step)
    return made


def _unnamed_inputs(program: Program) -> np.ndarray:
    """Return the positions of the tensors without a name that the forward pass reads as they were before the step."""
    read = {at for site in program.sites if site.op and site.phase == "forward" for at in site.inputs}
    found = [at for at in sorted(read) if program.sites[at].role == "input" and program.sites[at].name is None]
    return np.array(found, dtype=np.int64)
