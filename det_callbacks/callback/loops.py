"""Where Lightning's loops are reached into, for the time of a fit (read at Lightning 2.6.6)."""

from collections.abc import Callable
from functools import partial
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
