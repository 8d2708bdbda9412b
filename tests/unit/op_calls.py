"""One call or more for each op in the lists of ``torch.use_deterministic_algorithms``, small and on the CPU."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import grid_sample, interpolate

Call = Callable[[], Tensor]

INDEX = torch.tensor([0, 1])


def image(dims: int) -> Tensor:
    return torch.ones(1, 2, *[4] * dims, requires_grad=True)


def vector() -> Tensor:
    return torch.ones(4, requires_grad=True)


def module(kind: str, dims: int, *arguments: Any, **options: Any) -> list[Call]:
    return [lambda: getattr(nn, kind)(*arguments, **options)(image(dims))]


def unpool(dims: int) -> list[Call]:
    pool, undo = getattr(nn, f"MaxPool{dims}d")(2, return_indices=True), getattr(nn, f"MaxUnpool{dims}d")(2)
    return [lambda: undo(*pool(image(dims)))]


def resized(mode: str, dims: int, **options: bool) -> Call:
    return lambda: interpolate(image(dims), scale_factor=2, mode=mode, **options)


def reduced(reduce: str) -> Call:
    return lambda: vector().scatter_reduce(0, INDEX, torch.ones(2), reduce)


def ctc_loss() -> Tensor:
    chances = torch.ones(5, 1, 4, requires_grad=True).log_softmax(-1)
    return nn.CTCLoss()(chances, torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([2]))


CALLS: Mapping[str, Sequence[Call]] = {
    **{f"torch.nn.Conv{dims}d": module(f"Conv{dims}d", dims, 2, 2, 3) for dims in (1, 2, 3)},
    **{f"torch.nn.ConvTranspose{dims}d": module(f"ConvTranspose{dims}d", dims, 2, 2, 3) for dims in (1, 2, 3)},
    **{f"torch.nn.ReplicationPad{dims}d": module(f"ReplicationPad{dims}d", dims, 1) for dims in (1, 2, 3)},
    **{f"torch.nn.ReflectionPad{dims}d": module(f"ReflectionPad{dims}d", dims, 1) for dims in (1, 2, 3)},
    **{f"torch.nn.MaxUnpool{dims}d": unpool(dims) for dims in (1, 2, 3)},
    "torch.nn.MaxPool3d": module("MaxPool3d", 3, 2),
    "torch.nn.AvgPool3d": module("AvgPool3d", 3, 2),
    "torch.nn.AdaptiveAvgPool2d": module("AdaptiveAvgPool2d", 2, 2),
    "torch.nn.AdaptiveAvgPool3d": module("AdaptiveAvgPool3d", 3, 2),
    "torch.nn.AdaptiveMaxPool2d": module("AdaptiveMaxPool2d", 2, 2),
    "torch.nn.FractionalMaxPool2d": module("FractionalMaxPool2d", 2, 2, output_size=2),
    "torch.nn.FractionalMaxPool3d": module("FractionalMaxPool3d", 3, 2, output_size=2),
    "torch.nn.NLLLoss": [lambda: nn.NLLLoss()(image(2), torch.zeros(1, 4, 4, dtype=torch.int64))],
    "torch.nn.CTCLoss": [ctc_loss],
    "torch.nn.EmbeddingBag": [lambda: nn.EmbeddingBag(5, 3, mode="max")(torch.tensor([[0, 1]]))],
    "torch.nn.functional.interpolate": [
        resized("linear", 1),
        resized("bilinear", 2),
        resized("bicubic", 2),
        resized("trilinear", 3),
        resized("bilinear", 2, antialias=True),
        resized("bicubic", 2, antialias=True),
    ],
    "torch.nn.functional.grid_sample": [
        lambda: grid_sample(image(2), torch.zeros(1, 2, 2, 2), align_corners=False),
        lambda: grid_sample(image(3), torch.zeros(1, 2, 2, 2, 3), align_corners=False),
    ],
    "torch.bmm": [lambda: torch.bmm(torch.ones(2, 3, 3).to_sparse(), torch.ones(2, 3, 3))],
    "torch.Tensor.__getitem__": [lambda: vector()[[0, 1]]],
    "torch.Tensor.index_put": [
        lambda: vector().index_put((INDEX,), torch.ones(2)),
        lambda: vector().index_put((INDEX,), torch.ones(2), accumulate=True),
    ],
    "torch.Tensor.put_": [
        lambda: torch.ones(4).put_(INDEX, torch.ones(2)),
        lambda: torch.ones(4).put_(INDEX, torch.ones(2), accumulate=True),
    ],
    "torch.Tensor.scatter_add_": [lambda: torch.ones(4).scatter_add_(0, INDEX, torch.ones(2))],
    "torch.gather": [lambda: vector().gather(0, INDEX)],
    "torch.index_add": [lambda: vector().index_add(0, INDEX, torch.ones(2))],
    "torch.index_select": [lambda: vector().index_select(0, INDEX)],
    "torch.repeat_interleave": [lambda: torch.ones(2, requires_grad=True).repeat_interleave(INDEX)],
    "torch.Tensor.index_copy": [lambda: vector().index_copy(0, INDEX, torch.ones(2))],
    "torch.Tensor.scatter": [lambda: vector().scatter(0, INDEX, torch.ones(2))],
    "torch.Tensor.scatter_reduce": [reduced("sum"), reduced("mean"), reduced("prod")],
    "torch.Tensor.resize_": [lambda: torch.ones(4).resize_(2)],
    "torch.histc": [lambda: torch.histc(torch.ones(4))],
    "torch.bincount": [lambda: torch.bincount(INDEX, torch.ones(2))],
    "torch.median": [lambda: torch.median(image(1), 0).values],
    "torch.cumsum": [lambda: vector().cumsum(0)],
}
"""Documented name -> calls that it speaks of, but for the device; a result that has a gradient is to be derived."""
