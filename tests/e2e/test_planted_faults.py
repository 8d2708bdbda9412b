"""One fault planted in a training of a network of more than fifty modules: the culprit is named, and nobody else."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Cast, Deep, Training, below, first_of, other_content, verify
from trainers import LIGHTNING_ADVICE

pytestmark = LIGHTNING_ADVICE


HALF = partial(Deep, middle=partial(Cast, torch.float16))
ADAMW = partial(Deep, optimizer=torch.optim.AdamW, lr=0.01, foreach=True)
NORM = "aten.native_layer_norm_backward"
SAID_DTYPE = "gave float16 [8, 16] in the reference, bfloat16 [8, 16] now"
SAID_PRECISION = "trainer.precision: 32-true in the reference, bf16-mixed now, and that is what differs first"

# the reference's model, the training, where it differs first (step, phase, module, op and name), how and why, what is
# said
FAULTS: dict[str, tuple[Any, Training, str, str, str]] = {
    "one ULP in the forward pass": (
        *(Deep, Training(around=below(op="aten.addmm", step=2, module="net.5.up"))),
        *("2|forward|net.5.up|aten.addmm.default|", "content forward"),
        "Step 2, forward: aten.addmm.default in net.5.up at tests/e2e/faults.py",
    ),
    "one ULP in the backward pass": (
        *(Deep, Training(around=below(op=NORM, step=1, call=3))),
        *(f"1|backward|net.6.norm|{NORM}.default|", "content backward"),
        f"Step 1, backward: {NORM}.default in net.6.norm",
    ),
    "one ULP in the backward of a custom Function": (
        *(Deep, Training(around=below(op="planted_faults.double", step=2))),
        *("2|backward|custom|planted_faults.double.default|", "content backward", "inputs agree"),
    ),
    "one ULP in one of many states that one op writes": (
        *(ADAMW, Training(model=ADAMW, around=below(op="aten._foreach_lerp_", step=1, written=14))),
        *("1|optimizer||aten._foreach_lerp_.Scalar|exp_avg of net.3.up.weight", "content optimizer", "gave other bits"),
    ),
    "other content in a batch": (
        *(Deep, Training(data=other_content), "2|data|||batch[0]", "content data_content"),
        "batch[0] differs; the difference came in through it, and no op is to blame",
    ),
    "learning rate of SGD": (
        *(Deep, Training(model=partial(Deep, lr=0.02))),
        *("0|optimizer||aten.add_.Tensor|net.0.norm.weight", "argument settings"),
        "called with other arguments (alpha: -0.01 -> -0.02)",
    ),
    "another precision": (
        *(Deep, Training(options={"precision": "bf16-mixed"})),
        *("0|forward|net.0.up|aten._to_copy.default|", "extra settings", SAID_PRECISION),
    ),
    "another dtype of an op": (
        *(HALF, Training(model=partial(Deep, middle=partial(Cast, torch.bfloat16)))),
        *("0|forward|middle|aten._to_copy.default|", "argument forward", SAID_DTYPE),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_culprit_is_named(fault: str, tmp_path: Path, references: Callable[..., Path]) -> None:
    model, training, place, kind_and_cause, said = FAULTS[fault]
    verdict = verify(references(model), training, tmp_path / "current")
    first = first_of(verdict)
    assert "|".join(map(str, (first.step, first.phase, first.module, first.op, first.name or ""))) == place
    assert f"{first.kind} {verdict.cause}" == kind_and_cause
    assert said in verdict.explanation
    assert first.is_origin == bool(first.op)
    if first.kind == "content":
        assert verdict.origins == (first,) * first.is_origin
    if first.is_origin:
        assert verdict.origins[0] == first
        assert "an origin is" not in verdict.explanation, "it is said once"
