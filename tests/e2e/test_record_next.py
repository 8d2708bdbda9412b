"""From two recordings at level state to the step, and from what the verdict says to record next to the op."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from faults import below
from fits import Fit, Steady
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from resumes import RESUMING

from det_callbacks import DeterminismCallback, compare_runs
from det_callbacks.report.verdict import verdict_lines

pytestmark = RESUMING

FAULT = 14  # of 20 steps; a checkpoint is saved right after it, and after step 9


def record(folder: Path, *others: Callback, is_faulty: bool, ckpt_path: Path | None = None, **options: Any) -> None:
    callback = DeterminismCallback(folder, mode="record", **options)
    fit = Fit(callback, *others, model=Steady, max_epochs=5, enable_checkpointing=True, default_root_dir=folder.parent)
    with below(op="aten.addmm", module="first", step=FAULT)(fit.model) if is_faulty else nullcontext():
        fit.run(ckpt_path=ckpt_path)


def test_what_is_to_be_recorded_next_names_the_op_and_then_the_numbers(tmp_path):
    """One side from the start and one from its checkpoint, one step each: the op is found."""
    saving = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=5, save_top_k=-1, filename="{step}")
    record(tmp_path / "state" / "good", is_faulty=False, level="state")
    record(tmp_path / "state" / "bad", saving, is_faulty=True, level="state")
    verdict = compare_runs(tmp_path / "state" / "good", tmp_path / "state" / "bad")
    assert (verdict.first_divergence.step, verdict.first_divergence.is_origin) == (FAULT, None)
    assert verdict.record_next == {"level": "op", "only_steps": [FAULT]}
    lines = [line.strip() for line in verdict_lines(verdict).splitlines()]
    assert [line for line in lines if "to see where it starts, record step 14 again on both sides and compare" in line]
    assert {'in Python  level="op", only_steps=[14]', "on the command line  --level=op --only-steps=14"} <= {*lines}

    for folder in ("ops", "numbers"):
        places = tmp_path / folder / "good", tmp_path / folder / "bad"
        record(places[0], is_faulty=False, **verdict.record_next)
        record(places[1], is_faulty=True, ckpt_path=tmp_path / "kept" / "step=10.ckpt", **verdict.record_next)
        verdict = compare_runs(*places)
        assert [(origin.step, origin.op) for origin in verdict.origins] == [(FAULT, "aten.addmm.default")]
    assert verdict.record_next is None
    assert [tensor.num_differing for tensor in verdict.origins[0].numbers.output] == [1]
