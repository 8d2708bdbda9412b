"""Only one run has a collective in this step, so the ranks of the other exchange nothing there.

Example:
    Step 7, backward: c10d.allreduce_.default in no submodule (train.py:9, <module>) ran only in
    the reference. Check what skips it in the current run: a call of model.module instead of the
    wrapper (DistributedDataParallel), no_sync(), or a condition.
"""

from det_callbacks.causes.phrases.sites import side_of, site_text
from det_callbacks.causes.phrases.steps import place
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import COLLECTIVES, Facts

CAUSES: Causes = ("collective",)


def find(facts: Facts) -> Answer | None:
    """Apply if ops differ that only one run has, and the other run has no call of one of the collectives among them."""
    difference, leading = facts.difference, facts.leading.divergence
    if leading.kind not in ("missing", "extra"):
        return None
    programs = difference.reference.program, difference.current.program
    ops = [{row.site.op for row in program.rows} for program in programs]
    in_one_run = (row for row, kind in difference.kinds.items() if kind in ("missing", "extra"))
    row = next(
        (row for row in in_one_run if _is_collective(op := difference.site(row).op) and op not in ops[0] & ops[1]), None
    )
    if row is None:
        return None
    found = difference.describe(row)
    other = "current run" if found.kind == "missing" else "reference"
    return Answer(
        cause="collective",
        explanation=f"{place(facts)}, {found.phase}: {site_text(found)} ran only in the {side_of(found)}",
        advice=f"Check what skips it in the {other}: a call of model.module instead of the wrapper "
        "(DistributedDataParallel), no_sync(), or a condition",
    )


def _is_collective(op: str) -> bool:
    return op.startswith(COLLECTIVES)
