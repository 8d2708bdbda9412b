"""Four things that go wrong on one rank, or between ranks, and that neither the loss nor the
accuracy would show.
"""

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Sampler


class Shard(Sampler[int]):
    """A rank's share of shuffled samples; at one step it draws what would
    come a batch later instead.
    """

    def __init__(
        self, *, size: int, rank: int, world_size: int, batch_size: int, wrong_step: int | None
    ) -> None:
        order = torch.randperm(size, generator=torch.Generator().manual_seed(0)).tolist()
        self.samples = order[rank::world_size][: size // world_size // batch_size * batch_size]
        if wrong_step is not None:
            begin, end = wrong_step * batch_size, (wrong_step + 1) * batch_size
            self.samples[begin:end] = self.samples[begin + batch_size : end + batch_size]

    def __iter__(self) -> Iterator[int]:
        return iter(self.samples)

    def __len__(self) -> int:
        return len(self.samples)


def add_one_ulp(tensor: Tensor) -> None:
    """Make the first element one unit in the last place larger."""
    first = tensor.detach().view(-1)[:1]
    first.copy_(torch.nextafter(first, torch.full_like(first, torch.inf)))


class WrongKernel(TorchDispatchMode):
    """A kernel that goes wrong on one rank: in the backward pass of one step,
    one element of a gradient.

    Like the other mode below it is open around the whole training, below the callback's trace, so
    that to the trace it is the op itself that returned other bits.
    """

    def __init__(self, model: pl.LightningModule, *, rank: int, step: int) -> None:
        super().__init__()
        self.model, self.rank, self.step = model, rank, step
        self.is_done = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        is_due = self.model.global_step == self.step and self.model.global_rank == self.rank
        if func is torch.ops.aten.convolution_backward.default and is_due and not self.is_done:
            self.is_done = True
            add_one_ulp(outputs[1])  # of the weight
        return outputs


class OtherOrder(TorchDispatchMode):
    """An all-reduce that adds the ranks in another order from one step on,
    as another algorithm or topology does.

    Two numbers have one sum, so it takes three ranks.
    """

    def __init__(self, model: pl.LightningModule, *, step: int) -> None:
        super().__init__()
        self.model, self.step = model, step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.allreduce_.default and self.model.global_step >= self.step:
            for tensor in args[0]:
                parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, tensor)
                total = sum(reversed(parts[:-1]), start=parts[-1])
                # added to nothing from the others, it arrives everywhere as it is
                tensor.copy_(total if dist.get_rank() == 0 else torch.zeros_like(total))
        return func(*args, **(kwargs or {}))


class WrongWeights(pl.Callback):
    """A bit that flips in the memory of one rank, after the optimizer's update of one step."""

    def __init__(self, *, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.step + 1:
            with no_dispatch():  # no op is to blame
                add_one_ulp(pl_module.net.head.weight)
