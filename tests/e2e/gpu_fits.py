"""Trainings of an image model with convolutions and attention on a GPU, also as a program: record PATH, verify PATH."""

import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from late_device import forbid_waiting
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset
from trainers import quiet_trainer

from det_callbacks import DeterminismCallback, DeterminismSettings, DivergenceError, enforce_determinism

MIB = 1024 * 1024

STRATEGIES: dict[str, tuple[Callable[[], Any], str]] = {
    "auto": (lambda: "auto", "bf16-mixed"),
    "ddp": (DDPStrategy, "bf16-mixed"),
    "fsdp2": (lambda: ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1), "32-true"),
}
"""Name -> strategy and precision; of one process, so that on one GPU NCCL is what runs."""


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=2)
        )
        attended = scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return x + gelu(self.project(attended))


class ImageModel(LightningModule):
    """Classifies images of 3 x 32 x 32.

    Args:
        width: of the 64 patches of an image.
        does_wait: a step asks the device for a value.
        fault_at: step in which the second block gives other bits.
    """

    def __init__(self, width: int = 64, *, does_wait: bool = False, fault_at: int | None = None) -> None:
        super().__init__()
        self.does_wait = does_wait
        self.fault_at = fault_at
        self.patches = nn.Sequential(nn.Conv2d(3, width, 4, 4), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(Attention(width), Attention(width))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.patches(images).flatten(2).transpose(1, 2))
        if self.global_step == self.fault_at:
            x = x * 1.5
        return self.head(x.mean(1))

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        loss = cross_entropy(self(batch[0]), batch[1])
        if self.does_wait:
            loss.item()
        return loss

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            for part in (*self.blocks, self.head, self):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(model: LightningModule, *callbacks: Callback, batch_size: int = 16, strategy: str = "auto") -> pl.Trainer:
    """Train a model for four steps in mixed precision, on batches that are the same in every fit."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(4 * batch_size, 3, 32, 32, generator=generator)
    classes = torch.randint(10, (4 * batch_size,), generator=generator)
    made, precision = STRATEGIES[strategy]
    trainer = quiet_trainer(*callbacks, accelerator="gpu", devices=1, precision=precision, strategy=made())
    trainer.fit(model, DataLoader(TensorDataset(images, classes), batch_size=batch_size))
    return trainer


def within_steps(switch: Callable[[bool], None], *callbacks: Callback, first_step: int = 0) -> list[Callback]:
    """Return callbacks with a switch that is on after all of them began a step and off before any of them ends it."""
    off = LambdaCallback(on_train_batch_end=lambda *_: switch(False))
    on = LambdaCallback(on_train_batch_start=lambda *given: switch(True) if given[-1] >= first_step else None)
    return [off, *callbacks, on]


def fit_without_waits(model: LightningModule, *callbacks: Callback) -> None:
    """Train; from the second step on (in the first kernels are compiled, and tried) nothing may wait for the device."""
    try:
        fit(model, *within_steps(forbid_waiting, *callbacks, first_step=1))
    finally:
        forbid_waiting(False)


def peak_of_fit(*callbacks: Callback, width: int, batch_size: int) -> int:
    """Return the bytes by which the device's peak of a fit lies above what was allocated before it."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fit(ImageModel(width), *callbacks, batch_size=batch_size)
    return torch.cuda.max_memory_allocated() - before


def main(arguments: Sequence[str]) -> int:
    """Record or verify a fit under the default settings: MODE PATH STRATEGY [FAULT_AT]."""
    mode, path, strategy, *fault_at = arguments
    settings = DeterminismSettings(seed=0)
    enforce_determinism(settings)
    callback = DeterminismCallback(path, mode=mode, settings=settings)
    model = ImageModel(fault_at=int(fault_at[0]) if fault_at else None)
    try:
        fit(model, callback, strategy=strategy)
    except DivergenceError as error:
        print(error)
        return error.exit_code
    print(mode if callback.verdict is None else callback.verdict.verdict)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
