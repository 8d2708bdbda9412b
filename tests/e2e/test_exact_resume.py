"""A resumed training is the training that was interrupted."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, GradientAccumulationScheduler, LearningRateFinder
from resumes import RESUMING, Manual, Noisy, SaveAfter, environment_again, fit, loader, record, resume
from torch import Tensor
from torch.utils.data import WeightedRandomSampler

from det_callbacks import DeterminismCallback
from det_callbacks.runs.store import Run

__all__ = ["environment_again"]  # a fixture of each test

pytestmark = RESUMING


class OneCycle(Noisy):
    """Asks for the number of steps, for which Lightning sets up the data before anything else of a fit."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Plateau(Noisy):
    """Lowers its learning rate at the end of every epoch."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.log("epoch", float(self.current_epoch), on_step=False, on_epoch=True)
        return super().training_step(batch, index)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", patience=0, factor=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "epoch"}}


TRAININGS: dict[str, dict[str, Any]] = {
    "shuffled": {"level": "op"},
    "accumulation": {"accumulate_grad_batches": 3},
    "two_optimizers": {"model": Manual, "validates": True, "val_check_interval": 2},
    "workers": {"data": lambda: loader(num_workers=2)},
    "plateau": {"model": Plateau, "max_epochs": 3},
}
FURTHER: dict[str, dict[str, Any]] = {
    "generators_of_loader_and_data": {"data": lambda: loader("own", generator=torch.Generator().manual_seed(9))},
    "averaged": {"others": lambda: [EMAWeightAveraging(decay=0.9)], "validates": True},
    "accumulation_by_schedule": {"others": lambda: [GradientAccumulationScheduler({0: 3, 1: 2})]},
    "bf16_mixed": {"precision": "bf16-mixed"},
    "one_cycle": {"model": OneCycle},
    "weighted": {"data": lambda: loader(shuffle=False, sampler=WeightedRandomSampler([0.1, 0.9] * 7, 14))},
}
CASES = [*TRAININGS, *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER)]


@pytest.mark.parametrize("name", CASES)
def test_from_the_middle_and_the_end_of_an_epoch(name: str, tmp_path: Path) -> None:
    options = dict((TRAININGS | FURTHER)[name])
    others, level = options.pop("others", list), options.pop("level", "state")
    record(tmp_path, *others(), SaveAfter(tmp_path, 4, 7), level=level, **options)
    for after in (4, 7):
        last = 7 * options.get("max_epochs", 2) - 1
        assert resume(tmp_path, f"{after}.ckpt", *others(), seed=99, **options) == (after, last)


ENDS = [
    ({"max_epochs": -1, "max_steps": 14}, True),
    pytest.param({"max_epochs": -1, "max_steps": 14}, False, marks=pytest.mark.slow),
    pytest.param({"max_epochs": 2}, True, marks=pytest.mark.slow),
    pytest.param({"max_epochs": 2}, False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("limit", "validates"), ENDS)
def test_wherever_an_epoch_ends(limit: dict[str, int], validates: bool, tmp_path: Path) -> None:
    options = {"validates": validates}
    names = [] if not validates else ["validation"]
    saving = [SaveAfter(tmp_path / at, 7, at=at) for at in ("epoch", *names)]
    record(tmp_path, *saving, **options, **limit)
    # a training of one epoch that is gone on with
    first = {"max_epochs": 1} if "max_steps" not in limit else {"max_epochs": -1, "max_steps": 7}
    other = DeterminismCallback(tmp_path / "first", mode="record", level="state")
    fit(other, **options, **first).save_checkpoint(tmp_path / "after" / "7.ckpt")
    for name in ("epoch", *names, "after"):
        assert resume(tmp_path, f"{name}/7.ckpt", **options, **limit) == (7, 13)


def test_a_fit_that_stopped_within_an_epoch_goes_on(tmp_path: Path) -> None:
    record(tmp_path, max_epochs=2)
    # Lightning counts the epoch as processed, and calls the hooks of its end
    first = DeterminismCallback(tmp_path / "first", mode="record", level="state")
    trainer = fit(first, SaveAfter(tmp_path / "epoch", 4, at="epoch"), max_epochs=2, max_steps=4)
    trainer.save_checkpoint(tmp_path / "after" / "4.ckpt")
    for name in ("epoch", "after"):
        assert resume(tmp_path, f"{name}/4.ckpt", max_epochs=2) == (4, 13)


def test_a_resumed_run_can_be_resumed(tmp_path: Path) -> None:
    record(tmp_path, SaveAfter(tmp_path, 3))
    resume(tmp_path, "3.ckpt", SaveAfter(tmp_path, 5, 12))
    (tmp_path / "moved").mkdir()
    for suffix in ("", ".digests.json", ".resume"):  # nor does it matter where the checkpoint lies
        (tmp_path / f"5.ckpt{suffix}").rename(tmp_path / "moved" / f"best.ckpt{suffix}")
    assert resume(tmp_path, "moved/best.ckpt", seed=99) == (5, 13)
    assert resume(tmp_path, "12.ckpt", seed=99) == (12, 13)


class Tuned(Noisy):
    lr = 1e-2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.parametrize("is_ours_first", [False, True])
def test_what_a_tuner_saves_and_loads_is_no_resume(is_ours_first: bool, tmp_path: Path, capsys: Any) -> None:
    def finding() -> Any:
        return LearningRateFinder(num_training_steps=14, early_stop_threshold=None, update_attr=True)

    def train(callback: DeterminismCallback, *others: Any, **options: Any) -> Any:
        trainer = fit(callback, *others, model=Tuned, default_root_dir=tmp_path, **options)
        assert list(tmp_path.glob(".lr_find*")) == []
        assert "will not be the same run" not in capsys.readouterr().out
        return trainer

    callback = DeterminismCallback(tmp_path / "run", mode="record", level="state")
    found = train(*([callback, finding()] if is_ours_first else [finding(), callback]), SaveAfter(tmp_path, 4))
    assert not Run.open(tmp_path / "run").manifest.attempts[0].resumed_from
    assert found.lightning_module.lr != 1e-2
    callback = DeterminismCallback(tmp_path / "run", current=tmp_path / "again")
    train(*([callback, finding()] if is_ours_first else [finding(), callback]))
    assert callback.verdict is not None
    assert (callback.verdict.verdict, callback.verdict.coverage.steps) == ("match", (0, 13))
    assert resume(tmp_path, "4.ckpt", model=Tuned) == (4, 13)


def test_nothing_else_changes(tmp_path: Path) -> None:
    """Weights, generators and the bytes of checkpoints, with and without the callback."""
    after = []
    for mode in ("record", "disabled"):
        callback = DeterminismCallback(tmp_path / "run", mode=mode, level="state")
        trainer = fit(callback, SaveAfter(tmp_path, 3, 7), validates=True, accumulate_grad_batches=2)
        weights = {name: tensor.tolist() for name, tensor in trainer.lightning_module.state_dict().items()}
        saved = [path.read_bytes() for path in sorted(tmp_path.glob("*.ckpt"))]
        states = torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())
        after.append((weights, saved, states))
    assert len(after[0][1]) == 2
    assert after[0] == after[1]
