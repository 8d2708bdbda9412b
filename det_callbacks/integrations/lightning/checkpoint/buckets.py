"""DDP's gradient buckets, read when a checkpoint is saved and rebuilt on resume.

A new DDP starts with one bucket, and rebuilds its buckets after the first backward pass. Different
buckets add in a different order, which changes the bits of sums over three or more ranks.
"""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from det_callbacks.internals.lightning import ddp_hook_state, either
from det_callbacks.internals.torch import (
    ddp_facts,
    ddp_parameters,
    gradient_buckets,
    mark_gradient,
    rebuild_buckets,
)

Buckets = tuple[tuple[str, ...], ...]
"""Names of the parameters in each bucket."""


def ddp_of(trainer: pl.Trainer) -> Any:
    model = trainer.strategy.model
    return model if isinstance(model, DistributedDataParallel) else None


def problem(trainer: pl.Trainer, wanted: Buckets) -> str | None:
    """Return why the state of DDP cannot be saved, or None if it can."""
    ddp = ddp_of(trainer)
    if ddp is None:
        return None
    if ddp.static_graph or _has_hook_state(trainer.strategy):
        return "DDP(static_graph=True) and communication hooks with a state keep unsaved state; omit them"
    # in this order: reading the buckets makes DDP log its first step
    is_first = not ddp.find_unused_parameters and not read(ddp, wanted)
    if is_first and ddp_facts(ddp).get("prev_iteration_grad_ready_order_indices"):
        return "DDP was about to rebuild its buckets, as in its second step; save after that step"
    return None


def read(ddp: Any, wanted: Buckets) -> Buckets:
    """Return the buckets that DDP rebuilt after its first step, or got from ``make``."""
    if wanted or ddp is None or ddp.find_unused_parameters:
        return wanted
    if not ddp_facts(ddp).get("has_rebuilt_buckets"):
        ddp.logger.set_runtime_stats_and_log()  # else DDP reports them a forward pass later
    told, names = ddp_facts(ddp), _names(ddp)
    buckets = told["rebuilt_per_bucket_param_indices"].split(",") if told.get("has_rebuilt_buckets") else ()
    return tuple(tuple(names[int(index)] for index in bucket.split()) for bucket in buckets)


def make(ddp: Any, wanted: Buckets) -> str:
    """Give a new DDP module these buckets; return why that is impossible, or "".

    It runs a backward pass of zeros, whose gradients become ready in their old order.
    """
    if ddp is None or not wanted:
        return ""
    order = [name for bucket in wanted for name in bucket]
    number = {name: index for index, name in enumerate(_names(ddp))}
    made: Buckets = ()
    if sorted(order) == sorted(number):
        end = torch.zeros((), requires_grad=True) * 1
        # the rebuild needs the autograd engine, so it runs in a backward pass
        end.register_hook(lambda _: [mark_gradient(ddp.reducer, number[name]) for name in order] and None)
        ddp.reducer.prepare_for_backward([])
        end.backward()
        ddp.module.zero_grad(set_to_none=True)
        rebuild_buckets(ddp.reducer)
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        buckets = gradient_buckets(ddp.reducer)
        made = tuple(tuple(names[id(parameter)] for parameter in bucket.parameters()) for bucket in buckets)
    if made == wanted:
        return ""
    return (
        "DDP puts the gradients in different buckets than before: freeze the same parameters, and give it the same "
        "bucket_cap_mb"
    )


def _has_hook_state(strategy: Any) -> bool:
    return isinstance(strategy, either(DDPStrategy)) and ddp_hook_state(strategy) is not None


def _names(ddp: Any) -> list[str]:
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    return [names[id(parameter)] for parameter in ddp_parameters(ddp)[0]]
