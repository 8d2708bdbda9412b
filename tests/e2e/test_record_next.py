"""From two recordings at level state to the step, and from what the verdict says to record next to the op."""

import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from faults import below
from fits import Fit, Steady
from hydra import compose, initialize_config_module
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from resumes import RESUMING

from det_callbacks import DeterminismCallback, DivergenceError, Verdict, cli, compare_runs
from det_callbacks.runs.store import Run

pytestmark = RESUMING

OP = "aten.addmm.default"
FAULT = 14  # of 20 steps; a checkpoint is saved right after it, and after step 9


def train(*callbacks: Callback, is_faulty: bool, ckpt_path: Path | None = None, **options: Any) -> None:
    fit = Fit(*callbacks, model=Steady, max_epochs=5, **options)
    with below(op="aten.addmm", module="first", step=FAULT)(fit.model) if is_faulty else nullcontext():
        fit.run(ckpt_path=ckpt_path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    saving = ModelCheckpoint(folder / "kept", every_n_train_steps=5, save_top_k=-1, filename="{step}")
    for name, others in (("good", ()), ("bad", (saving,))):
        callback = DeterminismCallback(folder / name, mode="record", level="state")
        train(callback, *others, is_faulty=bool(others), enable_checkpointing=bool(others))
    return folder


def first_of(verdict: Verdict) -> tuple[int, bool | None]:
    assert verdict.first_divergence is not None
    return verdict.first_divergence.step, verdict.first_divergence.is_origin


def test_what_is_to_be_recorded_next_names_the_op_and_then_the_numbers(runs: Path, tmp_path: Path) -> None:
    """One side from the start and one from its checkpoint, one step each: the op is found."""
    verdict = compare_runs(runs / "good", runs / "bad")
    assert first_of(verdict) == (FAULT, None)
    assert verdict.record_next == {"level": "op", "only_steps": [FAULT]}
    options = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    for folder in ("ops", "numbers"):
        for name, ckpt_path in (("good", None), ("bad", runs / "kept" / "step=10.ckpt")):
            callback = DeterminismCallback(tmp_path / folder / name, mode="record", **verdict.record_next)
            train(callback, is_faulty=name == "bad", ckpt_path=ckpt_path, **options)
            assert Run.open(tmp_path / folder / name).rank(0).steps(0).tolist() == [FAULT]
        verdict = compare_runs(tmp_path / folder / "good", tmp_path / folder / "bad")
        assert first_of(verdict) == (FAULT, True)
        assert [origin.op for origin in verdict.origins] == [OP]
        if folder == "ops":
            keep = f"forward/first:{OP}"
            assert verdict.record_next == {"level": "op", "only_steps": [FAULT], "keep_tensors": [keep]}
    assert verdict.record_next is None
    numbers = verdict.origins[0].numbers
    assert numbers is not None
    assert [tensor.num_differing for tensor in numbers.output] == [1]


def test_a_verification_says_what_to_record_next_too(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As arguments, and as overrides that Hydra understands."""
    callback = DeterminismCallback(runs / "good", current=tmp_path / "current")
    with pytest.raises(DivergenceError) as raised:
        train(callback, is_faulty=True)
    sentence = "to see where it starts, record step 14 again on both sides and compare the two recordings"
    line = "      in Hydra   determinism.level=op 'determinism.only_steps=[14]'"
    capsys.readouterr()
    cli.main(["diff", str(runs / "good"), str(tmp_path / "current")])
    for text in (str(raised.value), capsys.readouterr().out):
        assert sentence in text
        assert '      in Python  level="op", only_steps=[14]' in text.splitlines()
        assert line in text.splitlines()
    assert callback.verdict is not None
    assert callback.verdict.record_next == {"level": "op", "only_steps": [FAULT]}
    with initialize_config_module("det_callbacks.conf", version_base="1.3"):
        own = ["+determinism=record", "determinism.reference=refs/again"]
        chosen = compose(overrides=[*own, *shlex.split(line)[2:]]).callbacks.determinism
    assert (chosen.level, chosen.only_steps) == ("op", [FAULT])
