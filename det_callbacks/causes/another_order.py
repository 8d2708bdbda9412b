"""The same ops with the same outputs run in a different order, and no bit differs: independent lines were swapped.

Example:
    Step 7, forward: aten.cos.default in net at train.py:4 in forward ran in a different order
    from the reference, and no bit differs. Restore the order of the lines, or record the
    reference again.
"""

from collections import Counter

from det_callbacks.causes.phrases.sites import site_text
from det_callbacks.causes.phrases.steps import place
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts
from det_callbacks.report.console import listed

CAUSES: Causes = ("structure",)


def find(facts: Facts) -> Answer | None:
    kinds = facts.difference.kinds
    if {*kinds.values()} != {"missing", "extra"}:
        return None
    missing = [row for row, kind in kinds.items() if kind == "missing"]
    extra = [row for row, kind in kinds.items() if kind == "extra"]
    if _sites(facts, missing) != _sites(facts, extra):
        return None
    moved = [facts.difference.describe(row) for row in extra]
    ops = listed(site_text(one) for one in moved)
    return Answer(
        cause="structure",
        explanation=f"{place(facts)}, {moved[0].phase}: {ops} ran in a different order from the reference, and no bit "
        "differs",
        advice="Restore the order of the lines, or record the reference again",
    )


def _sites(facts: Facts, rows: list[int]) -> Counter[tuple[object, ...]]:
    found = Counter[tuple[object, ...]]()
    for row in rows:
        site, digest = facts.difference.site(row), facts.difference.digest(row)
        found[site.phase, site.module, site.op, site.output, site.role, site.name, site.arguments, digest] += 1
    return found
