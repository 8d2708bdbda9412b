"""What a rank has of its own, and Lightning's checkpoint has of rank 0 alone."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from det_callbacks.callback.reduction import GradientBuckets
from det_callbacks.digest import digest_bytes, format_digest

_BY_RANK = "state of Timer"
"""Callbacks whose state is measured on each rank and decides no bit of a step."""

_PLACES = re.compile(r", device='[^']*'|0x[0-9a-f]+")
"""What the text of a state says of the process that it is in."""


class RankState:
    """Reads what one rank of a fit has of its own; one process alone has nothing.

    Args:
        trainer: whose fit it is.

    Attributes:
        buckets: of its gradients, under DDP.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.buckets = GradientBuckets(trainer)
        self._trainer = trainer

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the persistent buffers of a rank other than 0, by name: Lightning saves those of rank 0.

        DDP makes them equal before the next forward pass, or not at all; what is sharded is saved by the strategy.
        """
        if self._trainer.global_rank == 0:
            return {}
        module = self._trainer.lightning_module
        left_out = non_persistent(module)
        return {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in module.named_buffers()
            if name not in left_out and not isinstance(tensor, DTensor)
        }

    def common(self, callback_states: Mapping[str, str]) -> dict[str, str]:
        """Return digests, by name, of what is saved by rank 0 alone and put back on all ranks."""
        trainer = self._trainer
        if trainer.world_size == 1:
            return {}
        texts = {name: text for name, text in callback_states.items() if not name.startswith(_BY_RANK)}
        for index, config in enumerate(trainer.lr_scheduler_configs):
            texts[f"state of scheduler {index}"] = repr(config.scheduler.state_dict())
        return {name: format_digest(digest_bytes(_PLACES.sub("", text).encode())) for name, text in texts.items()}

    def problems(self, loaders: Sequence[Any]) -> Iterator[str]:
        """Yield why what this rank has cannot be saved."""
        trainer, strategy = self._trainer, self._trainer.strategy
        if trainer.world_size == 1:
            return
        if not isinstance(strategy, DDPStrategy | ModelParallelStrategy):
            yield (
                f"what {type(strategy).__name__} keeps on each rank is not known; DDPStrategy and "
                "ModelParallelStrategy are"
            )
        if any(map(is_stateful, loaders)):
            yield "its loaders restore themselves (load_state_dict), and Lightning saves the state of rank 0's alone"
        if (problem := self.buckets.problem()) is not None:
            yield problem
        for name, parameter in trainer.lightning_module.named_parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and (
                not isinstance(parameter, DTensor) or gradient.placements != parameter.placements
            ):
                yield f"the gradient of {name} is not sharded as its parameter is"

    def sampler_seeds(self, loaders: Sequence[Any]) -> tuple[int | None, ...]:
        """Return, for each loader, the seed by which all ranks shuffle alike; None where nothing deals samples out."""
        return tuple(None if (sampler := _sampler(loader)) is None else sampler.seed for loader in loaders)

    def put_sampler_seeds(self, loaders: Sequence[Any], seeds: Sequence[int | None]) -> None:
        """Let loaders that were just made deal out as they did; Lightning seeds them with the launch's seed."""
        for loader, seed in zip(loaders, seeds, strict=False):
            if seed is not None and (sampler := _sampler(loader)) is not None:
                sampler.seed = seed


def _sampler(loader: Any) -> DistributedSampler[Any] | None:
    """Return what deals the samples of a loader out to the ranks."""
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    candidates = (getattr(loader, "sampler", None), inner)
    return next((one for one in candidates if isinstance(one, DistributedSampler)), None)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor: its shard, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def non_persistent(module: torch.nn.Module) -> set[str]:
    """Return the names of buffers that no state_dict has."""
    return {  # a private name of torch 2.13, and the only one for it
        f"{prefix}.{name}" if prefix else name
        for prefix, one in module.named_modules()
        for name in one._non_persistent_buffers_set
    }


def is_stateful(loader: Any) -> bool:
    """Return whether a loader restores its own position, through Lightning."""
    return type(loader) is not DataLoader and hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
