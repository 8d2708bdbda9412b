"""Findings about gradients and updates: who gets a gradient, what the update
makes of it, and what changes.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

from det_callbacks.findings.fit_summary import (
    MIN_STEPS,
    FitSummary,
    ancestors,
    forward_readers,
    line_with,
    outputs_of,
)
from det_callbacks.findings.rule import Found, found_in, from_to, of_one_process
from det_callbacks.runs.manifest import FOLLOWED
from det_callbacks.runs.program import Program, Site, describe_tensor
from det_callbacks.text import count, listed

# by then a rare branch, such as an expert, has a gradient, and a scaler has found its scale
MIN_UPDATES = 20


@of_one_process("state")
def not_in_optimizer(fit: FitSummary) -> Found | None:
    """A parameter gets gradients, no optimizer has it, and it never changes.

    Example:
        The backward pass computes gradients for last.weight and last.bias, but no optimizer uses
        them, so the initial values never change. Pass the parameters to an optimizer:
        self.parameters() covers only modules that are registered before the call. Call
        requires_grad_(False) on parameters that should not change.
    """
    names, steps = list[str](), set[int]()
    for name in fit.optimized.without_optimizer:
        state = fit.states.get(name)
        # otherwise something else updates it
        if state is not None and len(state.steps) >= MIN_STEPS and state.is_constant:
            names.append(name)
            steps.update(state.steps.tolist())
    if not names:
        return None
    return found_in(
        fit,
        steps=steps,
        names=names,
        explanation=(
            f"The backward pass computes gradients for {listed(names)}, but no optimizer uses "
            "them, so the initial values never change"
        ),
        advice=(
            "Pass the parameters to an optimizer: self.parameters() covers only modules that are "
            "registered before the call. Call requires_grad_(False) on parameters that should not "
            "change"
        ),
    )


@of_one_process("state")
def no_gradient(fit: FitSummary) -> Found | None:
    """A trainable parameter never gets a gradient, although its optimizer updates others.

    Example:
        unused.weight and unused.bias never got a gradient, although optimizer 0 updated its other
        parameters in 24 steps, from step 0 to 23. Check where the module is called, and whether its
        output reaches the loss: detach(), .data, .item() and torch.no_grad() cut the graph. Leave
        unused parameters out of the optimizer.
    """
    readers = _readers_by_step(fit)
    for optimizer, names in fit.optimized.by_optimizer.items():
        steps = {
            int(step)
            for name in names
            if name in fit.gradients
            for step in fit.gradients[name].steps
        }
        without = [name for name in names if name not in fit.gradients]
        read = [name for name in without if len(steps & readers.get(name, {}).keys()) >= MIN_STEPS]
        if len(steps) < MIN_UPDATES:
            without = read
        if without:
            used = " and the forward pass read them" if without == read else ""
            cut = _cut_by_checkpoint(fit, [readers[name] for name in read])
            return found_in(
                fit,
                steps=steps,
                names=without,
                explanation=(
                    f"{_described(fit, without)} never got a gradient, although {optimizer} "
                    f"updated its other parameters in {count(len(steps), 'step')}, "
                    f"{from_to(steps)}{used}"
                ),
                advice=cut
                or (
                    "Check where the module is called, and whether its output reaches the loss: "
                    "detach(), .data, .item() and torch.no_grad() cut the graph. Leave unused "
                    "parameters out of the optimizer"
                ),
            )
    return None


def _described(fit: FitSummary, names: Sequence[str]) -> str:
    """Return a list of parameters; those that no module has get their names
    when the script is followed.
    """
    program, records = fit.programs[0]
    of_state = {site.name: at for at, site in enumerate(program.sites) if site.phase == "state"}
    entries = fit.layout(records[0]).entries
    outside = [
        name
        for name in names
        if fit.choice(FOLLOWED) is not None and re.fullmatch(r"tensor(_\d+)?", name)
    ]
    shapes = {name: entry for name in outside if (entry := entries[of_state[name]]) is not None}
    text = {
        name: f"{name} ({describe_tensor(entry)}, in no module)" for name, entry in shapes.items()
    }
    return listed([text.get(name, name) for name in names])


def _readers_by_step(fit: FitSummary) -> dict[str, dict[int, list[Site]]]:
    """Return the forward ops that read each named tensor, by name and step."""
    readers: dict[str, dict[int, list[Site]]] = {}
    for program, records in fit.programs:
        for name, sites in forward_readers(program).items():
            readers.setdefault(name, {}).update(
                dict.fromkeys((record.step for record in records), sites)
            )
    return readers


def _cut_by_checkpoint(fit: FitSummary, readers: Sequence[Mapping[int, list[Site]]]) -> str:
    """Return what to do if all parameters are read in a checkpointed region that is
    never run again; else "".
    """
    again = {
        site.module for program, _ in fit.programs for site in program.sites if site.recomputed
    }
    lines = list[str]()
    for by_step in readers:
        sites = next(iter(by_step.values()))
        inside = [
            line
            for site in sites
            if site.module not in again and (line := line_with(fit, site, "checkpoint("))
        ]
        if not inside:
            return ""
        lines.append(inside[0])
    if not lines:
        return ""
    return (
        f"The activation checkpointing at {lines[0]} never ran its region again: with "
        "use_reentrant=True it cuts the graph unless an input requires a gradient. Pass "
        "use_reentrant=False, or call requires_grad_() on the input (enable_input_require_grads() "
        "in transformers)"
    )


@of_one_process("op")
def uncleared_gradient(fit: FitSummary) -> Found | None:
    """The backward pass adds to a gradient that the previous update used and nothing cleared.

    Example:
        In 7 steps, from step 1 to 7, the backward pass added to the gradient of first.weight,
        first.bias, norm.weight and 3 more, which the previous step's update had already used. Call
        zero_grad after each update, or before the first backward pass of the next update.
    """
    updated = {program.id: _updates(program) for program, _ in fit.programs}
    kept = {program.id: _kept_inputs(program) for program, _ in fit.programs}
    steps: dict[str, list[int]] = {}
    for before, after in pairwise(fit.records):
        if after.step != before.step + 1:
            continue
        for name, positions in kept[after.program_id].items():
            at = updated[before.program_id].get(name)
            if at is not None and any(
                after.digests[kept_at] == before.digests[at] for kept_at in positions
            ):
                steps.setdefault(name, []).append(after.step)
    often = {name: known for name, known in steps.items() if len(known) >= MIN_STEPS}
    if not often:
        return None
    numbers = {step for known in often.values() for step in known}
    return found_in(
        fit,
        steps=numbers,
        names=often,
        explanation=(
            f"In {count(len(numbers), 'step')}, {from_to(numbers)}, the backward pass added to the "
            f"gradient of {listed(often)}, which the previous step's update had already used"
        ),
        advice=(
            "Call zero_grad after each update, or before the first backward pass of the next update"
        ),
    )


def _updates(program: Program) -> dict[str, int]:
    """Return the last position of each gradient of an update, by the parameter's name."""
    sites = enumerate(program.sites)
    return {
        site.of: at for at, site in sites if (site.phase, site.subject) == ("gradient", "gradient")
    }


def _kept_inputs(program: Program) -> dict[str, list[int]]:
    """Return, for each gradient of an update, the earlier gradients to which the step added it.

    The backward pass of a generator also adds to the gradients of its critic, which are cleared
    before their update.
    """
    kept: dict[str, list[int]] = {}
    for name, last in _updates(program).items():
        pending = [last]
        while pending:
            for at in program.sites[pending.pop()].inputs:
                site = program.sites[at]
                if site.role == "input":
                    kept.setdefault(name, []).append(at)
                elif (site.subject, site.of) == ("gradient", name):
                    pending.append(at)
    return kept


_CLEARS = ("aten.zero_.", "aten._foreach_zero_.")


@of_one_process("state")
def nothing_updated(fit: FitSummary) -> Found | None:
    """No parameter changes in 20 updates, or from a step on, although backward passes run; the
    recording shows why.

    Example:
        No parameter changed in 20 steps, from step 0 to 19, although the backward pass ran in each.
        Something sets the gradients to zero between the backward pass and the update: call
        zero_grad after the update, or before the backward pass.
    """
    names = [name for of_optimizer in fit.optimized.by_optimizer.values() for name in of_optimizer]
    trained = [fit.states[name] for name in names if name in fit.states]
    still = [series.after_last_change.steps for series in trained]
    if not still or not all(map(len, still)):
        return None
    since = max(int(steps[0]) for steps in still)
    gradients = [fit.gradients[name] for name in names if name in fit.gradients]
    steps = {step for series in gradients for step in series.since(since).steps.tolist()}
    before = {step for series in gradients for step in series.steps.tolist()}
    earlier = {step for step in fit.steps_with_backward if step < since}
    # otherwise, many steps may accumulate gradients
    updates_each_step = fit.choice(FOLLOWED) is not None or (
        len(before) >= MIN_STEPS and before == earlier
    )
    if not steps and updates_each_step:
        steps = {step for step in fit.steps_with_backward if step >= since}
        advice = (
            "No update used a gradient: call zero_grad after the update, or before the backward "
            "pass, update in each step, and make the optimizer of the parameters that the backward "
            "pass uses"
        )
    else:
        advice = _advise_on_updates(fit, since)
    # without a reason, the training may have converged
    if len(steps) < MIN_UPDATES or not advice:
        return None
    after = "" if since == fit.records[0].step else " any more"
    return found_in(
        fit,
        steps=steps,
        names=names,
        explanation=(
            f"No parameter changed{after} in {count(len(steps), 'step')}, {from_to(steps)}, "
            "although the backward pass ran in each"
        ),
        advice=advice,
    )


def _advise_on_updates(fit: FitSummary, since: int) -> str:
    """Return why updates from a step on changed nothing, and what to do; "" if that is unknown."""
    if _is_cleared(fit, since):
        return (
            "Something sets the gradients to zero between the backward pass and the update: call "
            "zero_grad after the update, or before the backward pass"
        )
    if fit.rates_since(since) == {0.0}:
        return (
            "The learning rates of all parameter groups are 0: check the scheduler, and how often "
            "it steps"
        )
    if since == fit.records[0].step and fit.optimized.with_large_gradient:
        return "Check the learning rates, and the dtype: bfloat16 rounds a small update away"
    return ""


def _is_cleared(fit: FitSummary, since: int) -> bool:
    """Return whether all updates from a step on used gradients that an op set to
    zero after the backward pass.
    """
    is_cleared = list[bool]()
    for program, records in fit.programs:
        used = [program.sites[at] for at in _updates(program).values()]
        if used and records[-1].step >= since:
            last = max(
                (at for at, site in enumerate(program.sites) if site.phase == "backward"), default=0
            )
            is_cleared += [
                any(at > last and program.sites[at].op.startswith(_CLEARS) for at in site.inputs)
                for site in used
            ]
    return bool(is_cleared) and all(is_cleared)


@of_one_process("state")
def frozen_parameter(fit: FitSummary) -> Found | None:
    """A parameter never changes, although its gradients change and exceed rounding error.

    Example:
        last.weight and last.bias had gradients in 8 updates, from step 0 to 7, and never changed.
        Check the learning rate of their parameter group, code that restores them, and their dtype:
        bfloat16 rounds a small update away.
    """
    names, steps = list[str](), set[int]()
    if nothing_updated.find([fit]) is not None:  # of all parameters
        return None
    for name in fit.optimized.with_large_gradient:
        state, gradient = fit.states.get(name), fit.gradients.get(name)
        if state is None or gradient is None or not state.is_constant:
            continue
        if len(gradient.steps) >= MIN_STEPS and not gradient.is_constant:
            names.append(name)
            steps.update(gradient.steps.tolist())
    if not names:
        return None
    return found_in(
        fit,
        steps=steps,
        names=names,
        explanation=(
            f"{listed(names)} had gradients in {count(len(steps), 'update')}, {from_to(steps)}, "
            "and never changed"
        ),
        advice=(
            "Check the learning rate of their parameter group, code that restores them, and their "
            "dtype: bfloat16 rounds a small update away"
        ),
    )


_UNSCALES = "aten._amp_foreach_non_finite_check_and_unscale_."
_READS_NUMBER = "aten._local_scalar_dense."
_CLAMPS = ("aten.clamp", "aten._foreach_clamp", "aten.clip")


@of_one_process("op")
def clipped_before_unscale(fit: FitSummary) -> Found | None:
    """Gradients are clipped while the scale of mixed precision is still in them,
    and unscaled afterwards.

    Example:
        In 8 steps, from step 0 to 7, the gradients of first.weight, first.bias, last.weight and 1
        more were clipped before the gradient scaler unscaled them, so the limit applied to scaled
        gradients. Call scaler.unscale_(optimizer) before you clip.
    """
    names, steps = dict[str, None](), set[int]()
    for program, records in fit.programs:
        calls = {unscaled.inputs for _, unscaled in outputs_of(program, _UNSCALES)}
        clipped = [name for inputs in sorted(calls) for name in _clipped(program, inputs)]
        if clipped:
            names |= dict.fromkeys(clipped)
            steps.update(record.step for record in records)
    if len(steps) < MIN_STEPS:
        return None
    return found_in(
        fit,
        steps=steps,
        names=names,
        explanation=(
            f"In {count(len(steps), 'step')}, {from_to(steps)}, the gradients of {listed(names)} "
            "were clipped before the gradient scaler unscaled them, so the limit applied to scaled "
            "gradients"
        ),
        advice="Call scaler.unscale_(optimizer) before you clip",
    )


def _clipped(program: Program, unscaled: Sequence[int]) -> list[str]:
    """Return the gradients among the inputs of an unscaling that an op limited: by value,
    or by a factor from norms.

    A limit that Python computed from the scale is meant for scaled gradients.
    """
    named = {at: program.sites[at].of for at in unscaled if program.sites[at].subject == "gradient"}
    scale = ancestors(program, {*unscaled} - named.keys(), phase="gradient")
    reads = (at for at, site in enumerate(program.sites) if site.op.startswith(_READS_NUMBER))
    first_read = next(
        (at for at in reads if not scale.isdisjoint(program.sites[at].inputs)), len(program)
    )
    written = [at for at in named if program.sites[at].phase == "gradient" and at < first_read]
    return [named[at] for at in written if _limits(program, program.sites[at])]


def _limits(program: Program, site: Site) -> bool:
    factors = [at for at in site.inputs if program.sites[at].subject != "gradient"]
    from_norms = any(
        "norm" in program.sites[at].op for at in ancestors(program, factors, phase="gradient")
    )
    return from_norms or site.op.startswith(_CLAMPS)
