"""Functions of a weight and inputs as modules, and what a comparison of two of them says."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from det_callbacks import NumericsReport, compare_modules


class Apply(nn.Module):
    """Calls a function with its input and a layer's output."""

    def __init__(self, function: Callable[..., Any], *, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), weight))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.weight, *args, **kwargs)


def compared(one: Callable[..., Any], other: Callable[..., Any], inputs: Any, **options: Any) -> NumericsReport:
    options = {"iterations": 2, **options}
    return compare_modules(Apply(one), Apply(other), inputs, **options)


def names(report: NumericsReport, phase: str, iteration: int = 0) -> list[str]:
    return [found.name for found in report.comparisons if (found.phase, found.iteration) == (phase, iteration)]


def only(report: NumericsReport, phase: str, name: str, iteration: int = 0) -> Any:
    (found,) = (one for one in report.comparisons if (one.phase, one.name, one.iteration) == (phase, name, iteration))
    return found
