"""A module returns the same bits in all steps, although its inputs change.

Example:
    act returned the same bits in all 7 examined steps, from step 1 to 7, although the inputs
    changed. Check for dead ReLUs, saturated gates, and weights or a scale of zero; the modules
    after it learn nothing from the data.
"""

import numpy as np

from det_callbacks.findings.facts import MIN_BATCHES, MIN_STEPS, FitFacts
from det_callbacks.findings.rule import Found, Level, found_in, from_to, of_one_process
from det_callbacks.runs.program import Program, TensorLayout
from det_callbacks.text import listed

NAME = "constant_output"
LEVEL: Level = "op"

_SHAPE_ONLY = ("_like.", ".new_", "aten.zero", "aten.fill", "aten.ones")  # in names of ops that read no bits


@of_one_process
def find(fit: FitFacts) -> Found | None:
    if fit.num_batches < MIN_BATCHES or not fit.programs:
        return None
    program, records = max(fit.programs, key=lambda one: len(one[1]))
    if len(records) < MIN_STEPS:
        return None
    digests = np.stack([record.digests for record in records])
    changes = (digests != digests[0]).any(axis=0)
    loses = _losing_change(program, changes)
    entries = fit.layout(records[0]).entries
    names = []
    for at, site in enumerate(program.sites):
        is_output = site.phase == "forward" and not site.op and (site.name or "").startswith("output")
        is_lost_there = site.module and loses[at] == site.module and not changes[at]
        if is_output and is_lost_there and _is_of_numbers(entries[at]):
            names.append(site.module)
    if not names:
        return None
    steps = [record.step for record in records]
    return found_in(
        fit,
        steps=steps,
        names=names,
        explanation=f"{listed(names)} returned the same bits in all {len(steps)} examined steps, "
        f"{from_to(steps)}, although the inputs changed",
        advice="Check for dead ReLUs, saturated gates, and weights or a scale of zero; the modules after it learn "
        "nothing from the data",
    )


def _losing_change(program: Program, changes: np.ndarray) -> list[str | None]:
    """Return the module in which each constant site lost a change: that of an op with inputs that change.

    The entry is None if the site changes or depends on no site that does; states of generators do not count.
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
