"""The progress of a run in the Trainer's loggers and in its progress bar."""

from collections.abc import Callable, Mapping
from functools import wraps
from time import perf_counter
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from det_callbacks.callback.bars import show_in_bar
from det_callbacks.callback.progress import Progress
from det_callbacks.digest import format_digest
from det_callbacks.report.fits import progress_word
from det_callbacks.rng import RewindPoint
from det_callbacks.verdict import Verdict

PREFIX = "determinism/"

_CHAIN_BITS = 24
"""Of a chain, as a number: TensorBoard keeps scalars as float32, which has no more whole ones."""


class HasProgress(Protocol):
    """What knows how far a run is, and what time it spent outside the hooks that are timed."""

    @property
    def progress(self) -> Progress:
        """The state."""

    @property
    def seconds(self) -> float:
        """In all."""


class Metrics:
    """Tells loggers and the progress bar of one callback's fits; on rank 0 only, nothing elsewhere.

    Loggers are given the metrics directly: what ``self.log`` takes could be monitored, and would be in the module's
    results. What a logger draws from a generator is undone.

    Attributes:
        seconds: spent in hooks of the callback since the fit began; see ``timed``.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._trainer: pl.Trainer | None = None
        self._undo: Callable[[], object] | None = None
        self._progress: Progress | None = None
        self._is_recording = False
        self._other_seconds = 0.0
        self._step = 0
        self._is_logged = True

    def begin_fit(self, trainer: pl.Trainer, *, is_recording: bool) -> None:
        """Follow a fit that is about to train.

        Args:
            trainer: whose loggers and bar are told.
            is_recording: steps are recorded, not verified.
        """
        self.close()
        self.seconds = self._other_seconds = 0.0
        self._progress, self._is_logged = None, True
        self._is_recording = is_recording
        if trainer.is_global_zero:
            self._trainer = trainer
            self._undo = show_in_bar(trainer, self._word)

    def after_step(self, trace: HasProgress) -> None:
        """Take the state after a batch, and log it when the Trainer's own metrics are logged."""
        if self._trainer is None:
            return
        self._progress, self._other_seconds = trace.progress, trace.seconds
        # Lightning 2.6.6 logs under the number of optimizer steps, right after the callbacks: ours are beside its own
        trainer: Any = self._trainer
        fit_loop = trainer.fit_loop
        self._step, self._is_logged = fit_loop.epoch_loop._batches_that_stepped, False
        every = trainer.log_every_n_steps
        if every and (self._step + 1) % every == 0 and not fit_loop._should_accumulate():
            self._log(trainer)

    def end_fit(self, verdict: Verdict | None) -> None:
        """Log the last state, and the verdict where a logger takes text; the bar is left alone from now on."""
        trainer = self._trainer
        self.close()
        if trainer is None or self._progress is None:
            return
        if not self._is_logged:
            self._log(trainer)
        if verdict is None:
            return
        with _Undrawn():
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    text = f"{verdict.verdict}: {verdict.explanation}"
                    logger.experiment.add_text(f"{PREFIX}verdict", text, self._step)
                    logger.save()

    def close(self) -> None:
        """Leave the bar as it was; may be called more than once."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
        self._trainer = None

    def _log(self, trainer: pl.Trainer) -> None:
        assert self._progress is not None
        self._is_logged = True
        with _Undrawn():
            for logger in trainer.loggers:
                logger.log_metrics(self._metrics(self._progress, logger), step=self._step)
                logger.save()

    def _metrics(self, progress: Progress, logger: Logger) -> dict[str, Any]:
        verb = "recorded" if self._is_recording else "verified"
        numbers: Mapping[str, float] = {
            f"steps_{verb}": progress.num_steps,
            "sites": progress.num_sites,
            "differing": progress.num_differing,
            "overhead_seconds": round(self.seconds + self._other_seconds, 6),
            "replayed_mib": progress.num_bytes / 2**20,
        }
        chain = progress.chain
        # a CSV file keeps text; a user's own may do something else with what it is given
        if type(logger).log_metrics is CSVLogger.log_metrics:
            metrics: dict[str, Any] = {**numbers, **({} if chain is None else {"chain": format_digest(chain)})}
        else:
            metrics = {name: float(value) for name, value in numbers.items()}
            if chain is not None:
                metrics["chain"] = float(chain >> (64 - _CHAIN_BITS))
        return {f"{PREFIX}{name}": value for name, value in metrics.items()}

    def _word(self) -> str:
        progress = self._progress
        if progress is None:
            return progress_word(num_steps=0, num_differing=0, is_recording=self._is_recording)
        return progress_word(
            num_steps=progress.num_steps, num_differing=progress.num_differing, is_recording=self._is_recording
        )


class _Undrawn:
    """Puts the process's generators back: a logger may draw, and a training goes on as without ours."""

    def __enter__(self) -> None:
        self._generators = RewindPoint()

    def __exit__(self, *_: object) -> None:
        self._generators.put_back()


class HasMetrics(Protocol):
    """What counts the time that its hooks take."""

    _metrics: Metrics


Owner = TypeVar("Owner", bound=HasMetrics)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def timed(hook: Callable[Concatenate[Owner, Parameters], Result]) -> Callable[Concatenate[Owner, Parameters], Result]:
    """Count the time of a hook as the callback's own: two readings of the clock, 0.1 microseconds."""

    @wraps(hook)
    def counted(self: Owner, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        started = perf_counter()
        try:
            return hook(self, *args, **kwargs)
        finally:
            self._metrics.seconds += perf_counter() - started

    return counted
