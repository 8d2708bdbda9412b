"""A resumed training is the training that was interrupted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, GradientAccumulationScheduler
from resumes import RESUMING, Augmented, Manual, Noisy, SaveAfter, environment_again, fit, loader, record, resume
from torch.utils.data import DataLoader, WeightedRandomSampler

from det_callbacks import DeterminismCallback

__all__ = ["environment_again"]  # a fixture of each test

pytestmark = RESUMING


class OneCycle(Noisy):
    """Asks for the number of steps, for which Lightning sets up the data before anything else of a fit."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Stateful(DataLoader[Any]):
    """A loader that goes on where its state says; Lightning saves that in checkpoints."""

    position = start = 0

    def __iter__(self) -> Any:
        start, self.start = self.start, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= start:
                self.position = number + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position % 7}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"]


TRAININGS: dict[str, dict[str, Any]] = {
    "shuffled": {"level": "op"},
    "accumulation": {"accumulate_grad_batches": 3},
    "two_optimizers": {"model": Manual, "validates": True, "val_check_interval": 2},
    "workers": {"data": lambda: loader(num_workers=2)},
}
FURTHER: dict[str, dict[str, Any]] = {
    "generators_of_loader_and_data": {"data": lambda: loader("own", generator=torch.Generator().manual_seed(9))},
    "averaged": {"others": lambda: [EMAWeightAveraging(decay=0.9)], "validates": True},
    "accumulation_by_schedule": {"others": lambda: [GradientAccumulationScheduler({0: 3, 1: 2})]},
    "bf16_mixed": {"precision": "bf16-mixed"},
    "one_cycle": {"model": OneCycle},
    "stateful": {"data": lambda: Stateful(Augmented("none"), 2, generator=torch.Generator()), "after": (4,)},
    "weighted": {"data": lambda: loader(shuffle=False, sampler=WeightedRandomSampler([0.1, 0.9] * 7, 14))},
}
CASES = [*TRAININGS, *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER)]


@pytest.mark.parametrize("name", CASES)
def test_from_the_middle_and_the_end_of_an_epoch(name: str, tmp_path: Path) -> None:
    options = dict((TRAININGS | FURTHER)[name])
    others, level = options.pop("others", list), options.pop("level", "state")
    saved = options.pop("after", (4, 7))
    record(tmp_path, *others(), SaveAfter(tmp_path, *saved), level=level, **options)
    for after in saved:
        assert resume(tmp_path, f"{after}.ckpt", *others(), seed=99, **options) == (after, 13)


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


def test_watching_the_data_changes_nothing(tmp_path: Path) -> None:
    """Weights and generators after a training, with and without the callback."""
    after = []
    for mode in ("record", "disabled"):
        callback = DeterminismCallback(tmp_path / "run", mode=mode, level="state")
        trainer = fit(callback, SaveAfter(tmp_path, 3, 7), validates=True, accumulate_grad_batches=2)
        weights = [parameter.detach().clone() for parameter in trainer.lightning_module.parameters()]
        after.append((weights, torch.get_rng_state()))
    assert all(map(torch.equal, after[0][0], after[1][0]))
    assert torch.equal(after[0][1], after[1][1])
