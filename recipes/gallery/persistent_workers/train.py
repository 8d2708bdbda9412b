"""Training with random rotations; ``--persistent`` keeps the workers,
``--fixed`` gives the loader a generator.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from det_callbacks import DetCallbacksError, TrainingRun

torch.manual_seed(0)
positions = torch.rand(32, 3, generator=torch.Generator().manual_seed(1))
loader = DataLoader(
    TensorDataset(positions, positions.norm(dim=1, keepdim=True)),
    batch_size=8,
    num_workers=1,
    persistent_workers="--persistent" in sys.argv,
    generator=torch.Generator().manual_seed(0) if "--fixed" in sys.argv else None,
)
model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


def train(run: TrainingRun) -> None:
    for _epoch in range(3):
        for inputs, targets in run.batches(loader):
            with run.step((inputs, targets)):
                # augmentation, from the global generator
                rotation, _ = torch.linalg.qr(torch.randn(3, 3))
                loss = nn.functional.mse_loss(model(inputs @ rotation), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


try:
    with TrainingRun(
        "refs/persistent", mode=sys.argv[1], model=model, optimizers=optimizer, overwrite=True
    ) as run:
        train(run)
except DetCallbacksError as error:
    print(error)
    sys.exit(error.exit_code)
