"""Denoising with noise from a generator that the data set owns;
``--fixed`` makes one in each worker.
"""

import sys

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from det_callbacks import DetCallbacksError, TrainingRun


class NoisyImages(Dataset[tuple[Tensor, Tensor]]):
    """Images, and the noise to be added to each."""

    def __init__(self) -> None:
        self.images = torch.rand(48, 16, generator=torch.Generator().manual_seed(1))
        self.generator = None if "--fixed" in sys.argv else np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.generator is None:
            self.generator = np.random.default_rng(torch.initial_seed())
        return self.images[index], torch.from_numpy(self.generator.normal(size=16)).float()


torch.manual_seed(0)
loader = DataLoader(NoisyImages(), batch_size=4, shuffle=True, num_workers=2)
model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(run: TrainingRun) -> None:
    for images, noise in run.batches(loader):
        with run.step((images, noise)):
            loss = nn.functional.mse_loss(model(images + 0.1 * noise), images)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


try:
    with TrainingRun(
        "refs/workers", mode=sys.argv[1], model=model, optimizers=optimizer, overwrite=True
    ) as run:
        train(run)
except DetCallbacksError as error:
    print(error)
    sys.exit(error.exit_code)
