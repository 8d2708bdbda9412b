"""A resumed training is the training that was interrupted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, GradientAccumulationScheduler
from random_trainings import (
    Endless,
    Manual,
    Normed,
    OneCycle,
    Plateau,
    SaveAfter,
    fit,
    loader,
)
from resumes import RESUMING, environment_again, record, refused, resume
from tiers import rest_slow
from torch.utils.data import DataLoader

from det_callbacks import (
    DeterminismCallback,
)

__all__ = ["environment_again"]  # a fixture of each test

pytestmark = RESUMING

TRAININGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "own_generator": {"data": lambda: loader(generator=torch.Generator().manual_seed(9))},
    "data_with_a_generator": {"data": lambda: loader("own")},
    "validation": {"validates": True, "val_check_interval": 3},
    "accumulation": {"accumulate_grad_batches": 3},
    "manual": {"model": Manual},
    "manual_with_validation": {"model": Manual, "validates": True, "val_check_interval": 2},
    "bf16_mixed": {"model": Normed, "precision": "bf16-mixed"},
    "max_steps": {"max_epochs": -1, "max_steps": 21},
    "no_length": {"data": lambda: DataLoader(Endless(), batch_size=2)},
    "no_length_with_a_generator": {"data": lambda: DataLoader(Endless("own"), batch_size=2)},
    "one_cycle": {"model": OneCycle},
    "plateau": {"model": Plateau},
    "accumulation_by_schedule": {"others": lambda: [GradientAccumulationScheduler({0: 3, 1: 2})]},
    "weighted": {
        "data": lambda: loader(shuffle=False, sampler=torch.utils.data.WeightedRandomSampler([0.1, 0.9] * 7, 14))
    },
}


@pytest.mark.parametrize("name", rest_slow(TRAININGS, every=2))
def test_from_the_middle_and_the_end_of_an_epoch(name: str, tmp_path: Path) -> None:
    options = dict(TRAININGS[name])
    others = options.pop("others", list)
    record(tmp_path, *others(), SaveAfter(tmp_path, 4, 6, 7, 10), **options)
    for after in (4, 6, 7, 10):
        if name == "plateau" and after == 7:
            continue  # the learning rate is lowered after it
        assert resume(tmp_path, f"{after}.ckpt", *others(), **options) == (after, 20)


@pytest.mark.parametrize("data", [lambda: loader(num_workers=2), lambda: DataLoader(Endless(), 2, num_workers=2)])
def test_with_workers(data: Any, tmp_path: Path) -> None:
    options = {"data": data, "max_epochs": 2}
    record(tmp_path, SaveAfter(tmp_path, 4), SaveAfter(tmp_path, 7, at="epoch"), **options)
    assert resume(tmp_path, "4.ckpt", **options)[0] == 4
    if "Endless" not in repr(data().dataset):
        assert resume(tmp_path, "7.ckpt", **options)[0] == 7


def test_weights_that_are_averaged(tmp_path: Path) -> None:
    average = lambda: EMAWeightAveraging(decay=0.9)  # noqa: E731  # one for each fit
    record(tmp_path, average(), SaveAfter(tmp_path, 4, 7), validates=True)
    for after in (4, 7):
        assert resume(tmp_path, f"{after}.ckpt", average(), validates=True) == (after, 20)


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("limit", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 21}])
def test_wherever_an_epoch_ends(limit: dict[str, int], validates: bool, tmp_path: Path) -> None:
    options = {"validates": validates}
    record(tmp_path, SaveAfter(tmp_path, 14, at="epoch"), **options, **limit)
    assert resume(tmp_path, "14.ckpt", **options, **limit) == (14, 20)
    # a training of one epoch that is gone on with
    first = {"max_epochs": 1} if "max_steps" not in limit else {"max_epochs": -1, "max_steps": 7}
    other = DeterminismCallback(tmp_path / "first", mode="record", level="state")
    trainer = fit(other, SaveAfter(tmp_path, 7, at="epoch"), **options, **first)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    for name in ("7.ckpt", "after.ckpt"):
        assert resume(tmp_path, name, **options, **limit) == (7, 20)
    if validates:
        other = DeterminismCallback(tmp_path / "second", mode="record", level="state")
        fit(other, SaveAfter(tmp_path, 7, at="validation"), **options, **limit)
        assert resume(tmp_path, "7.ckpt", **options, **limit) == (7, 20)


@pytest.mark.parametrize("every", [None, 2])
def test_a_training_that_stopped_in_the_middle_of_an_epoch(every: int | None, tmp_path: Path) -> None:
    """Lightning ends the epoch there, and a checkpoint saved after that counts it as a whole one."""
    options: dict[str, Any] = {"max_epochs": -1}
    if every is not None:
        options |= {"validates": True, "val_check_interval": every}
    record(tmp_path, max_steps=21, **options)
    stopped = DeterminismCallback(tmp_path / "stopped", mode="record", level="state")
    saving = (SaveAfter(tmp_path, 4), SaveAfter(tmp_path / "epoch", 4, at="epoch"))
    fit(stopped, *saving, max_steps=4, **options).save_checkpoint(tmp_path / "after.ckpt")
    if every is not None:
        (problem,) = refused(tmp_path, "4.ckpt", max_steps=21, **options)
        assert problem.endswith("and the process ended before the next batch was drawn; save after it")
    for name in ("4.ckpt", "epoch/4.ckpt", "after.ckpt")[every is not None :]:
        assert resume(tmp_path, name, max_steps=21, **options) == (4, 20)


def test_a_resumed_run_can_be_resumed(tmp_path: Path) -> None:
    record(tmp_path, SaveAfter(tmp_path, 3))
    resume(tmp_path, "3.ckpt", SaveAfter(tmp_path, 5, 12))
    for after in (5, 12):
        assert resume(tmp_path, f"{after}.ckpt", seed=99) == (after, 20)
