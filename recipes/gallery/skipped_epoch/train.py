"""Resumes from a checkpoint of an epoch's end with a loader that keeps its place;
``--fixed`` lets it begin anew.
"""

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from det_callbacks import DetCallbacksError, TrainingRun

CHECKPOINT, PER_EPOCH = Path("global_step_4.pt"), 4


class StatefulDataLoader(DataLoader[Any]):
    """As torchdata's: the first iteration after ``load_state_dict`` goes on
    where the state was taken.
    """

    num_yielded, to_skip = 0, 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.num_yielded, self.to_skip = self.to_skip, 0
        for batch in islice(super().__iter__(), self.num_yielded, None):
            self.num_yielded += 1
            yield batch


def train(
    run: TrainingRun, model: nn.Module, optimizer: Any, loader: StatefulDataLoader, first_epoch: int
) -> None:
    for epoch in range(first_epoch, 3):
        for (rows,) in run.batches(loader):
            with run.step((rows,)):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(rows[:, :4]), rows[:, 4:]).backward()
                optimizer.step()
        if epoch == 0 and run.mode == "record":
            torch.save((model.state_dict(), optimizer.state_dict(), loader.num_yielded), CHECKPOINT)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = StatefulDataLoader(
    TensorDataset(torch.rand(16, 5)), batch_size=4, generator=torch.Generator()
)
mode, is_resumed = ("record" if "record" in sys.argv else "verify"), "resume" in sys.argv
run = TrainingRun("refs/skipped", mode=mode, model=model, optimizers=optimizer, overwrite=True)
if is_resumed:
    weights, moments, num_yielded = torch.load(CHECKPOINT)
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    loader.to_skip = 0 if "--fixed" in sys.argv and num_yielded % PER_EPOCH == 0 else num_yielded
    run.resume_from(PER_EPOCH, epoch=1)
try:
    with run:
        train(run, model, optimizer, loader, int(is_resumed))
except DetCallbacksError as error:
    print(error)
    sys.exit(error.exit_code)
