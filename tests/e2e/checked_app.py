"""A small training script, with what makes one depend on things that must not matter.

Run as a script: ``python checked_app.py set reduction``.
"""

import os
import sys
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

NAMES = ["b", "A", "a", "B", *(f"{number:02d}" for number in range(28))]
FAULTS = sys.argv[1:]
pl: Any = import_module("pytorch_lightning" if "twin" in FAULTS else "lightning.pytorch")


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, names: list[str]) -> None:
        self.images = torch.rand(len(NAMES), 64, generator=torch.Generator().manual_seed(0))
        self.numbers = [*map(NAMES.index, names)]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number = self.numbers[index]
        image = self.images[number]
        # in the main process it draws what shuffling and dropout draw from
        if "augmentation" in FAULTS:
            image = image + 0.1 * torch.rand(image.shape)
        return image, torch.tensor(number % 10)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        if "reduction" in FAULTS:  # each thread sums its part
            loss = loss + torch.rand(1_000_003, generator=torch.Generator().manual_seed(0)).sum()
        if "memory" in FAULTS:  # so much that the system hands it out anew each time, as zeros
            loss = loss + 1e15 * torch.empty(10_000_019)[-1000:].sum()
        if "broken" in FAULTS and index == 1:
            raise ZeroDivisionError("the script's own error")
        return loss * (2 if "planted" in FAULTS and index == 1 else 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train() -> None:
    loader = DataLoader(
        Samples(list(set(NAMES)) if "set" in FAULTS else NAMES), batch_size=8, shuffle=True
    )
    options: dict[str, Any] = {"devices": 2, "strategy": "ddp"} if "ddp" in FAULTS else {}
    if "own" in FAULTS:
        from det_callbacks import DeterminismCallback

        options["callbacks"] = DeterminismCallback("own", mode="record", level="state")
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    pl.Trainer(max_epochs=1, accelerator="cpu", **quiet, **options).fit(Model(), loader)


if __name__ == "__main__":
    if "processes" in FAULTS and os.fork():  # the first has the fault, and its end is not looked at
        os.wait()
        FAULTS.remove("planted") if "planted" in FAULTS else None
    if "unseeded" not in FAULTS:
        pl.seed_everything(0, verbose=False)
    print(f"training with {FAULTS}, seed {torch.initial_seed()}", flush=True)
    for _ in range(0 if "no fit" in FAULTS else 2 if "twice" in FAULTS else 1):
        train()
