"""A character model whose pooling adds up in threads that race, as a Hydra application."""

import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import hydra
import lightning.pytorch as pl
import torch
from omegaconf import DictConfig
from torch import Tensor, library, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

CONTEXT = 32
TEXT = Path(logging.__file__).read_text(encoding="utf-8")[:6000]  # a text that every Python has


@library.custom_op("recipe::racing_sum", mutates_args=())
def racing_sum(values: Tensor, num_threads: int, is_forced: bool) -> Tensor:
    """Sum (batch, context, width) over context: each thread adds its part to the
    total when it gets there.

    Floating-point addition depends on the order, so the last bits differ from run to run.
    ``is_forced`` makes sure of that with ``os.urandom``, since the threads of an idle machine may
    well arrive in the same order for a while.
    """
    if values.is_cuda:  # atomic additions: the race of a GPU
        index = torch.zeros(values.shape[1], dtype=torch.int64, device=values.device)
        return torch.zeros_like(values[:, :1]).index_add_(1, index, values).squeeze(1)
    total = torch.zeros_like(values[:, 0])
    lock = threading.Lock()

    def add(part: Tensor) -> None:
        if is_forced:
            time.sleep(os.urandom(1)[0] / 256e3)
        summed = part.sum(1)
        with lock:
            total.add_(summed)

    threads = [
        threading.Thread(target=add, args=(part,))
        for part in values.detach().chunk(num_threads, dim=1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return total


def keep_shape(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.context = inputs[0].shape[1]


def expand_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return gradient.unsqueeze(1).expand(-1, ctx.context, -1), None, None


racing_sum.register_autograd(expand_gradient, setup_context=keep_shape)


class RacingPool(nn.Module):
    def __init__(self, num_threads: int, is_forced: bool) -> None:
        super().__init__()
        self.num_threads = num_threads
        self.is_forced = is_forced

    def forward(self, values: Tensor) -> Tensor:
        return racing_sum(values, self.num_threads, self.is_forced) / values.shape[1] ** 0.5


class Characters(pl.LightningModule):
    def __init__(self, *, width: int, num_threads: int, is_forced: bool, lr: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, width)
        self.place = nn.Parameter(torch.randn(CONTEXT, width))
        self.pool = RacingPool(num_threads, is_forced)
        self.body = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 128))
        self.lr = lr

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        context, following = batch
        return cross_entropy(self.body(self.pool(self.embed(context) * self.place)), following)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def make_loader(batch_size: int) -> DataLoader[Any]:
    codes = torch.tensor([ord(character) % 128 for character in TEXT])
    windows = codes.unfold(0, CONTEXT + 1, 3)
    return DataLoader(
        TensorDataset(windows[:, :-1], windows[:, -1]), batch_size=batch_size, shuffle=True
    )


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(config.seed, workers=True)
    model = Characters(**config.model)
    callbacks = [hydra.utils.instantiate(callback) for callback in config.callbacks.values()]
    trainer = hydra.utils.instantiate(config.trainer, callbacks=callbacks)
    trainer.fit(model, make_loader(config.batch_size))


if __name__ == "__main__":
    sys.exit(main())
