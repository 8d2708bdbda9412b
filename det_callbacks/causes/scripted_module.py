"""Only one run has an op of a TorchScript module, whose executor decides which ops it runs.

Example:
    Step 0, backward: aten.tanh_backward.default in net at train.py:12 in training_step is only
    in the reference; its inputs match, so the difference starts here. TorchScript runs in net,
    and what ran earlier in a process also decides which ops its executor runs. Start both runs
    in fresh processes, and make the same calls to it before the fit.
"""

from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts
from det_callbacks.report.console import listed

CAUSES: Causes = ("structure",)


def find(facts: Facts) -> Answer | None:
    found, scripted = facts.leading.divergence, facts.evidence.scripted
    if not found.op or found.kind not in ("missing", "extra"):
        return None
    inside = tuple(f"{name}." for name in scripted)
    # the backward pass of a scripted module has an unknown one
    is_scripted = found.module in scripted or found.module.startswith(inside)
    if not is_scripted and not (found.module == "?" and scripted):
        return None
    names = listed(name or "the LightningModule" for name in scripted)
    return Answer(
        cause="structure",
        advice=f"TorchScript runs in {names}, and what ran earlier in a process also decides which ops its executor "
        "runs. Start both runs in fresh processes, and make the same calls to it before the fit",
    )
