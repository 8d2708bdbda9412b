"""An op reads a tensor that torch.empty made and that ops of the step have filled in part only.

Example:
    aten.nan_to_num.default reads a tensor (float32 [8, 18]) that was only allocated and then filled in part, in
    steps 0 to 7, at net.py:7 in forward. Its other elements hold what the memory held before, so they may change at
    any time: fill all of it, or allocate with torch.zeros. Memory that NumPy or a raw kernel has filled looks the
    same.
"""

from math import prod

from det_callbacks.findings.facts import FitFacts, RunFacts
from det_callbacks.findings.rule import Found, Level, in_fit, in_fits, span
from det_callbacks.report.run import describe_tensor
from det_callbacks.runs.program import UNWRITTEN, Program, Site

NAME = "uninitialised_read"
LEVEL: Level = "op"

MAX_ELEMENTS = 2**20  # above, the recording does not look at the bytes one by one


def find(facts: RunFacts) -> Found | None:
    return in_fits(facts, _in_fit)


def _in_fit(fit: FitFacts) -> Found | None:
    steps: dict[tuple[str, str], list[int]] = {}  # where it is read, and the sentence's parts -> the steps
    for program, records in fit.programs:
        entries = fit.layout(records[0]).entries
        for at, site in enumerate(program.sites):
            entry = entries[at]
            if site.role != "input" or entry is None or entry.detail != UNWRITTEN or not site.inputs:
                continue
            written = [one for read in site.inputs if (one := entries[read]) is not None]
            if all(prod(one.shape) <= MAX_ELEMENTS for one in (entry, *written)):
                reader = _reader(program, at)
                shown = describe_tensor(entry).removesuffix(f" {UNWRITTEN}")
                where = f", at {reader.source[0]}" if reader.source else ""
                place = reader.module or reader.op, f"{reader.op}\n{shown}\n{where}"
                steps.setdefault(place, []).extend(one.step for one in records)
    if not steps:
        return None
    (_, detail), of_first = next(iter(steps.items()))
    return in_fit(fit, of_first, dict.fromkeys(place for place, _ in steps), detail)


def _reader(program: Program, at: int) -> Site:
    """Return the op that reads a site."""
    return next(site for site in program.sites[at:] if at in site.inputs and site.op)


def explain(found: Found) -> str:
    op, tensor, where = found.detail.split("\n")
    return f"{op} reads a tensor ({tensor}) that was only allocated and then filled in part, in {span(found)}{where}"


def advise(found: Found) -> str:
    return (
        "Its other elements hold what the memory held before, so they may change at any time: fill all of it, or "
        "allocate with torch.zeros. Memory that NumPy or a raw kernel has filled looks the same"
    )
