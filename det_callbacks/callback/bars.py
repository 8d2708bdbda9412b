"""The Trainer's progress bar: lines of ours that leave it whole, and a word of ours in it (read at Lightning 2.6.6)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from det_callbacks.report.fits import print_closing_line

KEY = "determinism"


def say_beside(trainer: pl.Trainer, text: str) -> None:
    """Print a closing line so that it is whole, on a line of its own, where a progress bar is on the terminal.

    A bar of another kind than Lightning's own gets the line as it comes.
    """
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar):
        # not the bar's own ``print``, which says nothing where no bar is shown
        print_closing_line(text, write=partial(Tqdm.write, end=""))
    elif isinstance(bar, RichProgressBar) and bar.progress is not None and bar.progress.live.is_started:
        print_closing_line(text, live=bar.progress.console)
    else:
        print_closing_line(text)


def show_in_bar(trainer: pl.Trainer, word: Callable[[], str]) -> Callable[[], object]:
    """Let the bar show a word beside the metrics, ``determinism=41 steps match``; return what takes it out.

    It stands beside what ``get_metrics`` returns, whoever wrote that; ``trainer.progress_bar_metrics`` holds numbers
    only and is left alone. Nothing is done where the bar is another one than Lightning's, which need not take text.
    """
    bar: Any = trainer.progress_bar_callback
    if not isinstance(bar, TQDMProgressBar | RichProgressBar):
        return lambda: None
    get_metrics = bar.get_metrics

    def with_ours(*args: Any, **kwargs: Any) -> dict[str, Any]:
        metrics = get_metrics(*args, **kwargs)
        return metrics if KEY in metrics else {**metrics, KEY: word()}

    vars(bar)["get_metrics"] = with_ours
    return partial(vars(bar).pop, "get_metrics", None)
