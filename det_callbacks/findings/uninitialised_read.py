"""An op reads a torch.empty tensor that the step's ops only partly wrote.

Example:
    aten.nan_to_num.default reads a tensor (float32 [8, 18]) that was only partly written after
    its allocation, in steps 0 to 7, at net.py:7 in forward. Its other elements hold whatever
    was in memory, so they can differ from run to run: write all of the tensor, or allocate it
    with torch.zeros. If NumPy or a raw kernel writes it, the recorder cannot see that write.
"""

from math import prod

from det_callbacks.findings.facts import FitFacts
from det_callbacks.findings.rule import Found, Level, found_in, of_one_process, span
from det_callbacks.runs.program import UNWRITTEN, Layout, Site, describe_tensor

NAME = "uninitialised_read"
LEVEL: Level = "op"

MAX_ELEMENTS = 2**20  # above this, the recording does not track bytes


@of_one_process
def find(fit: FitFacts) -> Found | None:
    steps: dict[tuple[str, str, str], list[int]] = {}  # where it is read: place, op with tensor, line
    for program, records in fit.programs:
        layout = fit.layout(records[0])
        for at, site in enumerate(program.sites):
            tensor = _filled_in_part(site, at, layout)
            if tensor:
                reader = next(one for one in program.sites[at:] if at in one.inputs and one.op)
                line = f", at {reader.source[0]}" if reader.source else ""
                place = reader.module or reader.op, f"{reader.op} reads a tensor ({tensor})", line
                steps.setdefault(place, []).extend(one.step for one in records)
    if not steps:
        return None
    (_, read, line), of_first = next(iter(steps.items()))
    return found_in(
        fit,
        steps=of_first,
        names=dict.fromkeys(place for place, *_ in steps),
        explanation=f"{read} that was only partly written after its allocation, in {span(of_first)}{line}",
        advice="Its other elements hold whatever was in memory, so they can differ from run to run: write all of the "
        "tensor, or allocate it with torch.zeros. If NumPy or a raw kernel writes it, the recorder cannot see that "
        "write",
    )


def _filled_in_part(site: Site, at: int, layout: Layout) -> str:
    """Return the description of a tensor that the step wrote only partly; "" for other sites."""
    entry = layout.entries[at]
    if site.role != "input" or entry is None or entry.detail != UNWRITTEN or not site.inputs:
        return ""
    written = [one for read in site.inputs if (one := layout.entries[read]) is not None]
    if any(prod(one.shape) > MAX_ELEMENTS for one in (entry, *written)):
        return ""
    return describe_tensor(entry).removesuffix(f" {UNWRITTEN}")
