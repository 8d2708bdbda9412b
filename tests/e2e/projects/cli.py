"""LightningCLI: the model and the Trainer come from a YAML file."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from synthetic import loader, planted
from torch import Tensor, nn


class Net(pl.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.Flatten(), nn.Linear(36 * width, 4)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(planted(self.net(batch[0]), batch_idx), batch[1])

    def train_dataloader(self) -> object:
        return loader()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


if __name__ == "__main__":
    LightningCLI(Net, save_config_callback=None)
