"""An update uses a gradient that the backward pass added to that of the update before, which was not cleared.

Example:
    In 7 steps, from step 1 to 7, the backward pass added to the gradients of first.weight, first.bias, norm.weight
    and 3 more that the update of the step before had used. Call zero_grad after each update, or before each
    backward pass that begins a new one.
"""

from itertools import pairwise

from det_callbacks.findings.facts import MIN_STEPS, FitFacts, RunFacts
from det_callbacks.findings.rule import Found, Level, in_fit, in_fits
from det_callbacks.report.console import count, listed
from det_callbacks.runs.program import Program, StepRecord

NAME = "uncleared_gradient"
LEVEL: Level = "op"

_GRADIENT = "grad of "


def find(facts: RunFacts) -> Found | None:
    return in_fits(facts, _in_fit)


def _in_fit(fit: FitFacts) -> Found | None:
    updated = {program.id: _updates(program) for program, _ in fit.programs}
    kept = {program.id: _kept_inputs(program) for program, _ in fit.programs}
    steps: dict[str, list[int]] = {}
    for before, after in pairwise(fit.records):
        if after.step != before.step + 1:
            continue
        for name, positions in kept[after.program_id].items():
            at = updated[before.program_id].get(name)
            if at is not None and _holds(after, positions, before.digests[at]):
                steps.setdefault(name, []).append(after.step)
    often = {name: known for name, known in steps.items() if len(known) >= MIN_STEPS}
    if not often:
        return None
    numbers = {step for known in often.values() for step in known}
    names = [name.removeprefix(_GRADIENT) for name in often]
    return in_fit(fit, numbers, names, count(len(numbers), "step"))


def _updates(program: Program) -> dict[str, int]:
    """Return the position of each gradient that goes into an update, the last one of each."""
    named = ((site.name or "", at) for at, site in enumerate(program.sites) if site.phase == "gradient")
    return {name: at for name, at in named if name.startswith(_GRADIENT)}


def _kept_inputs(program: Program) -> dict[str, list[int]]:
    """Return for each gradient that goes into an update what it was added to, and was there before the step.

    The backward pass of a generator adds to the gradients of its critic, too, but those are cleared before they count.
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


def _holds(record: StepRecord, positions: list[int], digest: int) -> bool:
    return any(record.digests[at] == digest for at in positions)


def explain(found: Found) -> str:
    first, last = found.steps
    what = "gradient" if len(found.names) == 1 else "gradients"
    return (
        f"In {found.detail}, from step {first} to {last}, the backward pass added to the {what} of "
        f"{listed(found.names)} that the update of the step before had used"
    )


def advise(found: Found) -> str:
    return "Call zero_grad after each update, or before each backward pass that begins a new one"
