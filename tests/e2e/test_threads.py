"""Trainings whose branches run in a pool of threads: recorded once, and verified with the threads in other orders."""

from functools import partial
from itertools import cycle

import lightning.pytorch as pl
import pytest
import torch
from faults import WIDTH, Training, verify
from threaded_models import SCHEDULES, Branch, Branches
from torch import Tensor
from torch.nn.functional import cross_entropy
from trainers import LIGHTNING_ADVICE

from det_callbacks import DeterminismCallback

pytestmark = LIGHTNING_ADVICE


class Threaded(pl.LightningModule):
    """Trains branches in threads, by another schedule in each step."""

    def __init__(self, num_branches: int, first: int) -> None:
        super().__init__()
        self.net = Branches(num_branches, has_stem=num_branches == 2, width=WIDTH)
        schedules = SCHEDULES[num_branches]
        self.schedules = cycle((*schedules[first:], *schedules[:first]))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.net.schedule = next(self.schedules)
        inputs, labels = batch
        return cross_entropy(self.net(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def teardown(self, stage: str) -> None:
        self.net.pool.shutdown()


@pytest.mark.parametrize(
    ("num_branches", "level", "place"),
    [
        (3, "op", ("net.branches.1", "threaded_models.half.default", "content", True)),
        (3, "module", ("net.branches.1.down", "", "content", None)),
        (2, "state", None),
    ],
)
def test_threads_in_another_order_match_and_a_fault_in_one_is_named(tmp_path, monkeypatch, num_branches, level, place):
    trainings = [Training(model=partial(Threaded, num_branches, first)) for first in range(3)]
    reference = trainings[0].record(tmp_path / "reference", level=level)
    for number, training in enumerate(trainings):
        callback = DeterminismCallback(reference, current=tmp_path / str(number))
        training.fit(callback)
        assert callback.verdict.verdict == "match"
    monkeypatch.setattr(Branch, "wrong", 1)
    for number, training in enumerate(trainings if place else []):
        first = verify(reference, training, tmp_path / f"wrong {number}").first_divergence
        assert first is not None
        assert (first.step, first.phase) == (0, "forward")
        assert (first.module, first.op, first.kind, first.is_origin) == place
