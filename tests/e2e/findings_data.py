"""Data of trainings that repeat what they should not: samplers, iterators
and workers; and attention.
"""

from collections.abc import Iterator
from typing import Any

import torch
from fits import Samples
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    get_worker_info,
)


class WithEpoch(Sampler[int]):
    """Shuffles by a seed and the epoch, which it leaves out where it forgets it."""

    def __init__(self, *, forgets: bool) -> None:
        self.epoch, self.forgets = 0, forgets

    def set_epoch(self, epoch: int) -> None:
        self.epoch = 0 if self.forgets else epoch

    def __len__(self) -> int:
        return 32

    def __iter__(self) -> Iterator[int]:
        return iter(
            torch.randperm(32, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        )


class Stuck(IterableDataset[Any]):
    """Yields eight batches; once stuck, the last one again and again."""

    def __init__(self, stuck_at: int) -> None:
        self.batches = [
            *DataLoader(
                TensorDataset(
                    *(
                        tensor.repeat(2, *[1] * (tensor.dim() - 1))
                        for tensor in (
                            torch.arange(384.0).reshape(32, 12).sin(),
                            torch.arange(32) % 3,
                        )
                    )
                ),
                batch_size=8,
            )
        ]
        for at, batch in enumerate(self.batches):
            batch[0].add_(at)
        self.stuck_at = stuck_at

    def __iter__(self) -> Iterator[Any]:
        return (self.batches[min(at, self.stuck_at)] for at in range(8))


class Mine(RandomSampler):
    """A sampler of one's own, which derives from torch's."""


class FromProcess(Sampler[int]):
    """Shuffles with torch's generator, or always in one order."""

    def __init__(self, *, shuffles: bool) -> None:
        self.shuffles = shuffles

    def __len__(self) -> int:
        return 32

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(
            32, generator=None if self.shuffles else torch.Generator().manual_seed(0)
        )
        return iter(order.tolist())


class OfWorkers(IterableDataset[Any]):
    def __init__(self, *, shares: bool, number: int) -> None:
        self.shares, self.number = shares, number

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        samples = [*Samples(), *((inputs + 1, label) for inputs, label in Samples())][: self.number]
        return iter(samples[worker.id :: worker.num_workers] if self.shares else samples)


def of_workers(*, shares: bool, number: int = 64) -> DataLoader[Any]:
    return DataLoader(OfWorkers(shares=shares, number=number), batch_size=4, num_workers=2)


def in_batches(sampler: Sampler[int]) -> DataLoader[Any]:
    return DataLoader(Samples(), batch_sampler=BatchSampler(sampler, batch_size=8, drop_last=False))


def twice(**options: Any) -> DataLoader[Any]:
    """A loader whose sampler draws each batch twice."""
    order = [at for first in range(0, 32, 4) for at in [*range(first, first + 4)] * 2]
    return DataLoader(Samples(), batch_size=4, sampler=order, **options)


def without_dropout(inputs: Tensor) -> Tensor:
    """Attention whose op may draw, and does not; of one head of four tokens."""
    heads = inputs.reshape(len(inputs), 1, 4, -1)
    return scaled_dot_product_attention(heads, heads, heads).reshape(inputs.shape)
