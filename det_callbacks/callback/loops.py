"""Where Lightning's loops are reached into, for the time of a fit (read at Lightning 2.6.6)."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.loop import _Loop

from det_callbacks.resume import ResumeState


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


def align_progress(trainer: pl.Trainer, state: ResumeState) -> None:
    """Give Lightning's loops, just restored, the counts that the uninterrupted run had at the same place."""
    loop = trainer.fit_loop
    batches: Any = loop.epoch_loop.batch_progress  # here and below: the classes are wider than their declarations
    epochs: Any = loop.epoch_progress
    if state.is_mid_batch:
        # the batch under way is to be done again, and Lightning has counted it
        batches.total.reset_on_restart()
        batches.current.reset_on_restart()
    for progress in (epochs.current, epochs.total):
        progress.ready = progress.started  # an epoch that had only begun begins again
    has_ended = epochs.current.processed == epochs.current.ready and epochs.current.ready > 0
    if state.is_epoch_over and not has_ended and trainer.num_training_batches == float("inf"):
        # saved at the end of its last batch, which Lightning only knows of an epoch of known length
        for progress in (epochs.current, epochs.total):
            progress.processed = progress.ready
        loop.epoch_loop._batches_that_stepped += 1
        has_ended = True
    if state.is_epoch_over and has_ended:
        # With max_steps Lightning takes the epoch for unfinished, and would train one batch too many in it.
        _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]  # past the property of the fit loop itself
    elif not state.is_epoch_over and has_ended:
        # saved after a fit that stopped in the middle of an epoch, which Lightning counts as a whole one
        for progress in (epochs.current, epochs.total):
            progress.processed -= 1
            progress.completed = min(progress.completed, progress.processed)
        loop.restarting = True


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
