"""The buckets in which DDP adds up the gradients of the ranks: read when a checkpoint is saved, made again on resume.

A new DDP begins with one bucket and makes others after its first backward pass, from the order in which the gradients
came. Gloo and NCCL add a bucket up in pieces, each beginning with another rank, so that with three ranks and more the
first step after a resume would have other bits than the same step of the uninterrupted run; and at level op its
collectives would be others with any number of ranks.

All by private names of DDP, looked at in torch 2.13: ``_build_params_for_reducer``, whose order numbers the parameters;
``logger`` and ``_get_ddp_logging_data``, with what they say of the first iterations; and of the reducer
``_autograd_hook``, which each gradient calls when it is there, ``_rebuild_buckets``, which DDP calls before the next
forward pass, and ``_get_zeros_like_grad_buckets``.
"""

from typing import Any

import lightning.pytorch as pl
import torch
from torch.nn.parallel import DistributedDataParallel

Buckets = tuple[tuple[str, ...], ...]
"""Names of the parameters in each."""


class GradientBuckets:
    """The buckets of the DDP module of one fit, if it has one."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self.wanted: Buckets = ()  # that a new DDP module begins with, before its first step; empty for its own
        self._trainer = trainer

    @property
    def ddp(self) -> Any:
        """The DDP module; None with another strategy, and before it is set up."""
        model = self._trainer.strategy.model
        return model if isinstance(model, DistributedDataParallel) else None

    def problem(self) -> str | None:
        """Return why what DDP keeps on each rank cannot be saved; None where it can."""
        ddp, strategy = self.ddp, self._trainer.strategy
        if ddp is None:
            return None
        if ddp.static_graph or getattr(strategy, "_ddp_comm_state", None) is not None:
            return "DDP(static_graph=True) and communication hooks with a state keep what nobody saves; leave them out"
        # asked in this order: reading the buckets has DDP note what it says of its first step
        is_first = not ddp.find_unused_parameters and not self.read()
        if is_first and ddp._get_ddp_logging_data().get("prev_iteration_grad_ready_order_indices"):
            return "DDP was about to put the gradients in other buckets, as in its second step; save after that step"
        return None

    def read(self) -> Buckets:
        """Return the buckets that DDP made after its first step; none before, or where it keeps those of its start."""
        ddp = self.ddp
        if self.wanted or ddp is None or ddp.find_unused_parameters:
            return self.wanted
        if not ddp._get_ddp_logging_data().get("has_rebuilt_buckets"):
            ddp.logger.set_runtime_stats_and_log()  # else it says so a forward pass later
        told = ddp._get_ddp_logging_data()
        if not told.get("has_rebuilt_buckets"):
            return ()
        names, text = _names(ddp), told["rebuilt_per_bucket_param_indices"]
        return tuple(tuple(names[int(index)] for index in bucket.split()) for bucket in text.split(","))

    def make(self) -> str:
        """Let a new DDP module have the buckets that are wanted; return why it cannot, "" where it has them.

        It sees a backward pass of zeros, of the size of the gradients, which come in the order that they came in.
        """
        ddp = self.ddp
        if ddp is None or not self.wanted:
            return ""
        order = [name for bucket in self.wanted for name in bucket]
        number = {name: index for index, name in enumerate(_names(ddp))}
        made: Buckets = ()
        if sorted(order) == sorted(number):
            begin = torch.zeros((), requires_grad=True)
            end = begin * 1
            # its last act is a callback of the engine's, which exists in a backward pass only
            end.register_hook(lambda _: [ddp.reducer._autograd_hook(number[name]) for name in order] and None)
            ddp.reducer.prepare_for_backward([])
            end.backward()
            ddp.module.zero_grad(set_to_none=True)
            ddp.reducer._rebuild_buckets()
            names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
            buckets = ddp.reducer._get_zeros_like_grad_buckets()
            made = tuple(tuple(names[id(parameter)] for parameter in bucket.parameters()) for bucket in buckets)
        if made == self.wanted:
            return ""
        return (
            "DDP puts the gradients in other buckets than it did then: freeze the same parameters, and give "
            "it the same bucket_cap_mb"
        )


def _names(ddp: Any) -> list[str]:
    """Return the names of the parameters whose gradients are added up, in the order of DDP's indices."""
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    return [names[id(parameter)] for parameter in ddp._build_params_for_reducer()[0]]
