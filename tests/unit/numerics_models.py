"""Small models that tests of numerics compare, wrong transformations of one of them,
and what is asked of a report.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from det_callbacks import NumericsReport, compare_modules


def convolutions() -> nn.Module:
    first = (
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3),
    )
    return nn.Sequential(*first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


class Transformer(nn.Module):
    def __init__(
        self, width: int = 32, layers: int = 3, dropout: float = 0.0, *, is_tied: bool = False
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, width)
        options: Any = {
            "dropout": dropout,
            "activation": "gelu",
            "batch_first": True,
            "norm_first": True,
        }
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, 4, 2 * width, **options) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50, bias=False)
        if is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens))))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 5)
    )


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "convolutions": lambda: (convolutions(), torch.randn(4, 3, 12, 12)),
    "transformer": lambda: (Transformer(layers=1), torch.randint(50, (4, 12))),
    "tied with dropout": lambda: (
        Transformer(layers=1, dropout=0.2, is_tied=True),
        torch.randint(50, (4, 8)),
    ),
    # a parametrised weight, and the fast path of a layer that does not train
    "odd": lambda: (
        nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
            nn.TransformerEncoderLayer(8, 2, batch_first=True).eval(),
        ),
        torch.randn(3, 5, 8),
    ),
}


class Apply(nn.Module):
    """Calls a function with its weight and its input."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.weight, *args, **kwargs)


def compared(
    one: Callable[..., Any], other: Callable[..., Any], inputs: Any, **options: Any
) -> NumericsReport:
    return compare_modules(Apply(one), Apply(other), inputs, **{"iterations": 2, **options})


def names(report: NumericsReport, phase: str, iteration: int = 0) -> list[str]:
    return [
        found.name
        for found in report.comparisons
        if (found.phase, found.iteration) == (phase, iteration)
    ]


def only(report: NumericsReport, phase: str, name: str) -> Any:
    (found,) = (
        one
        for one in report.comparisons
        if (one.phase, one.name, one.iteration) == (phase, name, 0)
    )
    return found


def state_of(model: nn.Module) -> dict[str, Any]:
    state = model.state_dict(keep_vars=True)
    return {
        "tensors": [(name, id(one), one.data_ptr(), one.tolist()) for name, one in state.items()],
        "grads": [None if one.grad is None else one.grad.tolist() for one in model.parameters()],
        "training": [part.training for part in model.modules()],
        "hooks": [len(part._forward_hooks) for part in model.modules()],
        "generators": (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
        ),
        "flags": (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_num_threads(),
        ),
    }
