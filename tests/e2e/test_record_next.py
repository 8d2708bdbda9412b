"""From two recordings at level state to the step, and from what the verdict says to record next to the op."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fits import Fit, Steady
from hydra import compose, initialize_config_module
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from resumes import RESUMING
from torch import Tensor, library
from torch.nn.functional import cross_entropy

from det_callbacks import DeterminismCallback, DivergenceError, Verdict, cli, compare_runs
from det_callbacks.runs.store import Run

pytestmark = RESUMING

OP = "recorded_next.double.default"
FAULT = 14  # of 20 steps; a checkpoint is saved right after it, and after step 9
EPOCHS = 5


@library.custom_op("recorded_next::double", mutates_args=())
def double(values: Tensor, is_wrong: bool) -> Tensor:
    """A kernel that goes wrong in one element when it is told to, which no argument of the op shows."""
    result = values.numpy() * 2
    if Kernel.is_wrong:
        result.flat[0] += 1
    return torch.from_numpy(result)


@double.register_fake
def _(values: Tensor, is_wrong: bool) -> Tensor:
    return torch.empty_like(values)


double.register_autograd(lambda ctx, gradient: (gradient * 2, None))


class Kernel:
    is_wrong = False


class Faulty(Steady):
    """Goes wrong in one step, if any."""

    fault: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        Kernel.is_wrong = self.trainer.fit_loop.epoch_loop.total_batch_idx == self.fault
        return cross_entropy(self.last(double(torch.relu(self.first(inputs)), False)), labels)


def faulty(fault: int | None) -> Callable[[], Faulty]:
    def make() -> Faulty:
        model = Faulty()
        model.fault = fault
        return model

    return make


def record(folder: Path, *others: Callback, fault: int | None = None, **options: Any) -> Path:
    callback = DeterminismCallback(folder, mode="record", **{"level": "state", **options})
    Fit(callback, *others, model=faulty(fault), max_epochs=EPOCHS, enable_checkpointing=bool(others)).run()
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    saving = ModelCheckpoint(folder / "kept", every_n_train_steps=5, save_top_k=-1, filename="{step}")
    record(folder / "good")
    record(folder / "bad", saving, fault=FAULT)
    return folder


def first_of(verdict: Verdict) -> tuple[int, bool | None]:
    assert verdict.first_divergence is not None
    return verdict.first_divergence.step, verdict.first_divergence.is_origin


def test_what_is_to_be_recorded_next_names_the_op_and_then_the_numbers(runs: Path, tmp_path: Path) -> None:
    """One side from the start and one from its checkpoint, one step each: the kernel is found."""
    verdict = compare_runs(runs / "good", runs / "bad")
    assert first_of(verdict) == (FAULT, None)
    assert verdict.record_next == {"level": "op", "only_steps": [FAULT]}
    options = {"max_epochs": EPOCHS, "enable_checkpointing": True, "default_root_dir": tmp_path}
    for folder in ("ops", "numbers"):
        for name, fault, ckpt_path in (("good", None, None), ("bad", FAULT, runs / "kept" / "step=10.ckpt")):
            callback = DeterminismCallback(tmp_path / folder / name, mode="record", **verdict.record_next)
            Fit(callback, model=faulty(fault), **options).run(ckpt_path=ckpt_path)
            assert Run.open(tmp_path / folder / name).rank(0).steps(0).tolist() == [FAULT]
        verdict = compare_runs(tmp_path / folder / "good", tmp_path / folder / "bad")
        assert first_of(verdict) == (FAULT, True)
        assert [origin.op for origin in verdict.origins] == [OP]
        if folder == "ops":
            keep = f"forward/:{OP}"
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
        Fit(callback, model=faulty(FAULT), max_epochs=EPOCHS).run()
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
