"""Where Lightning's loops are reached into, for the time of a fit (read at Lightning 2.6.6)."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl


def mark_training_step(
    trainer: pl.Trainer, marks: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], object]:
    """Wrap ``training_step``, also where a closure repeats it; return what takes the wrapper away.

    No hook of Lightning encloses it in both automatic and manual optimization; its loops call it through the strategy,
    so that one attribute of the strategy is set.
    """
    strategy: Any = trainer.strategy
    strategy.training_step = marks(strategy.training_step)
    return partial(strategy.__dict__.pop, "training_step", None)


def leave_out_logging(
    trainer: pl.Trainer, leaves_out: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], object]:
    """Keep what ``self.log`` adds up out of the trace; return what takes the wrappers away.

    Lightning makes its sums when a name is first logged and clears them at an epoch's first batch, so a step that comes
    first after a resume has ops that the same step of the uninterrupted run has not. None of them touches the training.
    """
    results: Any = trainer.fit_loop.epoch_loop._results
    names = ("log", "reset")
    for name in names:
        setattr(results, name, leaves_out(getattr(results, name)))
    return lambda: [vars(results).pop(name, None) for name in names]


def after_loading(trainer: pl.Trainer, function: Callable[[], object]) -> None:
    """Call a function when a checkpoint that a fit begins with was loaded, in ``on_fit_start`` or later.

    Most strategies load before that hook. Those that shard load after it, and until then Lightning does not say
    whether there is a checkpoint; its method is called in any case.
    """
    if not trainer.strategy.restore_checkpoint_after_setup:
        function()
        return
    connector: Any = trainer._checkpoint_connector
    load = partial(type(connector)._restore_modules_and_callbacks, connector)

    def load_and_call(*args: Any) -> None:
        vars(connector).pop("_restore_modules_and_callbacks", None)
        load(*args)
        function()

    vars(connector)["_restore_modules_and_callbacks"] = load_and_call


def root_folder(trainer: pl.Trainer) -> Path:
    """Return where folders go by default; Lightning tells all processes those of rank 0, so all of them call it."""
    return Path(trainer.log_dir or trainer.default_root_dir)
