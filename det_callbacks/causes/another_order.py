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
        return _with_other_bits(facts)
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


def _with_other_bits(facts: Facts) -> Answer | None:
    """Return the answer if the op ran before another one in one run and after it in the other, so with other inputs."""
    difference, first = facts.difference, facts.first
    side = {"missing": 0, "extra": 1}.get(first.divergence.kind)
    partner = None if side is None else _partner(facts, first.row)
    if side is None or partner is None:
        return None
    between = [row for row in range(first.row, partner) if min(difference.pairs[row]) >= 0 and difference.site(row).op]
    if not between:
        return None
    needed = {*difference.rows_read(partner)}
    passed = difference.describe(next((row for row in between if row in needed), between[0]))
    early, late = ("reference", "current run")[:: 1 if side == 0 else -1]
    return Answer(
        cause=cause_of_first(facts),
        explanation=f"{place(facts)}, {first.divergence.phase}: {site_text(first.divergence)} ran before "
        f"{site_text(passed)} in the {early}, and after it in the {late}",
        advice="Restore the original order of the code, or record the reference again",
    )


def _partner(facts: Facts, row: int) -> int | None:
    """Return the row of the other run with the only such call there, if this run has it once too."""
    difference = facts.difference
    key, kind = _call(facts, row), difference.kinds[row]
    calls = [at for at in range(len(difference.pairs)) if _call(facts, at) == key]
    others = [
        at for at in calls if at != row and difference.kinds.get(at) == ("missing" if kind == "extra" else "extra")
    ]
    return others[0] if calls == sorted([row, *others]) and len(others) == 1 and others[0] > row else None


def _call(facts: Facts, row: int) -> _Key:
    site = facts.difference.site(row)
    return site.phase, site.module, site.op, site.output, site.role, site.name, site.arguments


def _key(facts: Facts, row: int) -> _Key:
    return *_call(facts, row), facts.difference.digest(row)
