"""One fault planted in a training of a network of more than fifty modules: the culprit is named, and nobody else."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import (
    FACTORS,
    Cast,
    Deep,
    Frozen,
    Training,
    Twice,
    add_ulp,
    below,
    draw_before_step,
    find,
    first_of,
    make_head_double,
    other_content,
    swap_rows,
    verify,
)
from trainers import LIGHTNING_ADVICE

from det_callbacks.compare.step import compare_steps
from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE

HALF = partial(Deep, middle=partial(Cast, torch.float16))
FROZEN = partial(Deep, middle=partial(Frozen, torch.nn.BatchNorm1d))
TWICE = partial(Deep, middle=Twice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """What must be said of the first divergence; ``model`` is the reference's, and ``is_found_twice`` sees ``find``."""

    step: int = 0
    phase: str = "forward"
    module: str = ""
    op: str = ""
    name: str | None = None
    kind: str = "content"
    cause: str
    is_origin: bool = True
    says: tuple[str, ...] = ()
    model: Any = Deep
    is_found_twice: bool = False


argument = partial(Culprit, kind="argument")
no_op = partial(Culprit, is_origin=False)
other_batch = partial(no_op, phase="data", name="batch[0]")

FAULTS: dict[str, tuple[Training, Culprit]] = {
    "one ULP in the gradient that starts the backward pass": (
        Training(around=below(op="aten.ones_like", step=1)),
        Culprit(step=1, phase="other", op="aten.ones_like.default", cause="backward"),
    ),
    "one ULP in the forward pass": (
        Training(around=below(op="aten.addmm", step=2, module="net.5.up")),
        Culprit(
            step=2,
            module="net.5.up",
            op="aten.addmm.default",
            cause="forward",
            says=("Step 2, forward: aten.addmm.default in net.5.up at tests/e2e/faults.py", "inputs agree"),
            is_found_twice=True,
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
    "two rows of a batch exchanged": (
        Training(data=swap_rows),
        other_batch(step=1, cause="data_order", says=("batch[0], batch[1]", "same samples in another order")),
    ),
    "other content in a batch": (
        Training(data=other_content),
        other_batch(step=2, cause="data_content", says=("batch[0] differs", "no op is to blame"), is_found_twice=True),
    ),
    "learning rate of SGD": (
        Training(model=partial(Deep, lr=0.02)),
        argument(
            phase="optimizer",
            op="aten.add_.Tensor",
            name="net.0.norm.weight",
            cause="settings",
            says=("called with other arguments (alpha: -0.01 -> -0.02)",),
        ),
    ),
    "eps of a batch norm in inference mode": (
        Training(model=partial(Deep, middle=partial(Frozen, torch.nn.BatchNorm1d, eps=2e-5))),
        argument(
            module="middle.norm",
            op="aten.native_batch_norm.default",
            cause="forward",
            says=("called with other arguments (eps: 1e-05 -> 2e-05)",),
            model=FROZEN,
        ),
    ),
    "one weight initialised differently": (
        Training(change=lambda model: add_ulp(model.net[3].up.weight)),
        no_op(
            phase="state",
            module="net.3.up",
            name="net.3.up.weight",
            cause="initial_weights",
            says=("the initial state net.3.up.weight differs", "no op is to blame"),
        ),
    ),
    "a generator consumed before the step": (
        Training(change=draw_before_step),
        no_op(
            step=2, phase="rng", name="torch.cpu", cause="rng", says=("the state of the generator torch.cpu differs",)
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
            is_found_twice=True,
        ),
    ),
    "another dtype of an op": (
        Training(model=partial(Deep, middle=partial(Cast, torch.bfloat16))),
        argument(
            module="middle",
            op="aten._to_copy.default",
            cause="forward",
            says=("(dtype:", "float16", "bfloat16", "gave float16 [8, 16] in the reference, bfloat16 [8, 16] now"),
            model=HALF,
        ),
    ),
    "another dtype of a layer": (
        Training(change=make_head_double),
        no_op(
            phase="state",
            module="head",
            name="head.weight",
            kind="structure",
            cause="initial_weights",
            says=(
                "head.weight, head.bias has another structure: float32 [3, 16] in the reference, float64 [3, 16] now",
            ),
        ),
    ),
    "an op replaced by an equivalent one": (
        Training(model=partial(Deep, middle=partial(Twice, by_sum=True))),
        Culprit(
            module="middle",
            op="aten.mul.Tensor",
            kind="missing",
            cause="structure",
            says=("aten.mul.Tensor in middle", "is only in the reference"),
            model=TWICE,
        ),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_culprit_is_named(fault: str, tmp_path: Path, references: Callable[..., Path]) -> None:
    training, culprit = FAULTS[fault]
    reference = references(culprit.model)
    if culprit.is_found_twice:
        verdict = find(reference, training, tmp_path)
    else:
        verdict = verify(reference, training, tmp_path / "current")
    first = first_of(verdict)
    place = (first.step, first.phase, first.module, first.op, first.name)
    assert place == (culprit.step, culprit.phase, culprit.module, culprit.op, culprit.name)
    assert (first.kind, first.is_origin, verdict.cause) == (culprit.kind, culprit.is_origin, culprit.cause)
    for text in culprit.says:
        assert text in verdict.explanation
    if culprit.kind == "content":
        assert len(verdict.origins) == culprit.is_origin
    if culprit.is_origin:
        assert verdict.origins[0] == first
        assert "an origin is" not in verdict.explanation, "it is said once"


ADAMW = partial(Deep, optimizer=torch.optim.AdamW, lr=0.01)
CLIPPED = partial(ADAMW, foreach=True)
OF_LISTS = {
    "a clipped gradient": ("_foreach_mul_", 1, CLIPPED, "gradient", "grad of net.3.up.weight"),
    "a state of an optimizer": ("_foreach_lerp_", 1, CLIPPED, "optimizer", "exp_avg of net.3.up.weight"),
    "a parameter of a fused op": ("_fused_adamw_", 0, partial(ADAMW, fused=True), "optimizer", "net.3.up.weight"),
}


@pytest.mark.parametrize("case", OF_LISTS)
def test_one_tensor_of_an_op_on_lists_has_its_name(case: str, tmp_path: Path) -> None:
    op, step, model, phase, name = OF_LISTS[case]
    training = Training(model=model, options={"gradient_clip_val": 0.01})
    reference = training.record(tmp_path / "reference")
    faulty = replace(training, around=below(op=f"aten.{op}", step=step, written=14))
    first = first_of(verify(reference, faulty, tmp_path / "current"))
    assert (first.step, first.phase, first.kind, first.is_origin) == (step, phase, "content", True)
    assert (first.op.rpartition(".")[0], first.output, first.name) == (f"aten.{op}", 14, name)


def differences_in_forward(reference: Path, current: Path) -> dict[str, list[tuple[str, str, int]]]:
    """Return the divergences of the forward pass of step 0 by kind: module, op and occurrence."""
    ours, theirs = (Run.open(folder).view(0, 0, 0) for folder in (reference, current))
    found: dict[str, list[tuple[str, str, int]]] = {}
    difference = compare_steps(ours, theirs)
    for item in map(difference.describe, difference.kinds):
        if item.phase == "forward":
            found.setdefault(item.kind, []).append((item.module, item.op, item.occurrence))
    return found


@pytest.mark.parametrize(
    ("factor", "place", "kind"), [(1.0, 7, "missing"), (1.5, 7, "extra"), (1.5, 0, "extra"), (1.5, 20, "missing")]
)
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
