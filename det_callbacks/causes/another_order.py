"""Ops ran in a different order with the same bits: independent lines were swapped, or a set was iterated.

Example:
    Step 7, forward: aten.cos.default in net (train.py:4, forward) ran in a different order from
    the reference, and no bit differs. Restore the original order of the code, or record the
    reference again.
"""

from collections import Counter

from det_callbacks.causes.first_difference import cause_of_first
from det_callbacks.causes.phrases.sites import site_text
from det_callbacks.causes.phrases.steps import place
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts
from det_callbacks.text import listed

CAUSES: Causes = ("structure", "forward", "backward", "optimizer", "collective", "unknown")

_Key = tuple[object, ...]


def find(facts: Facts) -> Answer | None:
    """Apply if the first difference is an op of one run that the other run has at another place."""
    kinds = facts.difference.kinds
    missing = Counter(_key(facts, row) for row, kind in kinds.items() if kind == "missing")
    extra = {row: _key(facts, row) for row, kind in kinds.items() if kind == "extra"}
    moved = [facts.difference.describe(row) for row, key in extra.items() if key in missing]
    if _key(facts, facts.first.row) not in missing.keys() & {*extra.values()}:
        return None
    ops = listed(site_text(one) for one in moved)
    told = f"{place(facts)}, {moved[0].phase}: {ops} ran in a different order from the reference"
    if {*kinds.values()} == {"missing", "extra"} and missing == Counter(extra.values()):
        return Answer(
            cause="structure",
            explanation=f"{told}, and no bit differs",
            advice="Restore the original order of the code, or record the reference again",
        )
    return Answer(
        cause=cause_of_first(facts),
        explanation=f"{told}, with the same bits; later ops that depend on the order differ",
        advice="Restore the original order of the code; sort a set, or the files of a folder, before you "
        "iterate over it",
    )


def _key(facts: Facts, row: int) -> _Key:
    site, digest = facts.difference.site(row), facts.difference.digest(row)
    return site.phase, site.module, site.op, site.output, site.role, site.name, site.arguments, digest
