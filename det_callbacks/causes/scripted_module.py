"""Only one run has an op of a TorchScript module, whose executor chooses the ops that it runs.

Example:
    Step 0, backward: aten.tanh_backward.default in net (train.py:12, training_step) ran only in
    the reference; its inputs match, so the difference starts here. TorchScript runs net, and
    its executor chooses ops depending on what the process ran before. Run both in fresh
    processes, with the same calls before the fit.
"""

from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts
from det_callbacks.text import listed

CAUSES: Causes = ("structure",)


def find(facts: Facts) -> Answer | None:
    found, scripted = facts.leading.divergence, facts.evidence.scripted
    if not found.op or found.kind not in ("missing", "extra"):
        return None
    inside = tuple(f"{name}." for name in scripted)
    # the backward pass of a scripted module has an unknown module
    is_scripted = found.module in scripted or found.module.startswith(inside)
    if not is_scripted and not (found.module == "?" and scripted):
        return None
    names = listed(name or "the LightningModule" for name in scripted)
    return Answer(
        cause="structure",
        advice=f"TorchScript runs {names}, and its executor chooses ops depending on what the process ran before. Run "
        "both in fresh processes, with the same calls before the fit",
    )
