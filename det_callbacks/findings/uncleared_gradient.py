"""The backward pass adds to a gradient that the previous update used and nothing cleared.

Example:
    In 7 steps, from step 1 to 7, the backward pass added to the gradient of first.weight,
    first.bias, norm.weight and 3 more, which the previous step's update had already used. Call
    zero_grad after each update, or before the first backward pass of the next update.
"""

from itertools import pairwise

from det_callbacks.findings.facts import MIN_STEPS, FitFacts
from det_callbacks.findings.rule import Found, Level, found_in, from_to, of_one_process
from det_callbacks.runs.program import Program
from det_callbacks.text import count, listed

NAME = "uncleared_gradient"
LEVEL: Level = "op"

_GRADIENT = "grad of "


@of_one_process
def find(fit: FitFacts) -> Found | None:
    updated = {program.id: _updates(program) for program, _ in fit.programs}
    kept = {program.id: _kept_inputs(program) for program, _ in fit.programs}
    steps: dict[str, list[int]] = {}
    for before, after in pairwise(fit.records):
        if after.step != before.step + 1:
            continue
        for name, positions in kept[after.program_id].items():
            at = updated[before.program_id].get(name)
            if at is not None and any(after.digests[kept_at] == before.digests[at] for kept_at in positions):
                steps.setdefault(name, []).append(after.step)
    often = {name.removeprefix(_GRADIENT): known for name, known in steps.items() if len(known) >= MIN_STEPS}
    if not often:
        return None
    numbers = {step for known in often.values() for step in known}
    return found_in(
        fit,
        steps=numbers,
        names=often,
        explanation=f"In {count(len(numbers), 'step')}, {from_to(numbers)}, the backward pass added to the gradient of "
        f"{listed(often)}, which the previous step's update had already used",
        advice="Call zero_grad after each update, or before the first backward pass of the next update",
    )


def _updates(program: Program) -> dict[str, int]:
    """Return the last position of each gradient of an update."""
    named = ((site.name or "", at) for at, site in enumerate(program.sites) if site.phase == "gradient")
    return {name: at for name, at in named if name.startswith(_GRADIENT)}


def _kept_inputs(program: Program) -> dict[str, list[int]]:
    """Return, for each gradient of an update, the earlier gradients to which the step added it.

    The backward pass of a generator also adds to the gradients of its critic, which are cleared before their update.
    """
    found: dict[str, list[int]] = {}
    for name, last in _updates(program).items():
        pending = [last]
        while pending:
            for at in program.sites[pending.pop()].inputs:
                site = program.sites[at]
                if site.role == "input":
                    found.setdefault(name, []).append(at)
                elif site.name == name:
                    pending.append(at)
    return found
