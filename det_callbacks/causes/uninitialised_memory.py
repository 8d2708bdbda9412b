"""The first op that differs read memory that was allocated in the step and that no recorded op wrote.

Example:
    Step 0, forward: aten.clone.default in net (train.py:9, forward) produced different bits; it
    reads a tensor (float32 [8]) that was only partly written after its allocation. Write all of
    the tensor, or allocate it with torch.zeros. If NumPy or a raw kernel writes it, the
    recorder cannot see that write.
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
        advice="Write all of the tensor, or allocate it with torch.zeros. If NumPy or a raw kernel writes it, the "
        "recorder cannot see that write",
    )


def _explain(facts: Facts) -> str | None:
    """Return the sentence on the first unwritten tensor that the op read, or None if it read none."""
    first, difference = facts.first, facts.difference
    program, position = difference.side(first.row)
    view = difference.current if program is difference.current.program else difference.reference
    for read in program.sites[position].inputs:
        entry = view.layout.entries[read]
        if entry is None or entry.detail != UNWRITTEN:
            continue
        tensor = describe_tensor(entry).removesuffix(f" {UNWRITTEN}")
        if program.sites[read].inputs:
            filled = "that was only partly written after its allocation"
        else:
            filled = "that was allocated in the step and that no recorded op wrote"
        what = f"{site_text(first.divergence)} produced different bits; it reads a tensor ({tensor}) {filled}"
        return f"{place(facts)}, {first.divergence.phase}: {what}"
    return None
