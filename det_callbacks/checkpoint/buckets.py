"""The buckets in which DDP adds up the gradients of the ranks: read when a checkpoint is saved, made again on resume.

A new DDP begins with one bucket and makes others after its first backward pass, from the order in which the gradients
came. Gloo and NCCL add a bucket up in pieces, each beginning with another rank, so that with three ranks and more the
first step after a resume would have other bits than the same step of the uninterrupted run; and at level op its
collectives would be others with any number of ranks.
"""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

Buckets = tuple[tuple[str, ...], ...]
"""Names of the parameters in each."""


class GradientBuckets:
    """The buckets of the DDP module of one fit.

    Reads and makes them by private names of DDP, looked at in torch 2.13, which are used nowhere else:
    ``_build_params_for_reducer``, whose order numbers the parameters; ``logger`` and ``_get_ddp_logging_data``, with
    what they say of the first iterations; and of the reducer ``_autograd_hook``, which each gradient calls when it is
    there, ``_rebuild_buckets``, which DDP calls before the next forward pass, and ``_get_zeros_like_grad_buckets``.
    Making them adds up zeros of the size of the gradients once.

    Args:
        trainer: whose strategy it is.

    Attributes:
        wanted: buckets that a new DDP module begins with, before its first step; empty for its own.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.wanted: Buckets = ()
        self._trainer = trainer

    @property
    def is_ddp(self) -> bool:
        """Whether the strategy uses DDP, on several ranks."""
        return isinstance(self._trainer.strategy, DDPStrategy) and self._trainer.world_size > 1

    def problem(self) -> str | None:
        """Return why what the strategy keeps on each rank cannot be saved; None where it can."""
        ddp = self._ddp()
        strategy: Any = self._trainer.strategy
        if ddp is None:
            return None
        if strategy._ddp_comm_state is not None:
            return "the communication hook of DDP has a state, which nobody saves"
        if ddp.static_graph:
            return "DDP(static_graph=True) adds gradients up in another way in the first step of a process"
        # asked in this order: reading the buckets has DDP note what it says of its first step
        is_first = not ddp.find_unused_parameters and not self.read()
        if is_first and ddp._get_ddp_logging_data().get("prev_iteration_grad_ready_order_indices"):
            return "DDP was about to put the gradients in other buckets, as in its second step; save after that step"
        return None

    def make(self) -> str:
        """Let a new DDP module have the buckets that are wanted; return why it cannot, "" where it has them."""
        ddp = self._ddp()
        if ddp is None or not self.wanted or _make(ddp, _names(ddp), self.wanted) == self.wanted:
            return ""
        return (
            "DDP puts the gradients in other buckets than it did then: freeze the same parameters, and give "
            "it the same bucket_cap_mb"
        )

    def syncs_buffers(self) -> bool:
        """Return whether DDP's next forward pass sends rank 0's buffers to the others."""
        ddp = self._ddp()
        return ddp is None or bool(ddp.require_forward_param_sync)

    def restore_sync(self, syncs_buffers: bool) -> None:
        """Let DDP's next forward pass send rank 0's buffers, or not, as it was going to."""
        ddp = self._ddp()
        if ddp is not None:
            ddp.require_forward_param_sync = syncs_buffers

    def _ddp(self) -> DistributedDataParallel | None:
        model = self._trainer.strategy.model
        return model if self.is_ddp and isinstance(model, DistributedDataParallel) else None

    def read(self) -> Buckets:
        """Return the buckets that DDP made after its first step; none before, or where it keeps those of its start."""
        ddp = self._ddp()
        if self.wanted or ddp is None or ddp.find_unused_parameters:
            return self.wanted
        told: Any = ddp._get_ddp_logging_data()
        if not told.get("has_rebuilt_buckets"):
            logger: Any = ddp.logger
            logger.set_runtime_stats_and_log()  # else it says so a forward pass later
            told = ddp._get_ddp_logging_data()
        if not told.get("has_rebuilt_buckets"):
            return ()
        names, text = _names(ddp), told["rebuilt_per_bucket_param_indices"]
        return tuple(tuple(names[int(index)] for index in bucket.split()) for bucket in text.split(","))


def _names(ddp: DistributedDataParallel) -> list[str]:
    """Return the names of the parameters whose gradients are added up, in the order of DDP's indices."""
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    parameters, _ = ddp._build_params_for_reducer()
    return [names[id(parameter)] for parameter in parameters]


def _make(ddp: Any, names: list[str], wanted: Buckets) -> Buckets:
    """Let a new DDP module see a backward pass of zeros, whose gradients come in the order that they came in.

    Returns:
        The buckets that it made; none where it has other parameters.
    """
    order = [name for bucket in wanted for name in bucket]
    if sorted(order) != sorted(names):
        return ()
    reducer, number = ddp.reducer, {name: index for index, name in enumerate(names)}
    begin = torch.zeros((), requires_grad=True)
    end = begin * 1
    # its last act is a callback of the engine's, which exists in a backward pass only
    end.register_hook(lambda _: [reducer._autograd_hook(number[name]) for name in order] and None)
    reducer.prepare_for_backward([])
    end.backward()
    ddp.module.zero_grad(set_to_none=True)
    reducer._rebuild_buckets()
    name_of = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    made = reducer._get_zeros_like_grad_buckets()
    return tuple(tuple(name_of[id(parameter)] for parameter in bucket.parameters()) for bucket in made)
