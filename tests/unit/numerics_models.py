"""Small models that tests of numerics compare, and wrong transformations of one of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3)),
            *(nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 2 * width)
        self.contract = nn.Linear(2 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(attended.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.contract(gelu(self.expand(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, 16, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        values, hidden = self.rnn(x)
        return {"values": self.head(values), "hidden": hidden}


class TiedWithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.drop = nn.Dropout(0.2)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.drop(torch.tanh(self.mix(self.embed(tokens)))))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 5))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (mlp(), torch.randn(8, 16)),
    "convolutions": lambda: (ConvNet(), torch.randn(4, 3, 12, 12)),
    "transformer": lambda: (Transformer(layers=1), torch.randint(50, (4, 12))),
    "recurrent": lambda: (Recurrent(), torch.randn(4, 2, 8)),
    "tied with dropout": lambda: (TiedWithDropout(), torch.randint(30, (4, 8))),
}


class WithoutResidual(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return self.contract(gelu(self.expand(self.norm2(x))))


class Transposed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def drop_residual(model: Transformer, layer: int) -> tuple[str, str]:
    """Drop the second residual of a block; return phase and name of what is wrong first."""
    model.blocks[layer].__class__ = WithoutResidual
    return "module", f"blocks.{layer}"


def change_epsilon(model: Transformer, layer: int) -> tuple[str, str]:
    model.blocks[layer].norm2.eps = 1e-3
    return "module", f"blocks.{layer}.norm2"


def use_transposed(model: Transformer, layer: int) -> tuple[str, str]:
    model.blocks[layer].project.__class__ = Transposed
    return "module", f"blocks.{layer}.project"


def store_transposed(model: Transformer, layer: int) -> tuple[str, str]:
    weight = model.blocks[layer].project.weight
    weight.data = weight.data.t().contiguous()
    return "initial", f"blocks.{layer}.project.weight"


WRONG: tuple[Callable[[Any, int], tuple[str, str]], ...] = (
    drop_residual,
    change_epsilon,
    use_transposed,
    store_transposed,
)
