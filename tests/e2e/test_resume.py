"""A resumed training is the training that was interrupted, or it is refused with the reason."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from resumes import (
    BATCHES,
    RESUMING,
    Augmented,
    Manual,
    Noisy,
    SaveAfter,
    fit,
    loader,
    noisy,
    record,
    refused,
    resume,
)
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from versions import LIGHTNING

from det_callbacks import DeterminismCallback, DivergenceError, NothingComparedError
from det_callbacks.checkpoint.files import read_part, read_sidecar
from det_callbacks.runs.store import Run
from det_callbacks.settings.generators import GeneratorStates

pytestmark = RESUMING


class Plateau(Noisy):
    """Lowers its learning rate at the end of every epoch."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.log("epoch", float(self.current_epoch), on_step=False, on_epoch=True)
        return super().training_step(batch, index)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, "min", patience=0, factor=0.1
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "epoch"}}


class Queue(Noisy):
    """Keeps the last outputs in a buffer, as a part of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(2, 2))

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index) + (self.queue * 2).sum()
        self.queue = torch.cat([self.queue, loss.detach().expand(3, 2)])[1:3]
        return loss


TRAININGS: dict[str, dict[str, Any]] = {
    "shuffled": {"level": "op"},
    "accumulation": {"accumulate_grad_batches": 3},
    "two_optimizers": {"model": Manual, "validates": True, "val_check_interval": 2},
    "workers": {"data": lambda: loader(num_workers=2)},
    "plateau": {"model": Plateau, "max_epochs": 3},
    "generators_of_loader_and_data": {
        "data": lambda: loader("own", generator=torch.Generator().manual_seed(9))
    },
    "part_of_a_larger_tensor": {"level": "op", "model": Queue},
}
if LIGHTNING >= (2, 6):  # which brought this callback
    TRAININGS["averaged"] = {
        "others": lambda: [callbacks.EMAWeightAveraging(decay=0.9)],
        "validates": True,
    }


@pytest.mark.parametrize("name", TRAININGS)
def test_from_the_middle_and_the_end_of_an_epoch(name, tmp_path):
    options = {"others": list, "level": "state", **TRAININGS[name]}
    others, level = options.pop("others"), options.pop("level")
    num_steps = BATCHES * options.get("max_epochs", 2)
    saved = [4, *range(BATCHES, num_steps, BATCHES)]
    record(tmp_path, *others(), SaveAfter(tmp_path, *saved), level=level, **options)
    for after in saved:
        assert resume(tmp_path, f"{after}.ckpt", *others(), **options) == (after, num_steps - 1)


@pytest.mark.parametrize(
    ("limit", "validates"), [({"max_epochs": -1, "max_steps": 14}, True), ({}, False)]
)
def test_wherever_an_epoch_or_a_fit_ends(limit, validates, tmp_path):
    names = ["train_epoch_end", *(["validation_end"] if validates else [])]
    record(
        tmp_path,
        *(SaveAfter(tmp_path / at, 7, at=at) for at in names),
        validates=validates,
        **limit,
    )
    for name in names:
        assert resume(tmp_path, f"{name}/7.ckpt", validates=validates, **limit) == (7, 13)
    # within an epoch Lightning counts it as processed, and calls the hooks of its end
    for steps in (4, 7):
        first = DeterminismCallback(tmp_path / f"first-{steps}", mode="record", level="state")
        saving = SaveAfter(tmp_path / "end", steps, at="train_epoch_end")
        trainer = fit(first, saving, validates=validates, **{**limit, "max_steps": steps})
        trainer.save_checkpoint(tmp_path / "after" / f"{steps}.ckpt")
        for name in ("end", "after"):
            assert resume(tmp_path, f"{name}/{steps}.ckpt", validates=validates, **limit) == (
                steps,
                13,
            )


def test_hooks_of_a_new_epoch_run_again_after_a_resume(tmp_path):
    """In one of them Lightning averages the weights."""

    def averaging() -> pl.Callback:
        return callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)

    record(tmp_path, averaging(), SaveAfter(tmp_path, 7, 14, at="train_epoch_end"), max_epochs=3)
    for after in (7, 14):  # Lightning adds an epoch for the statistics of BatchNorm
        assert resume(tmp_path, f"{after}.ckpt", averaging(), max_epochs=3) == (
            after,
            4 * BATCHES - 1,
        )


def test_a_resumed_run_can_be_resumed_once_it_has_trained(tmp_path):
    record(tmp_path, SaveAfter(tmp_path, 3))
    resume(
        tmp_path,
        "3.ckpt",
        SaveAfter(tmp_path, 5, 12),
        SaveAfter(tmp_path / "before", 3, at="train_start"),
    )
    assert "it was saved before the first batch after a resume" in refused(
        tmp_path, "before/3.ckpt"
    )
    (tmp_path / "moved").mkdir()
    for suffix in ("", ".digests.json", ".resume"):  # nor does it matter where the checkpoint lies
        (tmp_path / f"5.ckpt{suffix}").rename(tmp_path / "moved" / f"best.ckpt{suffix}")
    assert resume(tmp_path, "moved/best.ckpt") == (5, 13)
    assert resume(tmp_path, "12.ckpt") == (12, 13)


@pytest.mark.parametrize("order", [1, -1], ids=["first", "last"])
def test_what_a_tuner_saves_and_loads_is_no_resume(order, tmp_path, capsys):
    tuned = noisy(
        configure_optimizers=lambda self: torch.optim.SGD(self.parameters(), lr=self.lr), lr=1e-2
    )

    def train(callback: DeterminismCallback, *others: Any) -> int:
        finder = callbacks.LearningRateFinder(
            num_training_steps=14, early_stop_threshold=None, update_attr=True
        )
        trainer = fit(*[callback, finder][::order], *others, model=tuned, default_root_dir=tmp_path)
        assert trainer.lightning_module.lr != 1e-2
        assert list(tmp_path.glob(".lr_find*")) == []
        assert "is resumed by Lightning alone" not in capsys.readouterr().out
        return trainer.global_step

    num_steps = train(
        DeterminismCallback(tmp_path / "run", mode="record", level="state"), SaveAfter(tmp_path, 4)
    )
    # Lightning 2.5.0 does not put back the epoch: it counts the tuner's first one as trained
    assert num_steps == 14 or (num_steps == 7 and LIGHTNING < (2, 5, 6))
    assert not Run.open(tmp_path / "run").manifest.attempts[0].resumed_from
    callback = DeterminismCallback(tmp_path / "run", current=tmp_path / "again")
    train(callback)
    assert (callback.verdict.verdict, callback.verdict.coverage.steps) == (
        "match",
        (0, num_steps - 1),
    )
    assert resume(tmp_path, "4.ckpt", model=tuned) == (4, num_steps - 1)


def test_nothing_else_changes(tmp_path):
    """Weights, generators and the bytes of checkpoints, with and without the callback;
    and the ops of a step.
    """
    after, options = [], {"validates": True, "accumulate_grad_batches": 3}
    for mode in ("record", "disabled"):
        callback = DeterminismCallback(tmp_path / "run", mode=mode)
        fit(callback, SaveAfter(tmp_path, 3, 7, 14), **options)
        saved = [path.read_bytes() for path in sorted(tmp_path.glob("*.ckpt"))]
        after.append((saved, GeneratorStates.capture()))
    assert len(after[0][0]) == 3
    assert after[0] == after[1]
    # saved within a step, whose end comes later for a callback behind
    callback = DeterminismCallback(tmp_path / "run", current=tmp_path / "current")
    fit(SaveAfter(tmp_path, 1, 4, 5), callback, **options)
    assert callback.verdict.verdict == "match"
    assert (tmp_path / "4.ckpt.digests.json").exists()


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(Augmented("none").rows)


DRAWING = noisy(
    training_step=lambda self, dataloader_iter: self(next(dataloader_iter)[0]).pow(2).mean()
)
PAIRED = noisy(training_step=lambda self, batch, index: self(batch["long"]).pow(2).mean())
ENDING = noisy(on_train_batch_start=lambda self, batch, index: -1 if index == 3 else None)
CHANGING = noisy(on_train_epoch_end=lambda self: self.last.bias.data.add_(1))
STOPPING = partial(callbacks.EarlyStopping, "epoch", check_on_train_epoch_end=True)
PLACED = type("Placed", (DataLoader,), {"load_state_dict": lambda self, state: None})


TWO = {"long": loader(), "short": DataLoader(Augmented(num_samples=6), batch_size=2)}
DATA = (
    "its training data is not a single DataLoader of torch that is made once and iterated by "
    "Lightning"
)
MIDDLE = (
    "a validation, or the epoch-start hooks; save at the end of a batch, a validation or an epoch"
)
MISSED = "before a validation or the end of an epoch, which Lightning skips on resume, and the"
CHANGED = (
    "(hooks of callbacks, a validation, an end of epoch), which Lightning skips on resume, changed"
)
# options, after which batch it is saved, and why not
REASONS: dict[str, tuple[dict[str, Any], int, str]] = {
    "workers": (
        {"data": lambda: loader(num_workers=1, persistent_workers=True)},
        4,
        "use persistent_workers=False",
    ),
    "no_length": (
        {"data": lambda: DataLoader(Endless(), batch_size=2)},
        4,
        "give the data set a __len__",
    ),
    "draws_itself": ({"model": DRAWING, "data": lambda: loader("own")}, 4, DATA),
    "two_loaders": ({"model": PAIRED, "data": lambda: TWO}, 4, DATA),
    "made_again": ({"reload_dataloaders_every_n_epochs": 2}, 4, DATA),
    "own_place": ({"data": lambda: PLACED(Augmented(), 2)}, 4, DATA),
    "schedule": (
        {"others": lambda: callbacks.GradientAccumulationScheduler({0: 3})},
        4,
        "use accumulate_grad_batches",
    ),
    "ended_epoch": (
        {"model": ENDING, "max_epochs": 2},
        5,
        "on_train_batch_start returned -1 before",
    ),
    "within_a_step": ({"at": "before_backward"}, 4, f"in the middle of step 3, {MIDDLE}"),
    "within_a_start": ({"max_epochs": 2, "at": "train_epoch_start"}, 7, MIDDLE),
    "within_a_validation": (
        {"validates": True, "val_check_interval": 2, "at": "validation_batch_start"},
        4,
        MIDDLE,
    ),
    "before_validation": ({"validates": True, "val_check_interval": 2, "max_steps": 4}, 4, MISSED),
    "hooks_that_change": ({"model": CHANGING, "max_epochs": 2}, 7, f"{CHANGED} last.bias"),
    # a longer training would not begin its next epoch as this one would
    "at_the_end": ({}, 7, MISSED),
    "callbacks_that_change": (
        {"model": Plateau, "max_epochs": 2, "others": STOPPING},
        7,
        f"{CHANGED} state of Early",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_save_that_cannot_be_resumed_says_what_to_change(name, tmp_path):
    options, after, reason = REASONS[name]
    options = {"max_epochs": 1, "at": "train_batch_end", **options}
    others = [options.pop("others")()] if "others" in options else []
    record(tmp_path, *others, SaveAfter(tmp_path, after, at=options.pop("at")), **options)
    path = tmp_path / f"{after}.ckpt"
    part, _ = read_part(path, read_sidecar(path), 0)
    assert [reason in problem for problem in part.problems] == [True], part.problems


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    record(folder, SaveAfter(folder, 4, 7), data=lambda: loader("none"))
    return folder


def transposed() -> Noisy:
    model = Noisy()
    model.first.weight.data = model.first.weight.data.t().contiguous().t()
    return model


OTHERS: list[tuple[dict[str, Any], str]] = [
    (
        {"model": lambda: Noisy().requires_grad_(False)},
        "it, but the list of frozen parameters does not match",
    ),
    (
        {"model": transposed},
        "it, but the memory layout of first.weight (checkpoints do not save it: use contiguous())",
    ),
    (
        {"model": noisy(on_fit_start=lambda self: delattr(self, "noise"))},
        "cannot be restored: module.noise",
    ),
    (
        {"data": lambda: loader("none", shuffle=False)},
        "the first 4 batches of the epoch differ when they are loaded again",
    ),
    ({"accumulate_grad_batches": 2}, "but accumulate_grad_batches does not match"),
]


@pytest.mark.parametrize(("options", "reason"), OTHERS)
def test_another_training_is_refused(options, reason, saved):
    assert reason in refused(saved, "4.ckpt", **{"data": lambda: loader("none"), **options})


def test_missing_state_is_refused_or_said(saved, capsys):
    (saved / "7.ckpt.resume").rename(saved / "resume")
    assert refused(saved, "7.ckpt").startswith(
        "the state of rank 0 of 1, saved next to it, is missing"
    )
    (saved / "resume").rename(saved / "7.ckpt.resume")
    (saved / "7.ckpt.digests.json").unlink()
    with pytest.raises(DivergenceError):
        resume(saved, "7.ckpt")
    said = (
        "7.ckpt is resumed by Lightning alone: 7.ckpt.resume/ is next to it, but "
        "7.ckpt.digests.json is missing."
    )
    assert said in capsys.readouterr().out
    (saved / "7.ckpt.resume").rename(saved / "resume")
    with pytest.raises(DivergenceError):
        resume(saved, "7.ckpt")
    said = (
        "7.ckpt is resumed by Lightning alone: no saved state of generators and data is next to it."
    )
    assert said in capsys.readouterr().out


def test_a_finished_training(tmp_path):
    record(tmp_path, SaveAfter(tmp_path, 7, at="train_epoch_end"), max_epochs=1)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(
        NothingComparedError, match="from a finished run, so there was no step to compare"
    ):
        resume(tmp_path, "7.ckpt", max_epochs=1)
    callback = DeterminismCallback(tmp_path / "run", mode="record", level="state")
    with pytest.raises(
        NothingComparedError, match=r"so there was no step to train, and .* is unchanged"
    ):
        fit(callback, max_epochs=1, ckpt_path=tmp_path / "7.ckpt")
    assert {
        path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()
    } == before
