"""One fault planted in a training of a network of more than fifty modules: the culprit is named, and nobody else."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import FACTORS, Cast, Deep, Training, below, first_of, other_content, verify
from trainers import LIGHTNING_ADVICE

from det_callbacks.compare.step import compare_steps
from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """What must be said of the first divergence; ``model`` is the reference's."""

    step: int = 0
    phase: str = "forward"
    module: str = ""
    op: str
    name: str | None = None
    kind: str = "content"
    cause: str
    is_origin: bool = True
    says: tuple[str, ...] = ()
    model: Any = Deep


HALF = partial(Deep, middle=partial(Cast, torch.float16))
ADAMW = partial(Deep, optimizer=torch.optim.AdamW, lr=0.01, foreach=True)

FAULTS: dict[str, tuple[Training, Culprit]] = {
    "one ULP in the forward pass": (
        Training(around=below(op="aten.addmm", step=2, module="net.5.up")),
        Culprit(
            step=2,
            module="net.5.up",
            op="aten.addmm.default",
            cause="forward",
            says=("Step 2, forward: aten.addmm.default in net.5.up at tests/e2e/faults.py", "inputs agree"),
        ),
    ),
    "one ULP in the backward pass": (
        Training(around=below(op="aten.native_layer_norm_backward", step=1, call=3)),
        Culprit(
            step=1,
            phase="backward",
            module="net.6.norm",
            op="aten.native_layer_norm_backward.default",
            cause="backward",
            says=("Step 1, backward: aten.native_layer_norm_backward.default in net.6.norm", "gave other bits"),
        ),
    ),
    "one ULP in the backward of a custom Function": (
        Training(around=below(op="planted_faults.double", step=2)),
        Culprit(step=2, phase="backward", module="custom", op="planted_faults.double.default", cause="backward"),
    ),
    "one ULP in one of many states that one op writes": (
        Training(model=ADAMW, around=below(op="aten._foreach_lerp_", step=1, written=14)),
        Culprit(
            step=1,
            phase="optimizer",
            op="aten._foreach_lerp_.Scalar",
            name="exp_avg of net.3.up.weight",
            cause="optimizer",
            model=ADAMW,
        ),
    ),
    "other content in a batch": (
        Training(data=other_content),
        Culprit(
            step=2,
            phase="data",
            op="",
            name="batch[0]",
            is_origin=False,
            cause="data_content",
            says=("batch[0] differs", "no op is to blame"),
        ),
    ),
    "learning rate of SGD": (
        Training(model=partial(Deep, lr=0.02)),
        Culprit(
            phase="optimizer",
            op="aten.add_.Tensor",
            name="net.0.norm.weight",
            kind="argument",
            cause="settings",
            says=("called with other arguments (alpha: -0.01 -> -0.02)",),
        ),
    ),
    "another precision": (
        Training(options={"precision": "bf16-mixed"}),
        Culprit(
            module="net.0.up",
            op="aten._to_copy.default",
            kind="extra",
            cause="settings",
            says=("trainer.precision: 32-true in the reference, bf16-mixed now, and that is what differs first",),
        ),
    ),
    "another dtype of an op": (
        Training(model=partial(Deep, middle=partial(Cast, torch.bfloat16))),
        Culprit(
            module="middle",
            op="aten._to_copy.default",
            kind="argument",
            cause="forward",
            says=("(dtype:", "float16", "bfloat16", "gave float16 [8, 16] in the reference, bfloat16 [8, 16] now"),
            model=HALF,
        ),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_culprit_is_named(fault: str, tmp_path: Path, references: Callable[..., Path]) -> None:
    training, culprit = FAULTS[fault]
    verdict = verify(references(culprit.model), training, tmp_path / "current")
    first = first_of(verdict)
    place = (first.step, first.phase, first.module, first.op, first.name)
    assert place == (culprit.step, culprit.phase, culprit.module, culprit.op, culprit.name)
    assert (first.kind, first.is_origin, verdict.cause) == (culprit.kind, culprit.is_origin, culprit.cause)
    assert all(text in verdict.explanation for text in culprit.says)
    if culprit.kind == "content":
        assert len(verdict.origins) == culprit.is_origin
    if culprit.is_origin:
        assert verdict.origins[0] == first
        assert "an origin is" not in verdict.explanation, "it is said once"


def differences_in_forward(reference: Path, current: Path) -> dict[str, list[tuple[str, str, int]]]:
    """Return the divergences of the forward pass of step 0 by kind: module, op and occurrence."""
    ours, theirs = (Run.open(folder).view(0, 0, 0) for folder in (reference, current))
    found: dict[str, list[tuple[str, str, int]]] = {}
    difference = compare_steps(ours, theirs)
    for item in map(difference.describe, difference.kinds):
        if item.phase == "forward":
            found.setdefault(item.kind, []).append((item.module, item.op, item.occurrence))
    return found


@pytest.mark.parametrize(("factor", "place", "kind"), [(1.0, 7, "missing"), (1.5, 0, "extra")])
def test_one_op_among_twenty_like_it_is_one_difference(
    factor: float, place: int, kind: str, tmp_path: Path, references: Callable[..., Path]
) -> None:
    has_no_effect = factor == 1
    longer = partial(Deep, factors=(*FACTORS[:place], factor, *FACTORS[place:]))
    before, after = (Deep, longer) if kind == "extra" else (longer, Deep)
    reference = references(before)
    verdict = verify(reference, Training(model=after), tmp_path / "current")
    first = first_of(verdict)
    assert (first.step, first.phase, first.module, first.op) == (0, "forward", "ladder", "aten.mul.Tensor")
    assert (first.kind, first.occurrence, first.is_origin) == (kind, place, True)
    assert verdict.cause == ("structure" if has_no_effect else "forward")
    assert f"is only in the {'current run' if kind == 'extra' else 'reference'}" in verdict.explanation
    found = differences_in_forward(reference, tmp_path / "current")
    assert found.pop(kind) == [("ladder", "aten.mul.Tensor", place)]
    assert set(found) == (set() if has_no_effect else {"content"})
    assert not any(origin.phase == "forward" for origin in verdict.origins[1:])
