"""Trainings in which ``configure_optimizers`` returns None: something else updates the weights."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback, DivergenceError, prove_resume
from det_callbacks.runs.store import Run

pytestmark = [
    LIGHTNING_ADVICE,
    pytest.mark.filterwarnings("ignore:.*this fit will run with no optimizer"),  # as it is meant to
]


class InBackward(pl.LightningModule):
    """Each parameter is updated as soon as its gradient is there, in the backward pass."""

    rate = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.update)

    def update(self, parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad * self.rate_now)
        parameter.grad = None

    @property
    def rate_now(self) -> float:
        return self.rate if self.trainer.fit_loop.epoch_loop.total_batch_idx == 2 else 0.1

    def training_step(self, batch: tuple[Tensor], index: int) -> Tensor | None:
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> None:
        return None


class Evolution(InBackward):
    """Keeps a random step where it makes the loss smaller; there is no backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    @torch.no_grad()
    def training_step(self, batch: tuple[Tensor], index: int) -> None:
        before = self.net(batch[0]).pow(2).mean()
        steps = [torch.randn_like(parameter) * self.rate_now for parameter in self.parameters()]
        for parameter, step in zip(self.parameters(), steps, strict=True):
            parameter.add_(step)
        if self.net(batch[0]).pow(2).mean() > before:
            for parameter, step in zip(self.parameters(), steps, strict=True):
                parameter.sub_(step)


def data() -> DataLoader[Any]:
    samples = TensorDataset(torch.rand(16, 4, generator=torch.Generator().manual_seed(0)))
    return DataLoader(samples, batch_size=4, shuffle=True)


def fit(kind: type[InBackward], callback: DeterminismCallback, *, rate: float = 0.1) -> None:
    torch.manual_seed(0)
    model = kind()
    model.rate = rate
    quiet_trainer(callback, max_epochs=2).fit(model, data())


@pytest.mark.parametrize(("kind", "cause"), [(InBackward, "backward"), (Evolution, "forward")])
def test_a_training_without_an_optimizer_is_recorded_verified_and_resumed(kind, cause, tmp_path):
    fit(kind, DeterminismCallback(tmp_path / "run", mode="record"))
    facts = Run.open(tmp_path / "run").manifest.environment
    assert [name for name in facts if name.startswith("optimizer")] == [
        "optimizer",
        "optimizer.lr_scheduler",
    ]
    assert facts["optimizer"].value == "none"
    same = DeterminismCallback(tmp_path / "run", current=tmp_path / "same")
    fit(kind, same)
    assert (same.verdict.verdict, same.verdict.counts.steps_compared) == ("match", 8)
    other = DeterminismCallback(tmp_path / "run", current=tmp_path / "other")
    with pytest.raises(DivergenceError):
        fit(kind, other, rate=0.2)
    assert (other.verdict.first_divergence.step, other.verdict.cause) == (2, cause)
    trainer = partial(quiet_trainer, max_epochs=2)
    assert (
        prove_resume(trainer, kind, data, stop_at=3, steps=8, folder=tmp_path / "proof").verdict
        == "match"
    )


def test_below_level_op_no_optimizer_is_blamed(tmp_path):
    fit(InBackward, DeterminismCallback(tmp_path / "run", mode="record", level="state"))
    with pytest.raises(DivergenceError) as caught:
        fit(InBackward, DeterminismCallback(tmp_path / "run", current=tmp_path / "other"), rate=0.2)
    assert caught.value.verdict.cause == "unknown"
