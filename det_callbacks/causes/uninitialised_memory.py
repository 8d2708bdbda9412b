"""The op that differs first read memory that was allocated in the step and that no recorded op has written.

Example:
    Step 0, forward: aten.clone.default in net at train.py:9 in forward produced different bits;
    it reads a tensor (float32 [8]) that was allocated and then filled in part, and the rest
    holds what the memory held before. Fill all of it, or allocate with torch.zeros. Memory that
    NumPy or a raw kernel has filled looks the same.
"""

from det_callbacks.causes.phrases.sites import site_text
from det_callbacks.causes.phrases.steps import place
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts
from det_callbacks.report.run import describe_tensor
from det_callbacks.runs.program import UNWRITTEN

CAUSES: Causes = ("uninitialised_memory",)


def find(facts: Facts) -> Answer | None:
    first = facts.first
    if first.start != "unseen writer" or (facts.sources and facts.sources[0].row < first.row):
        return None
    explanation = _explain(facts)
    if explanation is None:
        return None
    return Answer(
        cause="uninitialised_memory",
        explanation=explanation,
        advice="Fill all of it, or allocate with torch.zeros. Memory that NumPy or a raw kernel has filled looks the "
        "same",
    )


def _explain(facts: Facts) -> str | None:
    """Return the sentence on the first unwritten tensor that the op read; None where it read none."""
    first, difference = facts.first, facts.difference
    program, position = difference.side(first.row)
    view = difference.current if program is difference.current.program else difference.reference
    for read in program.sites[position].inputs:
        entry = view.layout.entries[read]
        if entry is None or entry.detail != UNWRITTEN:
            continue
        tensor = describe_tensor(entry).removesuffix(f" {UNWRITTEN}")
        if program.sites[read].inputs:
            filled = "that was allocated and then filled in part, and the rest holds what the memory held before"
        else:
            filled = (
                "that was allocated in the step and that no recorded op has written: it holds what the memory held "
                "before"
            )
        what = f"{site_text(first.divergence)} produced different bits; it reads a tensor ({tensor}) {filled}"
        return f"{place(facts)}, {first.divergence.phase}: {what}"
    return None
