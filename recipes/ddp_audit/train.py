"""A small convolutional network on scikit-learn's digits, on several processes,
with something that goes wrong.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import hydra
import lightning.pytorch as pl
import torch
from omegaconf import DictConfig
from planted import OtherOrder, Shard, WrongKernel, WrongWeights
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FAULTS = (None, "data", "gradient", "weights", "order")


class Digits(pl.LightningModule):
    def __init__(
        self,
        *,
        optimizer: Callable[..., torch.optim.Optimizer],
        batch_size: int,
        wrong_step: int | None,
        wrong_rank: int,
    ) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.batch_size, self.wrong_step, self.wrong_rank = batch_size, wrong_step, wrong_rank
        self.net = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(1, 8, 3, padding=1),
                relu1=nn.ReLU(),
                conv2=nn.Conv2d(8, 16, 3, padding=1, stride=2),
                norm=nn.BatchNorm2d(16),
                relu2=nn.ReLU(),
                flatten=nn.Flatten(),
                head=nn.Linear(16 * 16, 10),
            )
        )

    def train_dataloader(self) -> DataLoader[Any]:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        data = TensorDataset(images, torch.tensor(digits.target))
        sampler = Shard(
            size=len(data),
            rank=self.global_rank,
            world_size=self.trainer.world_size,
            batch_size=self.batch_size,
            wrong_step=self.wrong_step if self.global_rank == self.wrong_rank else None,
        )
        return DataLoader(data, batch_size=self.batch_size, sampler=sampler)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


def train(config: DictConfig) -> None:
    """Train as configured; the fault is planted in every process,
    and does something where it is due.
    """
    if config.fault not in FAULTS:
        raise ValueError(
            f"fault must be one of {', '.join(map(str, FAULTS))}; got {config.fault!r}"
        )
    rank, step = config.fault_rank, config.fault_step
    pl.seed_everything(config.seed, workers=True, verbose=False)
    model = Digits(
        optimizer=hydra.utils.instantiate(config.optimizer),
        batch_size=config.batch_size,
        wrong_step=step if config.fault == "data" else None,
        wrong_rank=rank,
    )
    callbacks = [hydra.utils.instantiate(callback) for callback in config.callbacks.values()]
    context: AbstractContextManager[Any] = nullcontext()
    if config.fault == "gradient":
        context = WrongKernel(model, rank=rank, step=step)
    elif config.fault == "order":
        context = OtherOrder(model, step=step)
    elif config.fault == "weights":
        callbacks.insert(0, WrongWeights(rank=rank, step=step))
    trainer = hydra.utils.instantiate(config.trainer, callbacks=callbacks)
    with context:
        trainer.fit(model)
    if trainer.is_global_zero:
        print(f"trained {trainer.global_step} steps on {trainer.world_size} processes")


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    train(config)


if __name__ == "__main__":
    main()
