"""Every private name of Lightning that is used: what for, and what is lost without it.

All are there in Lightning 2.5 to 2.6.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from det_callbacks.errors import UnsupportedVersionError
from det_callbacks.internals.names import RECORDING, PrivateNames
from det_callbacks.internals.torch import TORCH

LIGHTNING = PrivateNames("lightning")

# Classes.

if TYPE_CHECKING:
    from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher, _PrefetchDataFetcher
    from lightning.pytorch.loops.loop import _Loop
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

    DataLoaderIterFetcher = _DataLoaderIterDataFetcher
    PrefetchFetcher = _PrefetchDataFetcher
    Loop = _Loop
    WrappingCheckpointIO = _WrappingCheckpointIO
    MultiProcessingLauncher = _MultiProcessingLauncher
else:
    DataLoaderIterFetcher = LIGHTNING.needed_class(
        "lightning.pytorch.loops.fetchers._DataLoaderIterDataFetcher", "a training step that draws batches itself"
    )
    PrefetchFetcher = LIGHTNING.needed_class(
        "lightning.pytorch.loops.fetchers._PrefetchDataFetcher", "what draws batches ahead"
    )
    Loop = LIGHTNING.needed_class("lightning.pytorch.loops.loop._Loop", "the class of loops")
    WrappingCheckpointIO = LIGHTNING.needed_class(
        "lightning.pytorch.plugins.io.wrapper._WrappingCheckpointIO", "what writes checkpoints by way of another"
    )
    MultiProcessingLauncher = LIGHTNING.needed_class(
        "lightning.pytorch.strategies.launchers._MultiProcessingLauncher", "processes that give nothing back"
    )

# Of the Trainer and its strategy.

checkpoint_connector = LIGHTNING.of_instance(
    "lightning.pytorch.Trainer._checkpoint_connector", "restores strategies that shard after the fit has begun"
)
RESTORE = LIGHTNING.name_of(
    "lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector._restore_modules_and_callbacks",
    "the method that does so",
)
results = LIGHTNING.of_instance("lightning.pytorch.Trainer._results", "what was logged in a validation or a test")
logger_connector = LIGHTNING.of_instance(
    "lightning.pytorch.Trainer._logger_connector", "has the values of what was logged"
)
callback_metrics = LIGHTNING.of_instance(
    "_LoggerConnector._callback_metrics", "the values; Trainer.callback_metrics may compute them, by a collective"
)
progress_bar_metrics = LIGHTNING.of_instance("_LoggerConnector._progress_bar_metrics", "the same of the progress bar")
name_of_result: Callable[..., Any] = LIGHTNING.needed(
    "lightning.pytorch.trainer.connectors.logger_connector.result._ResultCollection._forked_name",
    "the names under which a result is logged",
)
ddp_hook_state = LIGHTNING.of_instance(
    "lightning.pytorch.strategies.DDPStrategy._ddp_comm_state",
    "whether a communication hook keeps something that nobody saves",
    for_="exact resume under DDP",
)
model_averager = LIGHTNING.of_instance(
    "lightning.pytorch.strategies.DDPStrategy._model_averager",
    "whether replicas differ by design between two averagings",
    for_="ReplicaAuditCallback",
)

# Of the loops of a fit.

combined_loader = LIGHTNING.of_instance("_FitLoop._combined_loader", "the loaders of a loop, None before they are made")
LOAD_LOADER_STATES = LIGHTNING.name_of(
    "lightning.pytorch.loops.fit_loop._FitLoop._load_combined_loader_states",
    "the method that runs just before the loaders are first iterated over",
)
loader_mode = LIGHTNING.of_instance(
    "lightning.pytorch.utilities.CombinedLoader._mode",
    "in which order several loaders are drawn from",
    for_="a fit with several training loaders",
)
is_restarting = LIGHTNING.of_instance(
    "_FitLoop._restarting",
    "whether a loop goes on from a checkpoint; its public setter also sets it on the loops inside",
)
data_fetcher = LIGHTNING.of_instance("_FitLoop._data_fetcher", "what draws batches of the loaders")
should_accumulate = LIGHTNING.of_instance(
    "_FitLoop._should_accumulate", "whether a batch ends no optimizer step, when its metrics are not logged"
)
num_optimizer_steps = LIGHTNING.of_instance(
    "_TrainingEpochLoop._batches_that_stepped", "the number that metrics are logged under"
)
is_out_of_batches = LIGHTNING.of_instance(
    "_TrainingEpochLoop._num_ready_batches_reached", "whether the data of the epoch is used up"
)
is_training_done = LIGHTNING.of_instance("_TrainingEpochLoop._is_training_done", "whether a batch was the last one")
epoch_results = LIGHTNING.of_instance("_TrainingEpochLoop._results", "what was logged in a training epoch")
should_validate = LIGHTNING.of_instance(
    "_TrainingEpochLoop._should_check_val_fx", "whether a validation follows a batch"
)
validation_data = LIGHTNING.of_instance("_EvaluationLoop._data_source", "whether there is data to validate with")


def end_restart(loop: Any) -> None:
    """Have this loop, and none of those inside, no longer count as one that goes on from a checkpoint."""
    loop._restarting = False


def all_missing() -> list[str]:
    """Return a sentence for each name that is missing; of those of a Trainer, which is made for it, the first."""
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    before = log.level
    log.setLevel(logging.WARNING)  # a new Trainer says what accelerators there are
    try:
        require(pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False))
    except UnsupportedVersionError:
        pass  # from now on the name is among those that are missing
    finally:
        log.setLevel(before)
    return LIGHTNING.all_missing()


def require(trainer: pl.Trainer) -> None:
    """Raise UnsupportedVersionError where torch, Lightning or a Trainer lacks what following a fit needs."""
    TORCH.require(RECORDING)
    LIGHTNING.require(RECORDING)
    fit_loop = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    for of_trainer in (checkpoint_connector, results, logger_connector):
        of_trainer(trainer)
    for of_connector in (callback_metrics, progress_bar_metrics):
        of_connector(logger_connector(trainer))
    for of_fit_loop in (combined_loader, data_fetcher, should_accumulate, is_restarting):
        of_fit_loop(fit_loop)
    for of_epoch_loop in (num_optimizer_steps, is_out_of_batches, is_training_done, epoch_results, should_validate):
        of_epoch_loop(epoch_loop)
    validation_data(epoch_loop.val_loop)
