"""A network on a periodic grid that trims one side of its input and wraps the other;
``--fixed`` trims first.
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, pad

from det_callbacks import DetCallbacksError, TrainingRun


class PeriodicNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv3d(1, 4, (1, 2, 2)), nn.Linear(4, 1)

    def forward(self, grid: Tensor) -> Tensor:
        if "--fixed" in sys.argv:
            grid = torch.cat([grid[..., 1:, :]] * 3, dim=-2)
            grid = pad(grid, [2, 0, 0, 0, 0, 0], mode="circular")
        else:
            grid = pad(grid, [2, 0, -1, 2, 0, 0], mode="circular")
        return self.head(torch.relu(self.conv(grid)).mean((2, 3, 4)))


torch.manual_seed(0)
model = PeriodicNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
grids, targets = torch.rand(24, 1, 1, 2, 2), torch.rand(24, 1)


def train(run: TrainingRun) -> None:
    for batch in zip(grids.split(4), targets.split(4), strict=True):
        with run.step(batch):
            loss = mse_loss(model(batch[0]), batch[1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


try:
    with TrainingRun(
        "refs/padding", mode=sys.argv[1], model=model, optimizers=optimizer, overwrite=True
    ) as run:
        train(run)
except DetCallbacksError as error:
    print(error)
    sys.exit(error.exit_code)
