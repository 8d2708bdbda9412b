"""The op that differs first read memory that was allocated in the step and that no recorded op has written.

Example:
    Step 0, forward: aten.clone.default in net at train.py:9 in forward produced different bits; it reads a tensor
    (float32 [8]) that was allocated and then filled in part, and the rest holds what the memory held before. Fill
    all of it, or allocate with torch.zeros. Memory that NumPy or a raw kernel has filled looks the same.
"""

from typing import Literal

from det_callbacks.causes.phrases.sites import site_text
from det_callbacks.causes.phrases.steps import place
from det_callbacks.compare.facts import Facts
from det_callbacks.report.run import describe_tensor
from det_callbacks.runs.program import UNWRITTEN

NAME = "uninitialised memory"


def cause(facts: Facts) -> Literal["uninitialised_memory"] | None:
    first = facts.first
    if first.start != "unseen writer" or (facts.sources and facts.sources[0].row < first.row):
        return None
    return "uninitialised_memory" if _unwritten(facts) else None


def explain(facts: Facts) -> str:
    first = facts.first.divergence
    tensor, is_filled_in_part = _unwritten(facts)[0]
    filled = "that was allocated in the step and that no recorded op has written: it holds what the memory held before"
    if is_filled_in_part:
        filled = "that was allocated and then filled in part, and the rest holds what the memory held before"
    return (
        f"{place(facts)}, {first.phase}: {site_text(first)} produced different bits; it reads a tensor ({tensor}) "
        f"{filled}"
    )


def advise(facts: Facts) -> str:
    return "Fill all of it, or allocate with torch.zeros. Memory that NumPy or a raw kernel has filled looks the same"


def _unwritten(facts: Facts) -> list[tuple[str, bool]]:
    """Return the unwritten tensors that the first difference read: in words, and whether ops have filled a part."""
    program, position = facts.difference.side(facts.first.row)
    current = facts.difference.current
    view = current if program is current.program else facts.difference.reference
    found: list[tuple[str, bool]] = []
    for read in program.sites[position].inputs:
        entry = view.layout.entries[read]
        if entry is not None and entry.detail == UNWRITTEN:
            found.append((describe_tensor(entry).removesuffix(f" {UNWRITTEN}"), bool(program.sites[read].inputs)))
    return found
