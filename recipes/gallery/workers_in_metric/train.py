"""A validation on an IterableDataset, with ``--workers`` read by two;
``--fixed`` gives each worker its share.
"""

import sys
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from det_callbacks import DetCallbacksError, TrainingRun


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples that are read one after the other, such as lines of a file."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        samples = torch.rand(10, 7, generator=torch.Generator().manual_seed(1))
        worker = get_worker_info()
        share = (worker.id, worker.num_workers) if worker and "--fixed" in sys.argv else (0, 1)
        yield from (
            (sample[:6], sample[6:]) for sample in islice(samples, share[0], None, share[1])
        )


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train_loader = DataLoader(TensorDataset(torch.rand(16, 7)), batch_size=4)
num_workers = 2 if "--workers" in sys.argv else 0
val_loader = DataLoader(
    Stream(), batch_size=1, num_workers=num_workers, generator=torch.Generator()
)


def validate() -> float:
    with torch.no_grad():
        errors = [(model(inputs) - targets).abs().sum().item() for inputs, targets in val_loader]
    return sum(errors)


def train(run: TrainingRun) -> None:
    for _epoch in range(2):
        for (rows,) in run.batches(train_loader):
            with run.step((rows,)):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(rows[:, :6]), rows[:, 6:]).backward()
                optimizer.step()
        run.log("val/absolute_error", validate())


try:
    with TrainingRun(
        "refs/metric", mode=sys.argv[1], model=model, optimizers=optimizer, overwrite=True
    ) as run:
        train(run)
except DetCallbacksError as error:
    print(error)
    sys.exit(error.exit_code)
