"""A validation every few iterations, after which the model stays in eval mode;
``--fixed`` sets it back.
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from det_callbacks import DetCallbacksError, TrainingRun

torch.manual_seed(0)
dataset = TensorDataset(torch.rand(64, 10), torch.randint(3, (64,)))
train_loader = DataLoader(dataset, batch_size=8, shuffle=True)
val_loader = DataLoader(dataset, batch_size=32, generator=torch.Generator())
model = nn.Sequential(
    nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


def validate() -> float:
    model.eval()
    with torch.no_grad():
        losses = [cross_entropy(model(inputs), labels).item() for inputs, labels in val_loader]
    if "--fixed" in sys.argv:
        model.train()
    return sum(losses) / len(losses)


def train(run: TrainingRun) -> None:
    model.train()
    for iteration, (inputs, labels) in enumerate(run.batches(train_loader)):
        with run.step((inputs, labels)):
            loss = cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if iteration % 4 == 3 and "--validate" in sys.argv:
            print("validation:", validate())


try:
    with TrainingRun(
        "refs/eval", mode=sys.argv[1], model=model, optimizers=optimizer, overwrite=True
    ) as run:
        for _epoch in range(2):
            train(run)
except DetCallbacksError as error:
    print(error)
    sys.exit(error.exit_code)
