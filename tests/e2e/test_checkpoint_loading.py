"""Checkpoints that are not what was saved stop a Trainer before a step."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_fits import RESUMING, damage, every, fit, ours
from fits import Fit, Plain
from lightning.pytorch.plugins import TorchCheckpointIO
from trainers import quiet_trainer

from det_callbacks import (
    CheckpointFormatError,
    CheckpointMismatchError,
    check_checkpoint,
)

pytestmark = RESUMING


@pytest.fixture
def saved(tmp_path: Path) -> str:
    keeping = every(tmp_path, 4)
    fit(tmp_path, keeping).run()
    return keeping.best_model_path


def exchange(checkpoint: Any) -> None:
    state = checkpoint["state_dict"]
    state["norm.weight"], state["first.bias"] = state["first.bias"], state["norm.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one["state_dict"]["last.weight"][0].add_(1), r"state_dict: last\.weight differs"),
        (exchange, r"state_dict: (norm\.weight and first\.bias|first\.bias and norm\.weight) are exchanged"),
        (lambda one: one["state_dict"].pop("last.bias"), r"state_dict: last\.bias is missing"),
        (lambda one: one["state_dict"].update(more=torch.ones(1)), "state_dict: more was not saved, and is there"),
        (
            lambda one: one.pop("optimizer_states"),
            r"0/state/0/step \(step of first\.weight\) is missing",
        ),
        (lambda one: one["optimizer_states"][0]["param_groups"][0].update(lr=0.5), "0/param_groups/0/lr differs"),
        (lambda one: one.update(global_step=5), "global_step differs"),
        (lambda one: None, "The file's bytes differ, and yet"),
    ],
)
def test_a_changed_checkpoint_is_refused_before_a_step(change: Any, message: str, saved: str, tmp_path: Path) -> None:
    original = Path(saved).read_bytes()
    damage(saved, change)
    if Path(saved).read_bytes() == original:  # saved by torch again, and the same: change what no entry holds
        Path(saved).write_bytes(original + b"\0")
    resumed = Fit(ours(tmp_path), max_epochs=2)
    with pytest.raises(CheckpointMismatchError, match=message) as caught:
        resumed.run(ckpt_path=saved)
    assert (caught.value.exit_code, caught.value.path) == (1, saved)
    assert resumed.trainer.global_step == 0
    assert not check_checkpoint(saved).equal


def test_the_sidecar_of_another_checkpoint_is_refused(saved: str, tmp_path: Path) -> None:
    other = fit(tmp_path, every(tmp_path, 3)).run().trainer.checkpoint_callback.best_model_path
    shutil.copy(f"{other}.digests.json", f"{saved}.digests.json")
    with pytest.raises(CheckpointMismatchError, match="those of another checkpoint"):
        Fit(ours(tmp_path), max_epochs=2).run(ckpt_path=saved)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_stages_refuse_it_as_well(stage: str, saved: str, tmp_path: Path) -> None:
    model = Plain()
    model.validation_step = model.test_step = model.predict_step = lambda *_: None
    damage(saved, lambda one: one["state_dict"]["last.bias"].zero_())
    trainer = quiet_trainer(ours(tmp_path))
    with pytest.raises(CheckpointMismatchError, match=r"last\.bias"):
        getattr(trainer, stage)(model, Fit().loader, ckpt_path=saved)


class Changing(TorchCheckpointIO):
    """Loads something else than the file holds, as a failing memory would."""

    def load_checkpoint(self, *args: Any, **options: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **options)
        checkpoint["state_dict"]["last.bias"][1] += 1
        return checkpoint


def test_what_was_loaded_is_compared_and_not_the_file_alone(saved: str, tmp_path: Path) -> None:
    assert check_checkpoint(saved).equal
    with pytest.raises(CheckpointMismatchError, match=r"state_dict: last\.bias differs"):
        Fit(ours(tmp_path), max_epochs=2, plugins=[Changing()]).run(ckpt_path=saved)


def test_truncated_files_are_errors(saved: str, tmp_path: Path) -> None:
    content, sidecar = Path(saved).read_bytes(), Path(f"{saved}.digests.json")
    Path(saved).write_bytes(content[:5000])
    with pytest.raises(CheckpointFormatError, match=r"it has 5,000 bytes, and [\d,]+ were saved, so it is truncated"):
        Fit(ours(tmp_path), max_epochs=2).run(ckpt_path=saved)
    Path(saved).write_bytes(content)
    sidecar.write_bytes(sidecar.read_bytes()[:-100])
    with pytest.raises(CheckpointFormatError, match=r"digests\.json is damaged"):
        Fit(ours(tmp_path), max_epochs=2).run(ckpt_path=saved)


def test_a_missing_sidecar_is_said(saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path(f"{saved}.digests.json").unlink()
    Fit(ours(tmp_path), max_epochs=2).run(ckpt_path=saved)
    assert capsys.readouterr().out.count("was loaded unchecked") == 1


class Opaque:
    """What weights_only refuses."""


def test_a_users_weights_only_false_is_respected(tmp_path: Path) -> None:
    class Holding(Plain):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["thing"] = Opaque()

    keeping = every(tmp_path, 4)
    fit(tmp_path, keeping, model=Holding).run()
    report = check_checkpoint(keeping.best_model_path)
    assert (report.equal, report.is_opened) == (True, False)
    Fit(ours(tmp_path), model=Holding, max_epochs=2).run(ckpt_path=keeping.best_model_path, weights_only=False)
    with pytest.raises(Exception, match="Weights only load failed"):
        Fit(ours(tmp_path), model=Holding, max_epochs=2).run(ckpt_path=keeping.best_model_path)
    content = bytearray(Path(keeping.best_model_path).read_bytes())
    content[len(content) // 2] ^= 1
    Path(keeping.best_model_path).write_bytes(content)
    with pytest.raises(CheckpointFormatError):
        check_checkpoint(keeping.best_model_path)
    with pytest.raises(CheckpointFormatError):  # not even the user's choice unpickles what was not saved
        Fit(ours(tmp_path), model=Holding, max_epochs=2).run(ckpt_path=keeping.best_model_path, weights_only=False)
