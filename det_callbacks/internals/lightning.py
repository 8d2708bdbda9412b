"""The private names of Lightning (2.5 to 2.6), each with its purpose, and its twin
``pytorch_lightning``.
"""

import logging
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch as pl

from det_callbacks.errors import UnsupportedVersionError
from det_callbacks.internals.private_names import PrivateNames

LIGHTNING = PrivateNames("lightning")

# Classes.

if TYPE_CHECKING:
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

    WrappingCheckpointIO = _WrappingCheckpointIO
else:
    WrappingCheckpointIO = LIGHTNING.needed(
        "lightning.pytorch.plugins.io.wrapper._WrappingCheckpointIO",
        "a checkpoint writer that wraps another",
    )
DataLoaderIterFetcher = LIGHTNING.needed(
    "lightning.pytorch.loops.fetchers._DataLoaderIterDataFetcher",
    "the fetcher for training steps that load batches themselves",
)
PrefetchFetcher = LIGHTNING.needed(
    "lightning.pytorch.loops.fetchers._PrefetchDataFetcher", "the fetcher that prefetches batches"
)
Loop = LIGHTNING.needed("lightning.pytorch.loops.loop._Loop", "the class of loops")
MultiProcessingLauncher = LIGHTNING.needed(
    "lightning.pytorch.strategies.launchers._MultiProcessingLauncher",
    "the launcher of processes that return nothing",
)

# Of the Trainer and its strategy.

checkpoint_connector = LIGHTNING.of_instance(
    "lightning.pytorch.Trainer._checkpoint_connector",
    "restores sharding strategies after the fit has begun",
)
RESTORE = LIGHTNING.name_of(
    "lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector"
    "._restore_modules_and_callbacks",
    "the method that restores them",
)
results = LIGHTNING.of_instance(
    "lightning.pytorch.Trainer._results", "the metrics logged in a validation or a test"
)
logger_connector = LIGHTNING.of_instance(
    "lightning.pytorch.Trainer._logger_connector", "holds the logged values"
)
callback_metrics = LIGHTNING.of_instance(
    "_LoggerConnector._callback_metrics",
    "the logged values; Trainer.callback_metrics may compute them, with a collective",
)
progress_bar_metrics = LIGHTNING.of_instance(
    "_LoggerConnector._progress_bar_metrics", "the same for the progress bar"
)
name_of_result = LIGHTNING.needed(
    "lightning.pytorch.trainer.connectors.logger_connector.result._ResultCollection._forked_name",
    "the names under which a result is logged",
)
ddp_hook_state = LIGHTNING.of_instance(
    "lightning.pytorch.strategies.DDPStrategy._ddp_comm_state",
    "whether a communication hook keeps state that is not saved",
)
model_averager = LIGHTNING.of_instance(
    "lightning.pytorch.strategies.DDPStrategy._model_averager",
    "whether replicas differ by design between averagings",
)

# Of the loops of a fit.

combined_loader = LIGHTNING.of_instance(
    "_FitLoop._combined_loader", "the loaders of a loop, None before they are made"
)
LOAD_LOADER_STATES = LIGHTNING.name_of(
    "lightning.pytorch.loops.fit_loop._FitLoop._load_combined_loader_states",
    "the method that runs just before the first iteration over the loaders",
)
loader_mode = LIGHTNING.of_instance(
    "lightning.pytorch.utilities.CombinedLoader._mode",
    "the order in which several loaders are iterated",
)
data_fetcher = LIGHTNING.of_instance("_FitLoop._data_fetcher", "loads batches from the loaders")
should_accumulate = LIGHTNING.of_instance(
    "_FitLoop._should_accumulate",
    "whether a batch ends without an optimizer step, so its metrics are not logged",
)
num_optimizer_steps = LIGHTNING.of_instance(
    "_TrainingEpochLoop._batches_that_stepped", "the step under which metrics are logged"
)
is_out_of_batches = LIGHTNING.of_instance(
    "_TrainingEpochLoop._num_ready_batches_reached", "whether the data of the epoch is exhausted"
)
is_training_done = LIGHTNING.of_instance(
    "_TrainingEpochLoop._is_training_done", "whether a batch was the last one"
)
epoch_results = LIGHTNING.of_instance(
    "_TrainingEpochLoop._results", "the metrics logged in a training epoch"
)
should_validate = LIGHTNING.of_instance(
    "_TrainingEpochLoop._should_check_val_fx", "whether a validation follows a batch"
)
validation_data = LIGHTNING.of_instance(
    "_EvaluationLoop._data_source", "whether there is validation data"
)


def end_restart(loop: Any) -> None:
    """Mark this loop, but not its inner loops, as no longer continuing from a checkpoint."""
    loop._restarting = False


def all_missing() -> list[str]:
    """Return a sentence for each missing name; for attributes of a Trainer,
    which is made here, only the first.
    """
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    before = log.level
    log.setLevel(logging.WARNING)  # a new Trainer logs the available accelerators
    try:
        require(pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False))
    except UnsupportedVersionError:
        pass  # the name is now among the missing ones
    finally:
        log.setLevel(before)
    return LIGHTNING.all_missing()


def require(trainer: pl.Trainer) -> None:
    """Raise UnsupportedVersionError if Lightning or this Trainer lacks a name."""
    LIGHTNING.require()
    epoch_loop = trainer.fit_loop.epoch_loop
    owners = {
        "lightning.pytorch.Trainer": trainer,
        "_LoggerConnector": logger_connector(trainer),
        "_FitLoop": trainer.fit_loop,
        "_TrainingEpochLoop": epoch_loop,
        "_EvaluationLoop": epoch_loop.val_loop,
    }
    for path, read in LIGHTNING.readers.items():
        owner = path.rpartition(".")[0]
        if owner in owners:
            read(owners[owner])


_NAMES = (("lightning.pytorch.", "pytorch_lightning."), ("lightning.fabric.", "lightning_fabric."))

Class = TypeVar("Class", bound=type)


def either(*classes: Any) -> tuple[Any, ...]:
    """Return classes of ``lightning``, and their twins if ``pytorch_lightning`` is loaded.

    >>> isinstance(trainer.strategy, either(DDPStrategy))  # doctest: +SKIP
    """
    twins = (_twin(one) for one in classes)
    return (*classes, *(one for one in twins if one is not None))


def own_class(instance: object, one: Any) -> Any:
    """Return a class of ``lightning`` or its twin, whichever the object is an instance of."""
    twin = _twin(one)
    return one if twin is None or not isinstance(instance, twin) else twin


def package_of(instance: object) -> str:
    modules = {kind.__module__.partition(".")[0] for kind in type(instance).__mro__}
    return "pytorch_lightning" if "pytorch_lightning" in modules else "lightning"


def join_twins(cls: Class) -> Class:
    """Also make a subclass of a Lightning class a subclass of its twin, if that is loaded by now.

    A callback is then a ``Callback`` for LightningCLI, and for
    ``Trainer(callbacks=callback)`` without a list.
    """
    missing = [
        twin
        for base in cls.__bases__
        if (twin := _twin(base)) is not None and not issubclass(cls, twin)
    ]
    if missing:
        cls.__bases__ += tuple(missing)
    return cls


def _twin(one: Any) -> Any:
    """Return the class of the same name in the other package, if it is loaded."""
    for name, other in _NAMES:
        if one.__module__.startswith(name):
            return getattr(
                sys.modules.get(other + one.__module__.removeprefix(name)), one.__name__, None
            )
    return None
