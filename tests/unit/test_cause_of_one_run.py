"""Ops that only one run has: what the verdict asks the user to check."""

import pytest
from step_builder import both, judge


def with_more_gradients(step, now):
    value = step.op("aten.mm.default", step.batch("batch[0]", [1, 2]), "net.weight")
    if now:
        step.op("aten.t.default", value, phase="backward")
    step.op("aten.mm.default", value, phase="backward")


def with_a_scale(step, now):
    step.op("aten.add_.Tensor", "?x", "net.weight", phase="optimizer")
    if not now:
        step.op("aten._amp_update_scale_.default", outputs=2, phase="other", module="")


@pytest.mark.parametrize(
    ("fill", "said"),
    [
        (
            with_more_gradients,
            "so more of it needs gradients in the current run: check detach(), requires_grad",
        ),
        (with_a_scale, "_update_scale_.default in no submodule; everything before them matches"),
    ],
)
def test_what_to_check_of_ops_in_one_run(fill, said, tmp_path):
    verdict = judge(tmp_path, both(fill))
    assert verdict.cause == "structure"
    assert said in verdict.explanation
