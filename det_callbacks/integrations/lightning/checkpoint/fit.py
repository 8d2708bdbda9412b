"""Reads the position of a fit from Lightning's loops, and what prevents an exact resume (2.6.6)."""

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint, GradientAccumulationScheduler, Timer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from det_callbacks.digest.components import digest_tensor
from det_callbacks.digest.host import format_digest
from det_callbacks.digest.unobserved import unobserved
from det_callbacks.errors import DetCallbacksError
from det_callbacks.integrations.lightning.trainer import find_generators
from det_callbacks.internals.lightning import (
    DataLoaderIterFetcher,
    combined_loader,
    data_fetcher,
    either,
    is_out_of_batches,
    should_validate,
)
from det_callbacks.internals.torch import left_out_of_state
from det_callbacks.settings.generators import Held

GRADIENT, BUFFER = "gradient ", "buffer "
"""Prefixes of the names of tensors saved next to a checkpoint."""


def is_epoch_over(trainer: pl.Trainer) -> bool:
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    return bool(epoch_loop.batch_progress.is_last_batch or is_out_of_batches(epoch_loop)())


def tensors_to_save(trainer: pl.Trainer) -> dict[str, torch.Tensor]:
    """Return accumulated gradients, and buffers of ranks above 0: Lightning saves only rank 0's."""
    module, num_batches = (
        trainer.lightning_module,
        trainer.fit_loop.epoch_loop.batch_progress.current.ready,
    )
    found: dict[str, torch.Tensor] = {}
    # gradients of an epoch's last batches are zeroed before the next epoch
    if not module.automatic_optimization or num_batches % trainer.accumulate_grad_batches:
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                found[GRADIENT + name] = local_part(parameter.grad)
    if trainer.global_rank:
        left_out = _non_persistent(module)
        for name, buffer in module.named_buffers():
            if name not in left_out and not isinstance(buffer, DTensor):
                found[BUFFER + name] = buffer
    with unobserved():  # a checkpoint may be saved inside a step
        return {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in found.items()
        }


def values(trainer: pl.Trainer) -> dict[str, Any]:
    """Return what a checkpoint must restore, by name; takes one pass over the weights."""
    module = trainer.lightning_module
    left_out = _non_persistent(module)
    buffers = () if trainer.global_rank else module.named_buffers()
    found: dict[str, Any] = {"accumulate_grad_batches": trainer.accumulate_grad_batches}
    with unobserved():
        for name, tensor in (*module.named_parameters(), *buffers):
            if name not in left_out:
                is_plain = tensor.layout is torch.strided and not isinstance(tensor, DTensor)
                if is_plain and not tensor.is_contiguous():
                    text = (
                        f"the memory layout of {name} (checkpoints do not save it: use "
                        "contiguous())"
                    )
                    found[text] = list(tensor.stride())
                try:
                    found[name] = format_digest(digest_tensor(tensor.detach()))
                except DetCallbacksError:
                    found[name] = None  # gathered; freed until its next use
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    found["the list of frozen parameters"] = frozen
    restored = [scheduler.optimizer for scheduler in plateaus(trainer).values()]
    for index, optimizer in enumerate(trainer.optimizers):
        for number, group in enumerate(optimizer.param_groups):
            for option, value in group.items():
                if option != "params" and not (option == "lr" and optimizer in restored):
                    # dcp checkpoints turn tuples into lists
                    text = repr(value).translate(str.maketrans("()", "[]"))
                    found[f"{option} of group {number} of optimizer {index}"] = text
    return found


def saved_states(trainer: pl.Trainer) -> dict[str, str]:
    """Return the states of callbacks and schedulers as text,
    except those that are restored or save checkpoints.
    """
    states = {
        f"state of {callback.state_key}": callback.state_dict()
        for callback in vars(trainer)["callbacks"]
        if not isinstance(callback, either(Checkpoint, Timer))
    }
    restored = plateaus(trainer)
    for index, config in enumerate(trainer.lr_scheduler_configs):
        if str(index) not in restored:
            states[f"state of scheduler {index}"] = config.scheduler.state_dict()
    return {name: repr(state) for name, state in states.items()}


def plateaus(trainer: pl.Trainer) -> dict[str, ReduceLROnPlateau]:
    """Return each ReduceLROnPlateau by index; Lightning saves before it
    updates them at an epoch's end.
    """
    return {
        str(index): config.scheduler
        for index, config in enumerate(trainer.lr_scheduler_configs)
        if isinstance(config.scheduler, ReduceLROnPlateau)
        and not any(
            isinstance(group["lr"], torch.Tensor)
            for group in config.scheduler.optimizer.param_groups
        )
    }


def generators(trainer: pl.Trainer) -> dict[str, Held]:
    roots: dict[str, Any] = {
        "module": trainer.lightning_module,
        "datamodule": getattr(trainer, "datamodule", None),
    }
    roots |= {
        f"train_dataloader[{index}]": loader for index, loader in enumerate(_loaders(trainer))
    }
    for one in vars(trainer)["callbacks"]:
        roots.setdefault(f"callback {type(one).__qualname__}", []).append(one)
    return find_generators(roots)


def problems(trainer: pl.Trainer) -> Iterator[str]:
    loop, loaders = trainer.fit_loop, _loaders(trainer)
    batches: Any = loop.epoch_loop.batch_progress  # declared type lacks attributes
    epochs: Any = loop.epoch_progress.current
    fetcher = data_fetcher(loop)
    validated = loop.epoch_loop.val_loop.batch_progress
    if trainer.world_size > 1 and not isinstance(
        trainer.strategy, either(DDPStrategy, ModelParallelStrategy)
    ):
        name = type(trainer.strategy).__name__
        yield (
            f"det_callbacks does not know the state of {name} on each rank; use DDPStrategy or "
            "ModelParallelStrategy"
        )
    draws_itself = isinstance(fetcher, either(DataLoaderIterFetcher))
    is_made_again = getattr(trainer, "reload_dataloaders_every_n_epochs", False)
    if not draws_itself and fetcher is not None and fetcher.length is None:
        yield (
            "its training data has no length, so Lightning prefetches a batch; give the data set a "
            "__len__"
        )
    if any(getattr(one, "persistent_workers", False) for one in loaders):
        yield (
            "persistent_workers=True keeps generators in workers, which cannot be saved; use "
            "persistent_workers=False"
        )
    has_own_place = any(
        type(one) is not DataLoader and hasattr(one, "load_state_dict") for one in loaders
    )
    if draws_itself or is_made_again or has_own_place or len(loaders) > 1:
        yield (
            "its training data is not a single DataLoader of torch that is made once and iterated "
            "by Lightning; several loaders, dataloader_iter, load_state_dict of a loader and "
            "reload_dataloaders_every_n_epochs are not supported"
        )
    if any(
        isinstance(callback, either(GradientAccumulationScheduler))
        for callback in vars(trainer)["callbacks"]
    ):
        yield "GradientAccumulationScheduler is not supported; use accumulate_grad_batches"
    if batches.total.started < min(batches.total.ready, batches.total.processed):
        yield "on_train_batch_start returned -1 before, so Lightning's batch counts disagree"
    is_validated = (
        validated.is_last_batch and validated.current.ready == validated.current.completed
    )
    is_in_epoch_start, is_in_validation = (
        epochs.ready > epochs.started,
        trainer.validating and not is_validated,
    )
    if is_in_epoch_start or is_in_validation or batches.current.ready > batches.current.processed:
        place = f"step {batches.total.processed}, a validation, or the epoch-start hooks"
        yield (
            f"it was saved in the middle of {place}; save at the end of a batch, a validation or "
            "an epoch"
        )


def has_more_to_come(trainer: pl.Trainer) -> bool:
    """Return whether a validation, epoch end or plateau update, which a
    resume skips, is still pending.
    """
    loop, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress.current
    epochs: Any = loop.epoch_progress.current
    has_plateau = any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)
    fetcher: Any = None if trainer.validating or trainer.sanity_checking else data_fetcher(loop)
    is_at_end = fetcher is not None and batches.completed < batches.ready
    if is_at_end and (has_plateau or should_validate(loop.epoch_loop)(fetcher)):
        return True
    num_ended = epochs.completed if has_plateau else epochs.processed
    return is_epoch_over(trainer) and bool(epochs.started > num_ended)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _loaders(trainer: pl.Trainer) -> list[Any]:
    loader = combined_loader(trainer.fit_loop)
    return [] if loader is None else list(loader.flattened)


def _non_persistent(module: torch.nn.Module) -> set[str]:
    """Return the names of buffers that state_dict omits."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, one in module.named_modules()
        for name in left_out_of_state(one)
    }
