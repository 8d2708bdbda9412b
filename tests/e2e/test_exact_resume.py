"""A resumed training is the training that was interrupted, or it is refused with the reason."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, GradientAccumulationScheduler, OnExceptionCheckpoint
from random_trainings import (
    Augmented,
    Endless,
    Iterating,
    Logging,
    Manual,
    Noisy,
    Normed,
    OneCycle,
    Plateau,
    SaveAfter,
    fit,
    loader,
)
from torch.utils.data import DataLoader
from trainers import LIGHTNING_ADVICE

from det_callbacks import (
    CheckpointFormatError,
    DeterminismCallback,
    DivergenceError,
    NothingComparedError,
    NotResumableError,
)
from det_callbacks.errors import CoverageWarning

pytestmark = [
    LIGHTNING_ADVICE,
    pytest.mark.filterwarnings("ignore:.*dataloader is not resumable"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings(r"ignore:`\.fit\(ckpt_path=None\)` was called without a model"),
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available"),
    # Python's own warning of threads at a fork, and Lightning's of batches it cannot count
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
    pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument"),
]


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """What ``seed_everything`` sets."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def record(folder: Path, *others: pl.Callback, **options: Any) -> pl.Trainer:
    return fit(DeterminismCallback(folder / "run", mode="record", level="state"), *others, **options)


def resume(folder: Path, name: str | Path, *others: pl.Callback, how: str = "exact", **options: Any) -> Any:
    """Verify a resumed training against the recorded one; return the steps that were compared."""
    number = len(list(folder.glob("current-*")))
    callback = DeterminismCallback(folder / "run", current=folder / f"current-{number}", resume=how)
    fit(callback, *others, ckpt_path=folder / name, **options)
    assert callback.verdict is not None
    assert callback.verdict.verdict == "match"
    return callback.verdict.coverage.steps


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
    "two_loaders": {"data": lambda: {"long": loader(), "short": DataLoader(Augmented(num_samples=6), batch_size=2)}},
    # without augmentation from the global generators: Lightning shows callbacks the batch before
    "draws_itself": {"model": Iterating, "data": lambda: loader("own")},
    "one_cycle": {"model": OneCycle},
    "plateau": {"model": Plateau},
    "accumulation_by_schedule": {"others": lambda: [GradientAccumulationScheduler({0: 3, 1: 2})]},
    "loaders_made_again": {"reload_dataloaders_every_n_epochs": 2},
    "weighted": {
        "data": lambda: loader(shuffle=False, sampler=torch.utils.data.WeightedRandomSampler([0.1, 0.9] * 7, 14))
    },
}


@pytest.mark.parametrize("name", TRAININGS)
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
    for name in ("4.ckpt", "epoch/4.ckpt", "after.ckpt"):
        assert resume(tmp_path, name, max_steps=21, **options) == (4, 20)


def test_a_resumed_run_can_be_resumed(tmp_path: Path) -> None:
    record(tmp_path, SaveAfter(tmp_path, 3))
    resume(tmp_path, "3.ckpt", SaveAfter(tmp_path, 5, 12))
    for after in (5, 12):
        assert resume(tmp_path, f"{after}.ckpt", seed=99) == (after, 20)


def failing(step: int, base: type[Noisy] = Noisy) -> type[Noisy]:
    return type("Failing", (base,), {"fails_at": step})


@pytest.mark.parametrize("data", [loader, lambda: DataLoader(Endless(), batch_size=2)])
@pytest.mark.parametrize("step", [0, 4, 7])
def test_a_batch_that_an_exception_ended_is_done_again(data: Any, step: int, tmp_path: Path) -> None:
    """Lightning counts it as done, so that its own resume numbers all later steps differently."""
    record(tmp_path, data=data)
    stopped = DeterminismCallback(tmp_path / "stopped", mode="record", level="state")
    with pytest.raises(RuntimeError, match="planted"):
        fit(stopped, OnExceptionCheckpoint(tmp_path), model=failing(step), data=data)
    assert resume(tmp_path, "on_exception.ckpt", data=data) == (step, 20)


class RaiseAt(pl.Callback):
    def __init__(self, hook: str, number: int) -> None:
        self.hook, self.number = hook, number
        setattr(self, hook, self.count)

    def count(self, trainer: pl.Trainer, *_: Any) -> None:
        done = trainer.fit_loop.epoch_loop.total_batch_idx + (self.hook != "on_train_batch_start")
        if done >= self.number:
            raise RuntimeError("planted")


class FailingTransfer(Noisy):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training and self.trainer.fit_loop.epoch_loop.total_batch_idx == 3:
            raise RuntimeError("planted")
        return batch


@pytest.mark.parametrize("is_last", [False, True])
def test_a_batch_that_was_only_drawn_is_not_lost(is_last: bool, tmp_path: Path) -> None:
    record(tmp_path)
    stopped = DeterminismCallback(tmp_path / "stopped", mode="record", level="state")
    others = [OnExceptionCheckpoint(tmp_path), RaiseAt("on_train_batch_start", 4)]
    with pytest.raises(RuntimeError, match="planted"):
        fit(stopped, *(others if is_last else reversed(others)))
    assert resume(tmp_path, "on_exception.ckpt") == (4, 20)
    stopped = DeterminismCallback(tmp_path / "transfer", mode="record", level="state")
    with pytest.raises(RuntimeError, match="planted"):
        fit(stopped, OnExceptionCheckpoint(tmp_path), model=FailingTransfer)
    assert resume(tmp_path, "on_exception.ckpt") == (4, 20)


def refused(folder: Path, name: str, *others: pl.Callback, **options: Any) -> tuple[str, ...]:
    with pytest.raises(NotResumableError, match='resume="warn"') as caught:
        resume(folder, name, *others, **options)
    assert caught.value.exit_code == 2
    return caught.value.problems


def test_a_batch_that_had_changed_something_is_not_done_again(tmp_path: Path) -> None:
    record(tmp_path, model=Normed)
    stopped = DeterminismCallback(tmp_path / "stopped", mode="record", level="state")
    with pytest.raises(RuntimeError, match="planted"):
        fit(stopped, OnExceptionCheckpoint(tmp_path), model=failing(4, Normed))
    (problem,) = refused(tmp_path, "on_exception.ckpt", model=Normed)
    # batch norm counts its batches in the open; its running statistics it writes without a trace
    assert "in the middle of step 4, which had already changed 1 of the module's parameters, buffers" in problem


def test_an_epoch_that_had_only_begun(tmp_path: Path) -> None:
    """Lightning would leave the whole epoch out."""
    record(tmp_path)
    stopped = DeterminismCallback(tmp_path / "stopped", mode="record", level="state")
    with pytest.raises(RuntimeError, match="planted"):
        fit(stopped, OnExceptionCheckpoint(tmp_path), RaiseAt("on_train_epoch_start", 7))
    (problem,) = refused(tmp_path, "on_exception.ckpt")
    assert problem == "it was saved while an epoch began, in the middle of its hooks"
    # nothing random had run in the hooks so far
    with pytest.warns(CoverageWarning, match="while an epoch began"):
        assert resume(tmp_path, "on_exception.ckpt", how="warn") == (7, 20)


END: dict[str, tuple[str, dict[str, Any], str]] = {
    "batch": ("batch", {}, "before the end of an epoch, whose hooks Lightning leaves out"),
    "loaders": ("epoch", {"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs makes"),
    "workers": ("epoch", {"data": lambda: loader(num_workers=1, persistent_workers=True)}, "persistent_workers=True"),
    "plateau": ("epoch", {"model": Plateau}, "before ReduceLROnPlateau was updated"),
}


@pytest.mark.parametrize("name", END)
def test_a_process_that_ended_at_the_end_of_an_epoch(name: str, tmp_path: Path) -> None:
    """What the next epoch begins from had not been seen."""
    at, options, reason = END[name]
    record(tmp_path, **options)
    stopped = DeterminismCallback(tmp_path / "stopped", mode="record", level="state")
    fit(stopped, SaveAfter(tmp_path, 7, at=at), **options, max_epochs=1)
    (problem,) = refused(tmp_path, "7.ckpt", **options)
    assert reason in problem
    assert problem.endswith("and the process ended before the next batch was drawn")


class Counting(pl.Callback):
    """Has a state that its hook at the end of an epoch changes, as EarlyStopping has."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_train_epoch_end(self, *_: Any) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, int]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.epochs = state_dict["epochs"]


def test_state_of_callbacks_that_lightning_leaves_out(tmp_path: Path) -> None:
    record(tmp_path, Counting(), SaveAfter(tmp_path, 4, 7))
    assert resume(tmp_path, "4.ckpt", Counting()) == (4, 20)
    (problem,) = refused(tmp_path, "7.ckpt", Counting())
    assert problem.endswith("changed state of Counting")


class EndsEpochs(Noisy):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 5 else None


def test_epochs_that_a_module_ends_are_refused(tmp_path: Path) -> None:
    record(tmp_path, SaveAfter(tmp_path, 4, 9), model=EndsEpochs)
    assert resume(tmp_path, "4.ckpt", model=EndsEpochs)[0] == 4
    (problem,) = refused(tmp_path, "9.ckpt", model=EndsEpochs)
    assert "returned -1 before" in problem


class Thawing(Noisy):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 0:
            self.first.requires_grad_(False)
        if self.current_epoch == 1:
            self.first.requires_grad_()


def test_parameters_that_were_thawed(tmp_path: Path) -> None:
    record(tmp_path, SaveAfter(tmp_path, 10), model=Thawing)

    class Frozen(Thawing):
        def __init__(self) -> None:
            super().__init__()
            self.first.requires_grad_(False)

    (problem,) = refused(tmp_path, "10.ckpt", model=Frozen)
    assert problem == "Lightning restored it, and the list of frozen parameters is not what it was then"


def test_weights_that_lightning_rounds(tmp_path: Path) -> None:
    """Lightning 2.6 loads a checkpoint of precision 64-true into a module that is still float32."""
    options = {"precision": "64-true"}
    record(tmp_path, SaveAfter(tmp_path, 4), **options)
    (problem,) = refused(tmp_path, "4.ckpt", **options)
    assert problem == "Lightning restored it, and first.weight and 3 more is not what it was then"


def test_logging_is_no_part_of_a_step(tmp_path: Path) -> None:
    """Lightning sets its sums up when a name is first logged, which after a resume is another step."""
    training = {"model": Logging, "data": lambda: loader("none")}
    fit(DeterminismCallback(tmp_path / "run", mode="record"), SaveAfter(tmp_path, 4, 7), **training)
    for after in (4, 7):
        assert resume(tmp_path, f"{after}.ckpt", **training) == (after, 20)


def test_a_finished_training(tmp_path: Path) -> None:
    record(tmp_path, SaveAfter(tmp_path, 7, at="epoch"), max_epochs=1)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(NothingComparedError, match="of a training that was finished: no step was left"):
        resume(tmp_path, "7.ckpt", max_epochs=1)
    with pytest.raises(NothingComparedError, match=r"so nothing was added to .*, which is as it was"):
        record(tmp_path, max_epochs=1, ckpt_path=tmp_path / "7.ckpt")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_checkpoint_that_was_renamed_and_one_that_was_moved(tmp_path: Path) -> None:
    record(tmp_path, SaveAfter(tmp_path, 4))
    (tmp_path / "moved").mkdir()
    for suffix in ("", ".digests.json", ".resume"):
        (tmp_path / f"4.ckpt{suffix}").rename(tmp_path / "moved" / f"best.ckpt{suffix}")
    assert resume(tmp_path, "moved/best.ckpt") == (4, 20)


def test_a_generator_as_data(tmp_path: Path) -> None:
    def data() -> Any:
        return (batch for _ in range(1) for batch in loader("none"))

    record(tmp_path, data=data, max_epochs=1)


def test_workers_that_outlive_an_epoch_are_refused(tmp_path: Path) -> None:
    options = {"data": lambda: loader(num_workers=1, persistent_workers=True), "max_epochs": 2}
    record(tmp_path, SaveAfter(tmp_path, 3, 10), **options)
    assert resume(tmp_path, "3.ckpt", **options) == (3, 13)
    (problem,) = refused(tmp_path, "10.ckpt", **options)
    assert "persistent_workers=False" in problem


def test_other_data_is_refused(tmp_path: Path) -> None:
    record(tmp_path, SaveAfter(tmp_path, 4, 7), data=lambda: loader("none"))
    for data in (lambda: loader("none", shuffle=False), lambda: loader("global"), lambda: loader("none", batch_size=7)):
        (problem,) = refused(tmp_path, "4.ckpt", data=data)
        assert "the first 4 batches of the epoch, drawn again, are not those that it was trained on" in problem


def test_a_generator_that_is_gone_is_refused(tmp_path: Path) -> None:
    class Without(Noisy):
        def __init__(self) -> None:
            super().__init__()
            del self.noise

    record(tmp_path, SaveAfter(tmp_path, 4, 7))
    for after in (4, 7):
        (problem,) = refused(tmp_path, f"{after}.ckpt", model=Without)
        assert problem.endswith("are not there: module.noise")


def test_what_a_hook_changes_after_the_save_is_noticed(tmp_path: Path) -> None:
    """Lightning runs no end of epoch again for a checkpoint that was saved at the end of its last batch."""

    class Changing(Noisy):
        def on_train_epoch_end(self) -> None:
            self.last.bias.data += 1

    record(tmp_path, SaveAfter(tmp_path, 7, 10), model=Changing)
    assert resume(tmp_path, "10.ckpt", model=Changing) == (10, 20)
    (problem,) = refused(tmp_path, "7.ckpt", model=Changing)
    assert "an end of epoch after it" in problem
    assert problem.endswith("changed last.bias")


def test_missing_state_is_refused_or_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, SaveAfter(tmp_path, 4), accumulate_grad_batches=3)
    gradients = next((tmp_path / "4.ckpt.resume").glob("*.safetensors.*"))
    content = gradients.read_bytes()
    gradients.unlink()
    with pytest.raises(CheckpointFormatError, match="the gradients accumulated so far, is missing"):
        resume(tmp_path, "4.ckpt", accumulate_grad_batches=3)
    gradients.write_bytes(content)
    next((tmp_path / "4.ckpt.resume").glob("*.json.*")).unlink()
    (problem,) = refused(tmp_path, "4.ckpt", accumulate_grad_batches=3)
    assert "rank-00000.json, which was saved beside it, is missing" in problem
    (tmp_path / "4.ckpt.digests.json").unlink()
    with pytest.raises(DivergenceError):
        resume(tmp_path, "4.ckpt", accumulate_grad_batches=3)
    assert "4.ckpt is resumed by Lightning alone" in capsys.readouterr().out


def test_on_request_what_cannot_be_restored_is_a_warning(tmp_path: Path) -> None:
    record(tmp_path, SaveAfter(tmp_path, 4), data=lambda: loader("none"))
    with (
        pytest.warns(CoverageWarning, match=r"cannot be resumed to the same run: .* Going on"),
        pytest.raises(DivergenceError, match="the first after resuming: the batch batch "),
    ):
        resume(tmp_path, "4.ckpt", how="warn", data=lambda: loader("none", shuffle=False))


@pytest.mark.parametrize(("options", "cause"), [({"shuffle": False}, "data_order"), ({}, "rng")])
def test_without_restoring_it_is_another_run(options: dict[str, Any], cause: str, tmp_path: Path) -> None:
    training = {"data": lambda: loader("none", **options)}
    record(tmp_path, SaveAfter(tmp_path, 10), **training)
    with pytest.raises(DivergenceError, match="Step 10, the first after resuming") as caught:
        resume(tmp_path, "10.ckpt", how="plain", **training)
    assert caught.value.verdict is not None
    assert caught.value.verdict.cause == cause


def test_watching_the_data_changes_nothing(tmp_path: Path) -> None:
    """Weights and generators after a training, with and without the callback."""
    after = []
    for mode in ("record", "disabled"):
        callback = DeterminismCallback(tmp_path / "run", mode=mode, level="state")
        trainer = fit(callback, OnExceptionCheckpoint(tmp_path), validates=True, accumulate_grad_batches=2)
        weights = [parameter.detach().clone() for parameter in trainer.lightning_module.parameters()]
        after.append((weights, torch.get_rng_state()))
    assert all(map(torch.equal, after[0][0], after[1][0]))
    assert torch.equal(after[0][1], after[1][1])
