"""A trainer that validates in train mode; ``--validate`` turns the validation on,
``--fixed`` calls eval() for it.
"""

import sys

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from det_callbacks import DetCallbacksError, TrainingRun


class UNet3DTrainer:
    def __init__(
        self, model: nn.Module, train_data: TensorDataset, val_data: TensorDataset
    ) -> None:
        self.model, self.train_loader = model, DataLoader(train_data, 4)
        self.val_loader = DataLoader(val_data, 3, generator=torch.Generator())
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(self, run: TrainingRun, epochs: int) -> None:
        for _ in range(epochs):
            self.model.train()
            for volume, target in run.batches(self.train_loader):
                with run.step((volume, target)):
                    loss = mse_loss(self.model(volume), target)
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
            if "--validate" in sys.argv:
                self.validate()

    def validate(self) -> None:
        if "--fixed" in sys.argv:
            self.model.eval()
        with torch.no_grad():
            losses = [
                mse_loss(self.model(volume), target).item() for volume, target in self.val_loader
            ]
        print("validation:", sum(losses) / len(losses))


torch.manual_seed(0)
volumes = TensorDataset(torch.rand(12, 1, 4, 4, 4), torch.rand(12, 1, 4, 4, 4))
held_out = TensorDataset(torch.rand(6, 1, 4, 4, 4), torch.rand(6, 1, 4, 4, 4))
net = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.Conv3d(4, 1, 1))
trainer = UNet3DTrainer(net, volumes, held_out)
try:
    options = {"model": net, "optimizers": trainer.optimizer, "overwrite": True}
    with TrainingRun("refs/train_mode", mode=sys.argv[1], **options) as run:
        trainer.fit(run, epochs=2)
except DetCallbacksError as error:
    print(error)
    sys.exit(error.exit_code)
