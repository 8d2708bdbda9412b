"""A training that cannot be resumed to the same run is refused with the reason."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from resumes import (
    RESUMING,
    Augmented,
    Noisy,
    SaveAfter,
    environment_again,
    fit,
    loader,
    problems_beside,
    record,
    refused,
    resume,
)
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from det_callbacks import (
    CheckpointFormatError,
    DeterminismCallback,
    DivergenceError,
    NothingComparedError,
    NotResumableError,
)

__all__ = ["environment_again"]  # a fixture of each test

pytestmark = RESUMING


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(Augmented("none").rows)


class Iterating(Noisy):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # as Lightning has it
        batch, _, _ = next(dataloader_iter)
        return self(batch).pow(2).mean()


class Pair(Noisy):
    def training_step(self, batch: Any, index: int) -> Tensor:
        return super().training_step(batch["long"] + batch["short"][:1], index)


class EndsEpochs(Noisy):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


class Changing(Noisy):
    def on_train_epoch_end(self) -> None:
        self.last.bias.data += 1


class Placed(DataLoader[Any]):
    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Counting(pl.Callback):
    """Has a state that its hook at the end of an epoch changes, as EarlyStopping has."""

    epochs = 0

    def on_train_epoch_end(self, *_: Any) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, int]:
        return {"epochs": self.epochs}


TWO = {"long": loader(), "short": DataLoader(Augmented(num_samples=6), batch_size=2)}
MISSED = "before a validation or the end of an epoch, which Lightning leaves out when it resumes, and the process ended"
CHANGED = "a validation or an end of epoch after it, which Lightning leaves out when it resumes, changed"
REASONS: dict[str, tuple[dict[str, Any], int, str, str]] = {  # options, after, at which moment it is saved, why not
    "workers": ({"data": lambda: loader(num_workers=1, persistent_workers=True)}, 4, "batch", "persistent_workers=Fa"),
    "draws_itself": ({"model": Iterating, "data": lambda: loader("own")}, 4, "batch", "let it take a batch"),
    "two_loaders": ({"model": Pair, "data": lambda: TWO}, 4, "batch", "several training loaders; make one"),
    "made_again": ({"reload_dataloaders_every_n_epochs": 2}, 4, "batch", "makes loaders anew; make them once"),
    "no_length": ({"data": lambda: DataLoader(Endless(), batch_size=2)}, 4, "batch", "give the data set a __len__"),
    "ended_epoch": ({"model": EndsEpochs, "max_epochs": 2}, 5, "batch", "on_train_batch_start returned -1 before"),
    "within_a_step": ({}, 4, "backward", "in the middle of step 3; save at the end of a batch"),
    "within_a_start": ({"max_epochs": 2}, 7, "start", "while an epoch began, in the middle of its hooks"),
    "own_place": ({"data": lambda: Placed(Augmented(), 2)}, 4, "batch", "use torch's DataLoader"),
    "before_validation": ({"validates": True, "val_check_interval": 2, "max_steps": 4}, 4, "batch", MISSED),
    "hooks_that_change": ({"model": Changing, "max_epochs": 2}, 7, "batch", f"{CHANGED} last.bias"),
    "at_the_end": ({"model": Changing}, 7, "batch", f"{CHANGED} last.bias"),
    "callbacks_that_change": ({"others": Counting, "max_epochs": 2}, 7, "batch", f"{CHANGED} state of Counting"),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_save_that_cannot_be_resumed_says_what_to_change(name: str, tmp_path: Path) -> None:
    options, after, at, reason = REASONS[name]
    options = {"max_epochs": 1, **options}
    others = [options.pop("others")()] if "others" in options else []
    record(tmp_path, *others, SaveAfter(tmp_path, after, at=at), **options)
    problems = problems_beside(tmp_path / f"{after}.ckpt")
    assert [reason in problem for problem in problems] == [True], problems


class Frozen(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class Without(Noisy):
    def __init__(self) -> None:
        super().__init__()
        del self.noise

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self(batch).mean()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    record(folder, SaveAfter(folder, 4, 7), data=lambda: loader("none"))
    return folder


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model": Frozen}, "Lightning restored it, and the list of frozen parameters is not what it was then"),
        # Lightning 2.6 loads weights into a module that is still float32
        ({"precision": "64-true"}, "Lightning restored it, and first.weight and 7 more is not what it was then"),
        ({"model": Without}, "or are not there: module.noise"),
        ({"data": lambda: loader("none", shuffle=False)}, "the first 4 batches of the epoch, drawn again, are not"),
        ({"accumulate_grad_batches": 2}, "saved with accumulate_grad_batches=1, and now it is 2: use 1"),
        ({"data": lambda: loader("none", batch_size=7)}, "the first 4 batches of the epoch, drawn again, are not"),
    ],
)
def test_another_training_is_refused(options: dict[str, Any], reason: str, saved: Path) -> None:
    assert reason in refused(saved, "4.ckpt", **{"data": lambda: loader("none"), **options})


def test_a_finished_training(tmp_path: Path) -> None:
    record(tmp_path, SaveAfter(tmp_path, 7, at="epoch"), max_epochs=1)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(NothingComparedError, match="of a training that was finished: no step was left"):
        resume(tmp_path, "7.ckpt", max_epochs=1)
    callback = DeterminismCallback(tmp_path / "run", mode="record", level="state")
    with pytest.raises(NothingComparedError, match=r"so nothing was added to .*, which is as it was"):
        fit(callback, max_epochs=1, ckpt_path=tmp_path / "7.ckpt")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_missing_state_is_refused_or_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"accumulate_grad_batches": 3}
    record(tmp_path, SaveAfter(tmp_path, 4), **options)
    (state,) = (tmp_path / "4.ckpt.resume").iterdir()
    content = bytearray(state.read_bytes())
    content[-1] ^= 1  # of a gradient
    state.write_bytes(content)
    with pytest.raises(CheckpointFormatError, match=r"rank-00000\.state is damaged: its tensors are not what"):
        resume(tmp_path, "4.ckpt", **options)
    state.unlink()
    with pytest.raises(NotResumableError) as caught:
        resume(tmp_path, "4.ckpt", **options)
    assert caught.value.problems == ("the state of rank 0 of 1, which was saved beside it, is missing",)
    (tmp_path / "4.ckpt.digests.json").unlink()
    with pytest.raises(DivergenceError):
        resume(tmp_path, "4.ckpt", **options)
    assert "4.ckpt is resumed by Lightning alone" in capsys.readouterr().out
