"""Ordinary networks, small: their steps are attributed in ``attribution_models``."""

import torch
import torch.nn.functional as F  # noqa: N812  # as torch's documentation names it
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(attended)
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Tied weights; optionally each block checkpointed as a module."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.tok, self.pos = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(4, 5, num_layers=2, bidirectional=True), nn.GRU(10, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.lstm(x)[0])[0])


class Gate(nn.Module):
    """Writes into views: chunks, rows, masks."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x) * 1.0
        left, right = y[:, :3], y[:, 3:]
        left.mul_(2)
        right.neg_()
        y[:, 0] += y[:, 1].detach()
        y[0].add_(1.0)
        y[:, 2:4][1:] = 0.5
        return y.view(-1, 2, 3).transpose(1, 2).masked_fill_(torch.zeros(3, 2, dtype=torch.bool), 0.0)


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate1, self.gate2 = Gate(), Gate()
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate1(x)
        rows = y.reshape(-1, 6).clone()
        head = rows[:, :2]
        rows.add_(1)
        z = self.gate2(rows)
        z.mul_(3)
        return self.last(z.reshape(-1, 6)) * head
