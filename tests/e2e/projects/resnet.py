"""A residual network as timm and torchvision have them, in bfloat16, with accumulated gradients."""

import lightning.pytorch as pl
import torch
from synthetic import QUIET, loader, planted
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = (
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.conv2, self.bn2 = (
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + x)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.head = nn.Linear(8, 4)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        features = planted(self.blocks(self.stem(images)), batch_idx)
        return nn.functional.cross_entropy(self.head(features.mean((2, 3))), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            self.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4
        )


if __name__ == "__main__":
    pl.seed_everything(0, verbose=False)
    options = {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    pl.Trainer(max_epochs=1, accelerator="cpu", **options, **QUIET).fit(Net(), loader())
