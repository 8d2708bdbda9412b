"""State beside model and optimizers: compared as each step begins,
and named where a resume loses it.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as given
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback, DivergenceError, TrainingRun, check_checkpoint
from det_callbacks.runs.store import Run
from det_callbacks.verdict import Verdict

pytestmark = [
    LIGHTNING_ADVICE,
    # Lightning's, of the callback that saves
    pytest.mark.filterwarnings(
        "ignore:The dirpath has changed:UserWarning", "ignore:Checkpoint directory:UserWarning"
    ),
]

SAVED = 3  # steps before the checkpoint
DATA = torch.rand(24, 4, generator=torch.Generator().manual_seed(1))


class Small(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.net(batch[0]).float().square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Ema(pl.Callback):
    """An average of its own making; ``loses`` it like a callback whose
    ``load_state_dict`` was forgotten.
    """

    def __init__(self, *, loses: bool = False, draws_at: int | None = None, size: int = 2) -> None:
        self.weights, self.loses, self.draws_at = torch.zeros(size, 4), loses, draws_at

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.weights[:2].lerp_(pl_module.net.weight.detach(), 0.1)
        if trainer.global_step == self.draws_at:
            self.weights += 1

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self.loses:
            self.weights = state_dict["weights"]


def scaled() -> MixedPrecision:
    return MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    )


def fit(
    mode: str,
    folder: Path,
    *callbacks: pl.Callback,
    loader: Any = None,
    level: str | None = None,
    resumes: bool = False,
    resume: str = "exact",
    **options: Any,
) -> DeterminismCallback:
    torch.manual_seed(0)
    loader = loader or DataLoader(TensorDataset(DATA), 4)
    reference = folder / "reference"
    current = None if mode == "record" else folder / "current"
    ours = DeterminismCallback(
        reference, mode=mode, level=level, current=current, resume=resume, on_divergence="collect"
    )
    saves = ModelCheckpoint(
        folder / ("saved" if mode == "record" else "again"),
        every_n_train_steps=SAVED,
        save_top_k=-1,
        filename="{step}",
    )
    kept = {"enable_checkpointing": True, "max_steps": 6, "max_epochs": None, **options}
    trainer = quiet_trainer(ours, *callbacks, saves, default_root_dir=folder, **kept)
    path = folder / "saved" / f"step={SAVED}.ckpt" if resumes else None
    trainer.fit(Small(), loader, ckpt_path=path)
    return ours


def verdict_of(folder: Path, *callbacks: pl.Callback, **options: Any) -> Verdict:
    with pytest.raises(DivergenceError) as caught:
        fit("verify", folder, *callbacks, **options)
    return caught.value.verdict


@pytest.mark.parametrize("level", ["op", "state"])
def test_a_resume_that_restores_it_all_matches(level, tmp_path):
    # since Lightning 2.6
    more = [given.WeightAveraging] if hasattr(given, "WeightAveraging") else []
    fit("record", tmp_path, Ema(), *(make() for make in more), level=level, plugins=scaled())
    resumed = fit(
        "verify", tmp_path, Ema(), *(make() for make in more), resumes=True, plugins=scaled()
    )
    assert resumed.verdict.verdict == "match"
    names = recorded(tmp_path, SAVED + 1)
    expected = ["StepLR: last_epoch", "Ema: ['weights']"]
    expected += ["WeightAveraging: average_model.module.net.weight"] * len(more)
    expected += ["the gradient scaler: scale", "the gradient scaler: growth_tracker"]
    assert {f"state of {name}" for name in expected} <= names


def recorded(folder: Path, step: int) -> set[str | None]:
    return {site.name for site in Run.open(folder / "reference").view(0, 0, step).program.sites}


# Lightning's, of the scheduler of this training
@pytest.mark.filterwarnings("ignore:.*SWA.*:UserWarning")
def test_stochastic_averages_count_from_the_epoch_on_in_which_they_are_used(tmp_path):
    average = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=1)
    fit("record", tmp_path, average, level="state", max_steps=-1, max_epochs=2)
    name = "state of StochasticWeightAveraging: average_model.net.weight"
    assert [name in recorded(tmp_path, step) for step in (0, 5, 6, 11)] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("level", ["op", "state"])
def test_an_average_that_a_resume_loses_is_named(level, tmp_path):
    fit("record", tmp_path, Ema(), level=level)
    verdict = verdict_of(tmp_path, Ema(loses=True), resumes=True)
    assert (verdict.cause, verdict.first_divergence.step) == ("checkpoint", SAVED)
    assert "the restored state differs (state of Ema: ['weights'])" in verdict.explanation


@pytest.mark.parametrize(
    ("dropped", "name"),
    [("MixedPrecision", "the gradient scaler: scale"), ("lr_schedulers", "StepLR: last_epoch")],
)
def test_a_scaler_or_a_scheduler_that_a_resume_loses_is_named(dropped, name, tmp_path):
    fit("record", tmp_path, plugins=scaled(), level="state")

    class Forgets(pl.Callback):
        def on_load_checkpoint(
            self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]
        ) -> None:
            if dropped == "lr_schedulers":
                checkpoint[dropped] = [{**one, "last_epoch": 0} for one in checkpoint[dropped]]
            else:
                del checkpoint[dropped]

    verdict = verdict_of(tmp_path, Forgets(), plugins=scaled(), resumes=True)
    assert (verdict.cause, verdict.first_divergence.step) == ("checkpoint", SAVED)
    assert f"state of {name}" in verdict.explanation
    assert "persistent=False" not in verdict.explanation


class Place:
    """A loader that goes on where it was: Lightning saves its state;
    ``loses`` it like one that is not restored.
    """

    def __init__(self, *, loses: bool = False) -> None:
        self.begins_at, self.drawn, self.loses = 0, 0, loses

    def __len__(self) -> int:
        return len(DATA) // 4

    def __iter__(self) -> Iterator[list[Tensor]]:
        for index in range(self.begins_at, len(self)):
            self.drawn = index + 1
            yield [DATA[4 * index : 4 * index + 4]]

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        if not self.loses:
            self.begins_at = state_dict["drawn"]


def test_the_state_of_a_loader_lies_in_the_digests_of_a_checkpoint_and_shows_as_its_batch(tmp_path):
    """It is not asked for between checkpoints: ``state_dict`` of a loader may start its workers."""
    fit("record", tmp_path, loader=Place(), level="state", resume="plain")
    resumed = fit("verify", tmp_path, loader=Place(), resumes=True, resume="plain")
    assert resumed.verdict.verdict == "match"
    early, late = (tmp_path / "saved" / f"step={step}.ckpt" for step in (SAVED, 2 * SAVED))
    names = [entry.name for entry in check_checkpoint(early, late).entries]
    assert any(name.endswith("combined_loader/0/drawn") for name in names), names

    verdict = verdict_of(tmp_path, loader=Place(loses=True), resumes=True, resume="plain")
    assert (verdict.cause, verdict.first_divergence.name) == ("data_order", "batch[0]")
    assert verdict.explanation.startswith(
        f"Step {SAVED}, the first after resuming: the batch differs (batch[0])"
    )


def test_a_callback_whose_state_changes_between_steps_is_named(tmp_path):
    fit("record", tmp_path, Ema(), level="state")
    verdict = verdict_of(tmp_path, Ema(draws_at=4))
    assert (verdict.cause, verdict.first_divergence.step) == ("external_write", 4)
    assert (
        "changed state of Ema: ['weights'] between the end of step 3 and step 4"
        in verdict.explanation
    )
    assert "; Ema.on_train_batch_end" in verdict.explanation


def test_a_large_state_is_left_to_the_checkpoint_and_reported(tmp_path, capsys):
    fit("record", tmp_path, Ema(size=1 << 17), level="state")
    assert "the state of Ema has 2 MiB, too much to compare at each step" in capsys.readouterr().out


def test_a_scaler_that_a_loop_restores_matches_at_level_op(tmp_path):
    """It makes its tensors when it is first used in a process,
    so in the first step after a resume.
    """
    saved: dict[str, Any] = {}

    def fit(*, begins_at: int, **options: Any) -> TrainingRun:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
        if begins_at:
            model.load_state_dict(saved["model"])
            scaler.load_state_dict(saved["scaler"])
        run = TrainingRun(tmp_path / "run", model=model, optimizers=optimizer, **options)
        batches = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(1))
        with run.resume_from(begins_at) if begins_at else run:
            for number in range(begins_at, 4):
                if number == 2 and not begins_at:
                    saved.update(
                        model=copy.deepcopy(model.state_dict()), scaler=scaler.state_dict()
                    )
                with run.step(batches[number]):
                    optimizer.zero_grad()
                    scaler.scale(model(batches[number]).square().mean()).backward()
                    scaler.step(optimizer)
                    scaler.update()
        return run

    fit(begins_at=0, mode="record", level="op")
    assert fit(begins_at=2, current=tmp_path / "same").verdict.verdict == "match"
    saved["scaler"]["scale"] = 64.0
    with pytest.raises(DivergenceError) as caught:
        fit(begins_at=2, current=tmp_path / "other")
    assert caught.value.verdict.first_divergence.step == 2
