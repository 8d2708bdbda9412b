"""A module returns the same bits in all steps, although what it computes them from changes.

Example:
    act returns the same bits in all 7 steps that were looked at, from step 1 to 7, although what it reads changes.
    Look at dead ReLUs, saturated gates, weights or a scale of zero; the modules after it learn nothing from the
    data.
"""

import numpy as np

from det_callbacks.findings.facts import MIN_BATCHES, MIN_STEPS, FitFacts, RunFacts
from det_callbacks.findings.rule import Found, Level, in_fit, in_fits
from det_callbacks.report.console import listed
from det_callbacks.runs.program import Program, TensorLayout

NAME = "constant_output"
LEVEL: Level = "op"

_SHAPE_ONLY = ("_like.", ".new_", "aten.zero", "aten.fill", "aten.ones")  # in names of ops that read no bits


def find(facts: RunFacts) -> Found | None:
    return in_fits(facts, _in_fit)


def _in_fit(fit: FitFacts) -> Found | None:
    if fit.num_batches < MIN_BATCHES or not fit.programs:
        return None
    program, records = max(fit.programs, key=lambda one: len(one[1]))
    if len(records) < MIN_STEPS:
        return None
    digests = np.stack([record.digests for record in records])
    changes = (digests != digests[0]).any(axis=0)
    loses = _losing_change(program, changes)
    entries = fit.layout(records[0]).entries
    names = [
        site.module
        for at, site in enumerate(program.sites)
        if site.phase == "forward" and not site.op and (site.name or "").startswith("output") and site.module
        if loses[at] == site.module and not changes[at] and _is_of_numbers(entries[at])
    ]
    return in_fit(fit, [one.step for one in records], names, str(len(records))) if names else None


def _losing_change(program: Program, changes: np.ndarray) -> list[str | None]:
    """Return for each site the module in which it lost a change: of an op that reads what changes and is constant.

    None of a site that changes, or that follows from nothing that does; the states of generators do not count.
    """
    follows = changes & (program.roles != "generator")
    found: list[str | None] = [None] * len(program)
    for at, site in enumerate(program.sites):
        if changes[at] or any(part in site.op for part in _SHAPE_ONLY):
            continue
        if site.op and any(follows[read] for read in site.inputs):
            found[at] = site.module
        else:
            found[at] = next((one for read in site.inputs if (one := found[read]) is not None), None)
    return found


def _is_of_numbers(entry: TensorLayout | None) -> bool:
    """Return whether a tensor has floating-point elements, and more than one."""
    return entry is not None and "float" in entry.dtype and int(np.prod(entry.shape)) > 1


def explain(found: Found) -> str:
    first, last = found.steps
    verb = "returns" if len(found.names) == 1 else "return"
    reads = "it reads" if len(found.names) == 1 else "they read"
    return (
        f"{listed(found.names)} {verb} the same bits in all {found.detail} steps that were looked at, from step "
        f"{first} to {last}, although what {reads} changes"
    )


def advise(found: Found) -> str:
    return (
        "Look at dead ReLUs, saturated gates, weights or a scale of zero; the modules after it learn nothing from the "
        "data"
    )
