"""The backward pass adds to a gradient that went into the update of the step before.

Example:
    In 7 steps, from step 1 to 7, the backward pass added to the gradients of last.bias, last.weight, norm.weight
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
    updated = {id(program): _positions(program, "gradient") for program, _ in fit.programs}
    kept = {id(program): _kept_inputs(program) for program, _ in fit.programs}
    steps: dict[str, list[int]] = {}
    for before, after in pairwise(fit.records):
        if after.step != before.step + 1:
            continue
        for name, positions in kept[id(fit.run.program(after.program_id))].items():
            at = updated[id(fit.run.program(before.program_id))].get(name)
            if at is not None and _holds(after, positions, before.digests[at]):
                steps.setdefault(name, []).append(after.step)
    often = {name: known for name, known in steps.items() if len(known) >= MIN_STEPS}
    if not often:
        return None
    numbers = {step for known in often.values() for step in known}
    names = [name.removeprefix(_GRADIENT) for name in often]
    return in_fit(fit, numbers, names, count(len(numbers), "step"))


def _positions(program: Program, phase: str) -> dict[str, int]:
    """Return the last position of each gradient in a phase."""
    sites = enumerate(program.sites)
    return {site.name: at for at, site in sites if site.phase == phase and (site.name or "").startswith(_GRADIENT)}


def _kept_inputs(program: Program) -> dict[str, list[int]]:
    """Return for each gradient that a backward pass adds to what it reads from before the step."""
    found: dict[str, list[int]] = {}
    for site in program.sites:
        if site.phase == "backward" and site.op and (site.name or "").startswith(_GRADIENT):
            positions = [at for at in site.inputs if program.sites[at].role == "input"]
            found.setdefault(site.name or "", []).extend(positions)
    return {name: positions for name, positions in found.items() if positions}


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
