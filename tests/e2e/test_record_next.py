"""From two recordings at level state to the step, and from what the verdict says to record next to the op."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fits import Fit, Steady
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from resumes import RESUMING
from torch import Tensor, library
from torch.nn.functional import cross_entropy

from det_callbacks import DeterminismCallback, DivergenceError, Verdict, cli, compare_runs
from det_callbacks.runs.store import Run

pytestmark = RESUMING

Command = Callable[..., tuple[int, str, str]]
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


def saving(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1, filename="{step}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    record(folder / "good")
    record(folder / "bad", saving(folder / "kept"), fault=FAULT)
    return folder


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


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


def test_a_verification_says_what_to_record_next_too(runs: Path, tmp_path: Path, command: Command) -> None:
    callback = DeterminismCallback(runs / "good", current=tmp_path / "current")
    with pytest.raises(DivergenceError) as raised:
        Fit(callback, model=faulty(FAULT), max_epochs=EPOCHS).run()
    sentence = "to see where it starts, record step 14 again on both sides and compare the two recordings"
    for text in (str(raised.value), command("diff", runs / "good", tmp_path / "current")[1]):
        assert sentence in text
        assert '      in Python  level="op", only_steps=[14]' in text.splitlines()
        assert "      in Hydra   determinism.level=op 'determinism.only_steps=[14]'" in text.splitlines()
    assert callback.verdict is not None
    assert callback.verdict.record_next == {"level": "op", "only_steps": [FAULT]}


APP = """
import hydra
import lightning.pytorch as pl
import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint

from test_record_next import faulty
from styles import Samples


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config):
    saving = ModelCheckpoint(config.checkpoints, every_n_train_steps=5, save_top_k=-1, filename="{step}")
    callbacks = [saving, *instantiate(config.callbacks).values()]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_epochs=config.epochs, callbacks=callbacks, **quiet)
    loader = torch.utils.data.DataLoader(Samples(), batch_size=8, generator=torch.Generator())
    trainer.fit(faulty(config.fault)(), loader, ckpt_path=config.ckpt_path)


main()
"""

APP_CONFIG = """
epochs: 8
fault: null
ckpt_path: null
checkpoints: kept
callbacks: {}
logger: {}
hydra:
  searchpath: ['pkg://det_callbacks.conf']
  output_subdir: null
  run: {dir: out}
  job_logging: {root: {handlers: []}}
"""


@pytest.mark.slow
def test_the_printed_overrides_lead_from_two_recordings_to_the_op(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With real processes, in an application whose command line holds a secret."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(APP_CONFIG)
    (tmp_path / "train.py").write_text(APP)
    here = Path(__file__).parent
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, (here, here.parent)), os.environ.get("PYTHONPATH", "")]),
    }
    monkeypatch.chdir(tmp_path)

    def train(words: list[str]) -> None:
        line = [sys.executable, "-W", "ignore", *words[1:]]
        done = subprocess.run(line, env=env, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr

    secret = "+logger.api_key=hunter2"
    for name, fault in (("good", "null"), ("bad", "21")):
        own = ["+determinism=record", f"determinism.reference=refs/{name}", "determinism.level=state"]
        settings = ["determinism.settings.seed=5", secret, f"checkpoints=kept/{name}"]
        train(["python", "train.py", f"fault={fault}", *settings, *own])
    assert not [path for path in tmp_path.rglob("run.json") if b"hunter2" in path.read_bytes()]
    status, out, _ = command("diff", "refs/good", "refs/bad")
    (line,) = [line for line in out.splitlines() if line.strip().startswith("in Hydra ")]
    assert (status, line.split(maxsplit=2)[2]) == (1, "determinism.level=op 'determinism.only_steps=[21]'")
    for name, fault in (("good", "null"), ("bad", "21")):
        own = ["+determinism=record", f"determinism.reference=refs/{name}-21", *shlex.split(line)[2:]]
        resume = [f"ckpt_path='kept/{name}/step=20.ckpt'"] if name == "bad" else []
        train(["python", "train.py", f"fault={fault}", "determinism.settings.seed=5", *own, *resume])
    status, out, _ = command("diff", "refs/good-21", "refs/bad-21")
    assert status == 1
    (line,) = [line for line in out.splitlines() if line.strip().startswith("in Hydra ")]
    assert shlex.split(line)[-1] == f'determinism.keep_tensors=["forward/:{OP}"]'
