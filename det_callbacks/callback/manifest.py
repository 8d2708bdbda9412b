"""What run.json says of a fit, and what was chosen for it, as the Trainer, the module and the optimizers say it."""

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import msgspec
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from det_callbacks.callback.arguments import CallbackArguments
from det_callbacks.environment import capture_environment, command_choice
from det_callbacks.runs.environment import OPTIMIZER
from det_callbacks.settings import settings_in_force


def manifest_of(
    trainer: pl.Trainer, pl_module: pl.LightningModule, arguments: CallbackArguments, choices: Mapping[str, Any]
) -> dict[str, Any]:
    """Return selection, settings, environment and patterns of a fit; ``choices`` are further ones."""
    allow = [] if arguments.settings is None else list(arguments.settings.allow)
    chosen: dict[str, Any] = {"trainer": _trainer_choices(trainer), "hparams": dict(pl_module.hparams)}
    chosen |= optimizer_choices(trainer.optimizers)
    # the classes of the learning rate schedulers, and when each is stepped
    schedulers = [f"{type(one.scheduler).__name__} each {one.interval}" for one in trainer.lr_scheduler_configs]
    chosen["optimizer.lr_scheduler"] = ", ".join(schedulers) or "none"
    chosen |= {**command_choice(), **choices, "settings": {"allow": allow}}
    return {
        "selection": arguments.selection.to_dict(),
        "settings": {**settings_in_force(), "allow": allow},
        "environment": msgspec.to_builtins(capture_environment(choices=chosen)),
        "replay": list(arguments.replay),
        "keep_tensors": list(arguments.keep_tensors),
    }


def _trainer_choices(trainer: pl.Trainer) -> dict[str, Any]:
    names = ["accumulate_grad_batches", "gradient_clip_val", "world_size", "limit_train_batches", "overfit_batches"]
    names += ["min_epochs", "max_epochs", "min_steps", "max_steps"]
    # A validation may draw what the training then does not get. Nothing changes where it has no data to validate with,
    # as Trainer.enable_validation has it, Lightning 2.6.6, which says no where the limit is 0.
    if trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined():
        names += ["limit_val_batches", "val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps"]
    algorithm = trainer.gradient_clip_algorithm
    choices = {name: getattr(trainer, name) for name in names}
    choices |= {name: type(getattr(trainer, name)).__name__ for name in ("strategy", "accelerator")}
    choices |= {"precision": str(trainer.precision), "gradient_clip_algorithm": algorithm and str(algorithm)}
    return choices


def optimizer_choices(optimizers: Sequence[Any]) -> dict[str, Any]:
    """Return the classes of the optimizers, and the options of each group as they are now."""
    choices: dict[str, Any] = {OPTIMIZER: ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"}
    for index, optimizer in enumerate(optimizers):
        groups = [
            # a scheduler leaves initial_lr there, and is a choice of its own
            {name: value for name, value in group.items() if name not in ("params", "initial_lr")}
            for group in optimizer.param_groups
        ]
        others = {f"group {number}": group for number, group in enumerate(groups[1:], start=1)}
        name = type(optimizer).__name__ if len(optimizers) == 1 else f"{index}.{type(optimizer).__name__}"
        choices[f"optimizer.{name}"] = {**groups[0], **others}
    return choices


def replicated_weights(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Tensor] | None:
    """Return the parameters and buffers that are to be equal on all ranks; None where the strategy does not say so."""
    if not isinstance(trainer.strategy, DDPStrategy):
        return None
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))  # as DDP calls it, torch 2.13
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor for name, tensor in tensors.items() if name not in ignored}
