"""Ops that give other bits at every call, drawing from where no mode looks; and one that only seems to."""

import itertools
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, library, nn

_calls = itertools.count(1)


def entropy() -> float:
    """Return a small number that no seed decides, another at each call."""
    return (float(next(_calls)) + os.urandom(1)[0] / 256) / 1000


@library.custom_op("planted::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + entropy()


@noisy.register_fake
def _noisy_fake(x: Tensor) -> Tensor:
    return torch.empty_like(x)


noisy.register_autograd(lambda ctx, grad: grad)


@library.custom_op("planted::noisy_backward", mutates_args=())
def noisy_backward(grad: Tensor) -> Tensor:
    return grad * (1 + entropy())


@library.custom_op("planted::noisy_", mutates_args={"x"})
def noisy_(x: Tensor) -> None:
    x.add_(entropy())


@library.custom_op("planted::drawing", mutates_args=())
def drawing(x: Tensor) -> Tensor:
    """Draws from every generator that a seed decides."""
    noise = torch.from_numpy(np.random.randn(*x.shape)).to(x.dtype)
    return x + random.gauss(0, 1) + random.random() + noise + torch.rand(x.shape)


drawing.register_autograd(lambda ctx, grad: grad)


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return noisy_backward(grad)


class Planted(nn.Module):
    """Nondeterministic in a forward, in a backward and in place, each in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Around(noisy), Around(NoisyGradient.apply), NoisyInPlace()
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.third(self.second(self.first(x))))


class Around(nn.Module):
    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.op = nn.Linear(4, 4), op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.fc(x)).tanh()


class NoisyInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        noisy_(self.buffer)
        return x + self.buffer.sign()
