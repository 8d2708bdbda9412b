"""A bit that flips anywhere in a checkpoint is found, a file that ends early is an error; a Trainer refuses both."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_fits import copy_of, damage, every, fit, ours, save
from fits import Fit, Plain
from lightning.pytorch.plugins import TorchCheckpointIO
from resumes import RESUMING
from trainers import quiet_trainer

from det_callbacks import CheckpointFormatError, CheckpointMismatchError, check_checkpoint

pytestmark = RESUMING


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def path(saved: Path, tmp_path: Path) -> Path:
    return copy_of(saved, tmp_path)


def outcome(path: Path) -> str:
    try:
        report = check_checkpoint(path)
    except CheckpointFormatError as error:
        return f"refused with {error.exit_code}"
    if report.equal:
        return "passed"
    return f"{'named' if report.entries else 'bytes only'} with {report.exit_code}"


def test_no_flipped_bit_passes(path: Path) -> None:
    content = path.read_bytes()
    assert outcome(path) == "passed"
    draw, found = random.Random(0), []
    for _ in range(200):
        damaged = bytearray(content)
        damaged[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        found.append(outcome(path))
    assert set(found) <= {"named with 1", "bytes only with 1", "refused with 2"}
    assert found.count("named with 1") > 20  # of bits in tensors
    assert found.count("refused with 2") > 20  # of bits in what holds the file together
    path.write_bytes(content)
    assert outcome(path) == "passed"


@pytest.mark.parametrize("suffix", ["", ".digests.json"])
def test_a_truncated_file_is_an_error(suffix: str, path: Path) -> None:
    place = Path(f"{path}{suffix}")
    content = place.read_bytes()
    for length in [0, 1, 3, 4, 100, len(content) - 1, *random.Random(1).sample(range(len(content)), 20)]:
        place.write_bytes(content[:length])
        with pytest.raises(CheckpointFormatError, match=r"digests\.json is damaged|so it is truncated") as caught:
            check_checkpoint(path)
        assert caught.value.exit_code == 2
    with pytest.raises(CheckpointFormatError, match=r"digests\.json is damaged|so it is truncated"):
        Fit(ours(path.parent), max_epochs=2).run(ckpt_path=str(path))


# what a Trainer loads


def exchange(checkpoint: Any) -> None:
    state = checkpoint["state_dict"]
    state["norm.weight"], state["first.bias"] = state["first.bias"], state["norm.weight"]


CHANGES = [
    (lambda one: one["state_dict"]["last.weight"][0].add_(1), r"state_dict: last\.weight differs"),
    (exchange, r"state_dict: (norm\.weight and first\.bias|first\.bias and norm\.weight) are exchanged"),
    (lambda one: one["state_dict"].pop("last.bias"), r"state_dict: last\.bias is missing"),
    (lambda one: one["state_dict"].update(more=torch.ones(1)), "state_dict: more is there, and was not before"),
    (lambda one: one.pop("optimizer_states"), r"0/state/0/step \(step of first\.weight\) is missing"),
    (lambda one: one["optimizer_states"][0]["param_groups"][0].update(lr=0.5), "0/param_groups/0/lr differs"),
    (lambda one: one.update(global_step=5), "global_step differs"),
    (lambda one: None, "The file's bytes differ, and yet"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_changed_checkpoint_is_refused_before_a_step(change: Any, message: str, path: Path) -> None:
    original = path.read_bytes()
    damage(path, change)
    if path.read_bytes() == original:  # saved by torch again, and the same: change what no entry holds
        path.write_bytes(original + b"\0")
    resumed = Fit(ours(path.parent), max_epochs=2)
    with pytest.raises(CheckpointMismatchError, match=message) as caught:
        resumed.run(ckpt_path=str(path))
    assert (caught.value.exit_code, caught.value.path) == (1, str(path))
    assert resumed.trainer.global_step == 0
    assert not check_checkpoint(path).equal


def test_the_sidecar_of_another_checkpoint_is_refused(path: Path, tmp_path: Path) -> None:
    other = fit(tmp_path, every(tmp_path, 2), max_epochs=1).run().trainer.checkpoint_callback.best_model_path
    shutil.copy(f"{other}.digests.json", f"{path}.digests.json")
    with pytest.raises(CheckpointMismatchError, match="those of another checkpoint"):
        Fit(ours(tmp_path), max_epochs=2).run(ckpt_path=str(path))


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_stages_refuse_it_as_well(stage: str, path: Path, tmp_path: Path) -> None:
    model = Plain()
    model.validation_step = model.test_step = model.predict_step = lambda *_: None
    damage(path, lambda one: one["state_dict"]["last.bias"].zero_())
    with pytest.raises(CheckpointMismatchError, match=r"last\.bias"):
        getattr(quiet_trainer(ours(tmp_path)), stage)(model, Fit().loader, ckpt_path=str(path))


class Changing(TorchCheckpointIO):
    """Loads something else than the file holds, as a failing memory would."""

    def load_checkpoint(self, *args: Any, **options: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **options)
        checkpoint["state_dict"]["last.bias"][1] += 1
        return checkpoint


def test_what_was_loaded_is_compared_and_not_the_file_alone(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match=r"state_dict: last\.bias differs"):
        Fit(ours(tmp_path), max_epochs=2, plugins=[Changing()]).run(ckpt_path=str(saved))


def test_a_missing_sidecar_is_said(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path(f"{path}.digests.json").unlink()
    Fit(ours(path.parent), max_epochs=2).run(ckpt_path=str(path))
    assert capsys.readouterr().out.count("was loaded unchecked") == 1


class Opaque:
    """What weights_only refuses."""


class Holding(Plain):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["thing"] = Opaque()


def test_a_users_weights_only_false_is_respected(tmp_path: Path) -> None:
    keeping = every(tmp_path, 4)
    fit(tmp_path, keeping, model=Holding).run()
    path = Path(keeping.best_model_path)
    report = check_checkpoint(path)
    assert (report.equal, report.is_opened) == (True, False)

    def resume(**options: Any) -> None:
        Fit(ours(tmp_path), model=Holding, max_epochs=2).run(ckpt_path=str(path), **options)

    resume(weights_only=False)
    with pytest.raises(Exception, match="Weights only load failed"):
        resume()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointFormatError):
        check_checkpoint(path)
    with pytest.raises(CheckpointFormatError):  # not even the user's choice unpickles what was not saved
        resume(weights_only=False)
