"""Training on the shards of a folder, in the order in which the file system lists them;
``--fixed`` sorts them.

The second machine is stood in for: with ``--other-machine`` the same files
are listed in another order.
"""

import os
import sys
import tempfile

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from det_callbacks import DetCallbacksError, TrainingRun


def listed(path: str) -> list[str]:
    """Return what ``os.listdir`` gives here, or might give on the other machine."""
    names = sorted(os.listdir(path), reverse="--other-machine" in sys.argv)
    return sorted(names) if "--fixed" in sys.argv else names


def read_shards(path: str) -> ConcatDataset[tuple[Tensor, ...]]:
    return ConcatDataset([TensorDataset(torch.load(f"{path}/{name}")) for name in listed(path)])


with tempfile.TemporaryDirectory() as folder:
    for number in range(4):
        rows = torch.rand(8, 6, generator=torch.Generator().manual_seed(number))
        torch.save(rows, f"{folder}/part-{number:05}.pt")
    shards = read_shards(folder)
torch.manual_seed(0)
loader = DataLoader(shards, batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 6))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(run: TrainingRun) -> None:
    for (rows,) in run.batches(loader):
        with run.step((rows,)):
            loss = nn.functional.mse_loss(model(rows), rows)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


try:
    with TrainingRun(
        "refs/file_order", mode=sys.argv[1], model=model, optimizers=optimizer, overwrite=True
    ) as run:
        train(run)
except DetCallbacksError as error:
    print(error)
    sys.exit(error.exit_code)
