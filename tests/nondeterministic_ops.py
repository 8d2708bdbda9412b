"""Ops that give other bits at every call, drawing from where no mode looks;
and one that only seems to.
"""

import itertools
import os
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, library

_calls = itertools.count(1)


def entropy() -> float:
    """Return a small number that no seed decides, another at each call."""
    return (float(next(_calls)) + os.urandom(1)[0] / 256) / 1000


@library.custom_op("planted::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + entropy()


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


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return noisy_backward(grad)
