"""The loss has the same bits in all steps, while the batches differ.

Example:
    The loss has the same bits in all 8 steps that were looked at, from step 0 to 7, although the batches differ.
    Look at whether it depends on the batch at all: a network of dead ReLUs, an output that is saturated, detached
    or overwritten, a loss of constants.
"""

from det_callbacks.findings.facts import MIN_BATCHES, MIN_STEPS, FitFacts, RunFacts
from det_callbacks.findings.rule import Found, Level, in_fit, in_fits
from det_callbacks.runs.program import Program

NAME = "constant_loss"
LEVEL: Level = "state"

_COARSE = ("float16", "bfloat16")  # in which a loss may well have the same value again


def find(facts: RunFacts) -> Found | None:
    return in_fits(facts, _in_fit)


def _in_fit(fit: FitFacts) -> Found | None:
    if fit.num_batches < MIN_BATCHES:
        return None
    losses: list[tuple[int, bytes]] = []
    for program, records in fit.programs:
        chosen = _losses(program)
        layouts = [fit.layout(records[0]).entries[at] for at in chosen]
        if not chosen or any(entry is not None and entry.dtype in _COARSE for entry in layouts):
            return None
        losses += [(record.step, record.digests[chosen].tobytes()) for record in records]
    is_constant = len(losses) >= MIN_STEPS and len({loss for _, loss in losses}) == 1
    return in_fit(fit, [step for step, _ in losses], ["loss"], str(len(losses))) if is_constant else None


def _losses(program: Program) -> list[int]:
    """Return the positions of the losses: what the backward passes of a step began with."""
    return [
        at
        for at, site in enumerate(program.sites)
        if site.phase == "forward" and site.role == "named" and not site.op and not site.module and _is_loss(site.name)
    ]


def _is_loss(name: str | None) -> bool:
    return name is not None and (name == "loss" or name.startswith("loss["))


def explain(found: Found) -> str:
    first, last = found.steps
    return (
        f"The loss has the same bits in all {found.detail} steps that were looked at, from step {first} to {last}, "
        "although the batches differ"
    )


def advise(found: Found) -> str:
    return (
        "Look at whether it depends on the batch at all: a network of dead ReLUs, an output that is saturated, "
        "detached or overwritten, a loss of constants"
    )
