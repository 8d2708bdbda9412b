"""The same ops with the same outputs run in another order, and no bit differs: independent lines were swapped.

Example:
    Step 7, forward: aten.cos.default in net at train.py:4 in forward ran in another order than in the reference,
    and no bit differs. Put the lines back in their order, or record the reference again.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from det_callbacks.causes.phrases.sites import site_text
from det_callbacks.causes.phrases.steps import place
from det_callbacks.compare.facts import Facts
from det_callbacks.report.console import listed

NAME = "another order"


def cause(facts: Facts) -> Literal["structure"] | None:
    kinds = facts.difference.kinds
    if {*kinds.values()} != {"missing", "extra"}:
        return None
    missing = _sites(facts, (row for row, kind in kinds.items() if kind == "missing"))
    extra = _sites(facts, (row for row, kind in kinds.items() if kind == "extra"))
    return "structure" if missing == extra else None


def _sites(facts: Facts, rows: Iterable[int]) -> Counter[tuple[object, ...]]:
    """Return what tells sites apart in any order: the op with its place and arguments, and the digest."""
    found = Counter[tuple[object, ...]]()
    for row in rows:
        site, digest = facts.difference.site(row), facts.difference.digest(row)
        found[site.phase, site.module, site.op, site.output, site.role, site.name, site.arguments, digest] += 1
    return found


def explain(facts: Facts) -> str:
    moved = [facts.difference.describe(row) for row, kind in facts.difference.kinds.items() if kind == "extra"]
    ops = listed(site_text(one) for one in moved)
    return f"{place(facts)}, {moved[0].phase}: {ops} ran in another order than in the reference, and no bit differs"


def advise(facts: Facts) -> str:
    return "Put the lines back in their order, or record the reference again"
