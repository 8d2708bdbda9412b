"""Only one run has an op of a TorchScript module, whose executor decides which ops it runs.

Example:
    Step 0, backward: aten.tanh_backward.default in net at train.py:12 in training_step is only in the reference;
    its inputs match, so the difference starts here. TorchScript runs in net, and what ran earlier in a process also
    decides which ops its executor runs. Start both runs in fresh processes, and make the same calls to it before
    the fit.

    Evidence
      initial state: 5 tensors, all equal
"""

from collections.abc import Sequence
from typing import Literal

from det_callbacks.causes.phrases.steps import explain_first as explain
from det_callbacks.compare.facts import Facts
from det_callbacks.report.console import listed

__all__ = ["NAME", "advise", "cause", "explain"]

NAME = "scripted module"


def cause(facts: Facts) -> Literal["structure"] | None:
    found = (facts.origin or facts.first).divergence
    if not found.op or found.kind not in ("missing", "extra"):
        return None
    return "structure" if _may_be_scripted(found.module, facts.evidence.scripted) else None


def _may_be_scripted(module: str, scripted: Sequence[str]) -> bool:
    """Return whether a module is TorchScript or inside one; the backward pass of one has an unknown module."""
    if module == "?":
        return bool(scripted)
    return module in scripted or module.startswith(tuple(f"{name}." for name in scripted))


def advise(facts: Facts) -> str:
    names = listed(name or "the LightningModule" for name in facts.evidence.scripted)
    return (
        f"TorchScript runs in {names}, and what ran earlier in a process also decides which ops its executor runs. "
        "Start both runs in fresh processes, and make the same calls to it before the fit"
    )
