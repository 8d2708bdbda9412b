"""A sanity check before the first step; ``--validate`` turns it on,
``--fixed`` gives its loader a generator.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from det_callbacks import DetCallbacksError, TrainingRun

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
train_loader = DataLoader(
    TensorDataset(torch.rand(32, 10), torch.randint(3, (32,))), batch_size=8, shuffle=True
)
own = torch.Generator().manual_seed(0) if "--fixed" in sys.argv else None
val_loader = DataLoader(TensorDataset(torch.rand(8, 10)), batch_size=4, generator=own)


def sanity_check() -> None:
    model.eval()
    with torch.no_grad():
        # does not shuffle, and draws a seed for its workers all the same
        for (inputs,) in val_loader:
            model(inputs)
    model.train()


def train(run: TrainingRun) -> None:
    if "--validate" in sys.argv:
        sanity_check()
    for _epoch in range(2):
        for inputs, labels in run.batches(train_loader):
            with run.step((inputs, labels)):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


try:
    with TrainingRun(
        "refs/sanity", mode=sys.argv[1], model=model, optimizers=optimizer, overwrite=True
    ) as run:
        train(run)
except DetCallbacksError as error:
    print(error)
    sys.exit(error.exit_code)
