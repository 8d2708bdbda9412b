"""A small Hydra application on scikit-learn's digits, with what makes a script depend on things that must not matter.

Run as a script: ``python checked_app.py fault=set +determinism=record determinism.reference=run``.
"""

import os
import time
from pathlib import Path

import hydra
import lightning.pytorch as pl
import torch
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

NAMES = ["b", "A", "a", "B", *(f"{number:02d}" for number in range(28))]


class Digits(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, names: list[str], fault: str) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images[: len(NAMES)], dtype=torch.float32).flatten(1) / 16
        self.labels = torch.tensor(digits.target[: len(NAMES)])
        self.names = names
        self.fault = fault

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number = NAMES.index(self.names[index])
        image = self.images[number]
        if self.fault == "augmentation":  # in the main process it draws what shuffling and dropout draw from
            image = image + 0.1 * torch.rand(image.shape)
        if self.fault == "endless":  # in workers
            Path(f"{os.getpid()}.pid").touch()
            time.sleep(0.05)
        return image, self.labels[number]


class Model(pl.LightningModule):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
        self.fault = fault

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        if "reduction" in self.fault:  # each thread sums its part
            loss = loss + torch.rand(1_000_003, generator=torch.Generator().manual_seed(0)).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    fault = config.fault
    pl.seed_everything(0, verbose=False)
    names = list(set(NAMES)) if "set" in fault else NAMES
    loader = DataLoader(Digits(names, fault), batch_size=8, shuffle=True)
    if fault == "endless":
        Path(f"{os.getpid()}.pid").touch()
        loader = DataLoader(Digits(NAMES * 1000, fault), batch_size=8, num_workers=2)
    model = Model(fault)
    callbacks = [] if fault == "no callbacks" else list(hydra.utils.instantiate(config.callbacks).values())
    trainer = pl.Trainer(
        max_epochs=1,
        max_steps=config.steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    print(f"training with {fault}", flush=True)
    trainer.fit(model, loader)


if __name__ == "__main__":
    main()
