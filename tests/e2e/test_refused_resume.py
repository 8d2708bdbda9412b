"""A training that cannot be resumed to the same run is refused with the reason."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from random_trainings import Augmented, Iterating, Logging, Noisy, Plateau, SaveAfter, fit, loader
from resumes import RESUMING, RaiseAt, environment_again, failing, record, refused, resume
from torch.utils.data import DataLoader

from det_callbacks import (
    CheckpointFormatError,
    DeterminismCallback,
    DivergenceError,
    NothingComparedError,
    NotResumableError,
)
from det_callbacks.errors import CoverageWarning

__all__ = ["environment_again"]  # a fixture of each test

pytestmark = RESUMING


ALWAYS: dict[str, tuple[dict[str, Any], str]] = {
    "workers": ({"data": lambda: loader(num_workers=1, persistent_workers=True)}, "use persistent_workers=False"),
    "draws_itself": ({"model": Iterating, "data": lambda: loader("own")}, "let it take a batch"),
    "two_loaders": (
        {"data": lambda: {"long": loader(), "short": DataLoader(Augmented(num_samples=6), batch_size=2)}},
        "several training loaders; make one of them, or save at its end",
    ),
    "loaders_made_again": ({"reload_dataloaders_every_n_epochs": 2}, "makes loaders anew; make them once"),
}


@pytest.mark.parametrize("name", ALWAYS)
def test_a_training_that_cannot_be_resumed_says_what_to_change(name: str, tmp_path: Path) -> None:
    options, reason = ALWAYS[name]
    record(tmp_path, SaveAfter(tmp_path, 4, 7), **options)
    (problem,) = refused(tmp_path, "4.ckpt", **options)
    assert problem.endswith(reason)
    if name == "two_loaders":
        assert resume(tmp_path, "7.ckpt", **options) == (7, 20)


@pytest.mark.parametrize("others", [[], [RaiseAt("on_train_batch_start", 4)]])
def test_a_batch_under_way_when_an_exception_came(others: list[Any], tmp_path: Path) -> None:
    record(tmp_path)
    stopped = DeterminismCallback(tmp_path / "stopped", mode="record", level="state")
    with pytest.raises(RuntimeError, match="planted"):
        fit(stopped, OnExceptionCheckpoint(tmp_path), *others, model=Noisy if others else failing(4))
    (problem,) = refused(tmp_path, "on_exception.ckpt")
    assert problem == "it was saved in the middle of step 4; save at the end of a batch"


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


class Changing(Noisy):
    def on_train_epoch_end(self) -> None:
        self.last.bias.data += 1


END: dict[str, tuple[str, dict[str, Any], str]] = {
    "batch": ("batch", {"model": Changing}, "before the end of an epoch, whose hooks Lightning leaves out"),
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
    record(tmp_path, SaveAfter(tmp_path, 7, 10), model=Changing)
    assert resume(tmp_path, "10.ckpt", model=Changing) == (10, 20)
    (problem,) = refused(tmp_path, "7.ckpt", model=Changing)
    assert "an end of epoch after it" in problem
    assert problem.endswith("changed last.bias")


def test_missing_state_is_refused_or_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, SaveAfter(tmp_path, 4), accumulate_grad_batches=3)
    (state,) = (tmp_path / "4.ckpt.resume").iterdir()
    content = bytearray(state.read_bytes())
    content[-1] ^= 1  # of a gradient
    state.write_bytes(content)
    with pytest.raises(CheckpointFormatError, match=r"rank-00000\.state is damaged: its tensors are not what"):
        resume(tmp_path, "4.ckpt", accumulate_grad_batches=3)
    state.unlink()
    with pytest.raises(NotResumableError, match='resume="plain"') as caught:
        resume(tmp_path, "4.ckpt", accumulate_grad_batches=3)
    assert caught.value.problems == ("the state of rank 0 of 1, which was saved beside it, is missing",)
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
