"""A character-level network in which one backward pass sometimes goes wrong;
plain Lightning, no Hydra.
"""

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, library, nn
from torch.nn.functional import cross_entropy, layer_norm
from torch.utils.data import DataLoader, TensorDataset

from det_callbacks import (
    DetCallbacksError,
    DeterminismCallback,
    DeterminismSettings,
    enforce_determinism,
)

CONTEXT = 16
CARELESS_LAYERS: set[int] = set()
TEXT = Path(logging.__file__).read_text(encoding="utf-8")[:4000]  # a text that every Python has


@library.custom_op("recipe::sum_rows", mutates_args=())
def sum_rows(rows: Tensor, layer: int) -> Tensor:
    """Sum the rows of a matrix; in a careless layer they are added in the order in
    which they happen to arrive.

    That is what atomic additions do on a GPU. Here chance is forced (from time to time, by
    ``os.urandom``), since two threads on a small machine may well arrive in
    the same order every time.
    """
    order = list(range(len(rows)))
    if layer in CARELESS_LAYERS and os.urandom(1)[0] % 3 == 0:
        order.sort(key=lambda _: os.urandom(4))
    total = torch.zeros_like(rows[0])
    for index in order:
        total += rows[index]
    return total


class Scale(torch.autograd.Function):
    """Multiplies by a learned scale, with a hand-written backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, scale: Tensor, layer: int) -> Tensor:
        ctx.save_for_backward(value, scale)
        ctx.layer = layer
        return value * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        value, scale = ctx.saved_tensors
        return gradient * scale, sum_rows((gradient * value).flatten(0, -2), ctx.layer), None


class ScaledNorm(nn.Module):
    def __init__(self, width: int, layer: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.layer = layer

    def forward(self, value: Tensor) -> Tensor:
        return Scale.apply(layer_norm(value, value.shape[-1:]), self.scale, self.layer)


class Layer(nn.Module):
    def __init__(self, width: int, layer: int) -> None:
        super().__init__()
        self.norm = ScaledNorm(width, layer)
        self.mix = nn.Linear(width, width)

    def forward(self, value: Tensor) -> Tensor:
        return value + torch.tanh(self.mix(self.norm(value)))


class Characters(pl.LightningModule):
    def __init__(self, width: int = 32, layers: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, width)
        self.layers = nn.Sequential(*(Layer(width, index) for index in range(layers)))
        self.head = nn.Linear(width, 128)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        context, following = batch
        logits = self.head(self.layers(self.embed(context)))
        return cross_entropy(logits.flatten(0, 1), following.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_loader() -> DataLoader[Any]:
    codes = torch.tensor([ord(character) % 128 for character in TEXT])
    windows = codes.unfold(0, CONTEXT + 1, 4)
    return DataLoader(TensorDataset(windows[:, :-1], windows[:, 1:]), batch_size=8, shuffle=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["record", "verify"])
    parser.add_argument("--reference", default="refs/find_the_op")
    parser.add_argument(
        "--careless",
        type=int,
        metavar="LAYER",
        help="number of the layer whose backward sums carelessly",
    )
    options = parser.parse_args()
    CARELESS_LAYERS.update([] if options.careless is None else [options.careless])
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    settings = DeterminismSettings(seed=0)
    enforce_determinism(settings)
    callback = DeterminismCallback(
        options.reference, mode=options.mode, settings=settings, overwrite=options.mode == "record"
    )
    trainer = pl.Trainer(
        max_steps=20,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(Characters(), make_loader())
    except DetCallbacksError as error:
        print(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
