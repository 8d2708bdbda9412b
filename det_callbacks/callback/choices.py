"""What was chosen for a run, as the Trainer, the module and the optimizers say it."""

from collections.abc import Sequence
from typing import Any


def trainer_choices(trainer: Any, module: Any) -> dict[str, Any]:
    """Return what a Lightning Trainer and its module say was chosen for a run, for ``capture_environment``.

    Args:
        trainer: a ``lightning.pytorch.Trainer``; this module does not import Lightning.
        module: its LightningModule.
    """
    algorithm = trainer.gradient_clip_algorithm
    return {
        "trainer": {
            "precision": str(trainer.precision),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": None if algorithm is None else str(algorithm),
            "strategy": type(trainer.strategy).__name__,
            "accelerator": type(trainer.accelerator).__name__,
            "world_size": trainer.world_size,
            "limit_train_batches": trainer.limit_train_batches,
            "overfit_batches": trainer.overfit_batches,
            **_validation_choices(trainer),
        },
        "hparams": dict(module.hparams),
        **_optimizer_choices(trainer.optimizers),
    }


def _validation_choices(trainer: Any) -> dict[str, Any]:
    """Return when a fit validates, and with how much: a validation may draw what the training then does not get.

    Nothing where it has no data to validate with: nothing changes then.
    """
    # as Trainer.enable_validation has it, Lightning 2.6.6, which says no where the limit is 0
    if not trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined():
        return {}
    names = ("limit_val_batches", "val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps")
    return {name: getattr(trainer, name) for name in names}


def _optimizer_choices(optimizers: Sequence[Any]) -> dict[str, Any]:
    """Return the options of each optimizer, as they are now, and those of further groups that differ from them."""
    choices: dict[str, Any] = {}
    for index, optimizer in enumerate(optimizers):
        groups = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        others = {
            f"group {number}": {name: value for name, value in group.items() if value is not groups[0].get(name)}
            for number, group in enumerate(groups[1:], start=1)
        }
        name = type(optimizer).__name__ if len(optimizers) == 1 else f"{index}.{type(optimizer).__name__}"
        choices[f"optimizer.{name}"] = {**groups[0], **others}
    return choices
