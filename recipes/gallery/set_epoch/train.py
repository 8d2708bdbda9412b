"""Training with a DistributedSampler; ``--fixed`` tells it the epoch."""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from det_callbacks import DetCallbacksError, TrainingRun

torch.manual_seed(5)
dataset = TensorDataset(torch.rand(22, 16), torch.randint(3, (22,)))
# a launcher says how many there are
sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True)
loader = DataLoader(dataset, batch_size=5, drop_last=True, sampler=sampler)
model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(run: TrainingRun) -> None:
    for epoch in range(3):
        if "--fixed" in sys.argv:
            sampler.set_epoch(epoch)
        for inputs, labels in run.batches(loader):
            with run.step((inputs, labels)):
                loss = cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


try:
    with TrainingRun(
        "refs/set_epoch", mode=sys.argv[1], model=model, optimizers=optimizer, overwrite=True
    ) as run:
        train(run)
except DetCallbacksError as error:
    print(error)
    sys.exit(error.exit_code)
