"""The weights or the batch enter the step with another dtype in the same shape, and a choice of the dtype differs.

Example:
    trainer.precision: 32-true in the reference, bf16-true now, which explains the first difference. Step 0: the
    initial state has a different structure (net.weight): float32 [64, 32] in the reference, bfloat16 [64, 32] now;
    it entered the step that way, so no op is to blame.

    Evidence
      initial state: 1 of 1 tensors differ
      choice trainer.precision: 32-true in the reference, bf16-true now
"""

from typing import Literal

from det_callbacks.causes.phrases.choices import explained_by
from det_callbacks.causes.phrases.steps import explain_first
from det_callbacks.compare.facts import Facts

NAME = "dtype"


def cause(facts: Facts) -> Literal["settings"] | None:
    return None if facts.dtype_choice is None else "settings"


def explain(facts: Facts) -> str:
    assert facts.dtype_choice is not None, "the rule applies"
    return explained_by(facts.dtype_choice, explain_first(facts))


def advise(facts: Facts) -> str:
    return ""
