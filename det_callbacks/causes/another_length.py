"""After the last update of one run, only the other run goes on: a loop without a loader draws its next batch there.

Example:
    Step 7: only the current run has ops after the optimizer's update: aten.randn.default in net
    (train.py:7, <module>); everything before them matches. The reference has no further step,
    so give both runs the same number of steps.
"""

from det_callbacks.causes.phrases.sites import site_text
from det_callbacks.causes.phrases.steps import place
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts
from det_callbacks.text import listed

CAUSES: Causes = ("structure",)


def find(facts: Facts) -> Answer | None:
    """Apply if all differences are ops of one run after the update of a step that is the last of the other."""
    kinds, rows = facts.difference.kinds, facts.rows_after_update
    if not rows or {*kinds} - {*rows, *facts.difference.rows_after_step}:
        return None
    reference_ends, current_ends = facts.is_last
    in_one_run = {kinds[row] for row in rows}
    if in_one_run == {"extra"} and reference_ends:
        side = "current run"
        advice = "The reference has no further step, so give both runs the same number of steps"
    elif in_one_run == {"missing"} and current_ends:
        side = "reference"
        # a verification stops at the first difference, so whether the script would go on is unknown
        advice = "If the current run ends there, give both runs the same number of steps; otherwise restore these lines"
    else:
        return None
    ops = dict.fromkeys(site_text(facts.difference.describe(row)) for row in rows if facts.difference.site(row).op)
    return Answer(
        cause="structure",
        explanation=f"{place(facts)}: only the {side} has ops after the optimizer's update: {listed(ops)}; everything "
        "before them matches",
        advice=advice,
    )
