"""Reports the progress of a run to the Trainer's loggers and progress bar (Lightning 2.6.6)."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from det_callbacks.compare.record import REPORT_FILE, VERDICT_FILE
from det_callbacks.environment.rng import RewindPoint
from det_callbacks.internals.lightning import (
    logger_connector,
    num_optimizer_steps,
    progress_bar_metrics,
    should_accumulate,
)
from det_callbacks.internals.twins import either
from det_callbacks.report.closing_lines import progress_word
from det_callbacks.report.console import print_closing_line
from det_callbacks.training.session import Progress
from det_callbacks.verdict import Verdict

KEY = "determinism"


class ProgressReporter:
    """Reports the progress of a run to loggers and the progress bar of rank 0.

    It calls loggers directly, since values of ``self.log`` would be among the module's results, and
    restores the generators after each logger.
    """

    _trainer: pl.Trainer | None = None
    _unlogged: Progress | None = None
    _is_recording = False
    _step = 0

    def begin_fit(self, trainer: pl.Trainer, *, is_recording: bool) -> None:
        self.close()
        self._unlogged, self._is_recording = None, is_recording
        self._trainer = trainer if trainer.is_global_zero else None

    def after_step(self, progress: Progress) -> None:
        if self._trainer is None:
            return
        # Lightning logs right after the callbacks, under the number of optimizer steps
        trainer: Any = self._trainer
        fit_loop, every = trainer.fit_loop, trainer.log_every_n_steps
        self._unlogged, self._step = progress, num_optimizer_steps(fit_loop.epoch_loop)
        # other bars may not support text
        if isinstance(trainer.progress_bar_callback, either(TQDMProgressBar, RichProgressBar)):
            numbers = {"num_steps": progress.num_steps, "num_differing": progress.num_differing}
            _bar_metrics(trainer)[KEY] = progress_word(**numbers, is_recording=self._is_recording)
        if every and (self._step + 1) % every == 0 and not should_accumulate(fit_loop)():
            self._log(trainer, progress)

    def end_fit(self, verdict: Verdict | None) -> None:
        trainer = self._trainer
        self.close()
        if trainer is not None and self._unlogged is not None:
            self._log(trainer, self._unlogged)
        if trainer is not None and verdict is not None:
            states = RewindPoint()
            for logger in trainer.loggers:
                _give_verdict(logger, verdict, self._step)
            states.put_back()

    def close(self) -> None:
        if self._trainer is not None:
            _bar_metrics(self._trainer).pop(KEY, None)
        self._trainer = None

    def _log(self, trainer: pl.Trainer, progress: Progress) -> None:
        self._unlogged = None
        metrics: dict[str, float] = {
            f"steps_{'recorded' if self._is_recording else 'verified'}": progress.num_steps,
            "sites": progress.num_sites,
            "differing": progress.num_differing,
            "replayed_mib": progress.num_bytes / 2**20,
        }
        if progress.chain is not None:
            # TensorBoard stores float32, which has 24 bits for integers
            metrics["chain"] = progress.chain >> 40
        states = RewindPoint()
        for logger in trainer.loggers:
            logger.log_metrics({f"{KEY}/{name}": float(value) for name, value in metrics.items()}, step=self._step)
            logger.save()
        states.put_back()


def _give_verdict(logger: Logger, verdict: Verdict, step: int) -> None:
    files = [path for name in (VERDICT_FILE, REPORT_FILE) if (path := Path(verdict.current, name)).is_file()]
    if isinstance(logger, either(TensorBoardLogger)):
        logger.experiment.add_text(f"{KEY}/verdict", f"{verdict.verdict}: {verdict.explanation}", step)
        logger.save()
    for path in files:
        if isinstance(logger, either(WandbLogger)):  # wandb 0.31
            logger.experiment.log_artifact(str(path), name=f"{KEY}-{path.stem}", type=KEY)
        elif isinstance(logger, either(MLFlowLogger)):  # mlflow 3.17
            logger.experiment.log_artifact(logger.run_id, str(path), KEY)


def _bar_metrics(trainer: pl.Trainer) -> dict[str, Any]:
    """Return ``trainer.progress_bar_metrics`` without computing any metric."""
    metrics: dict[str, Any] = progress_bar_metrics(logger_connector(trainer))
    return metrics  # bars also show text


def print_beside_bar(trainer: pl.Trainer, text: str) -> None:
    """Print a closing line without a progress bar breaking it."""
    bar: Any = trainer.progress_bar_callback
    rich = bar.progress if isinstance(bar, either(RichProgressBar)) else None
    console = None
    if rich is not None and rich.live.is_started and sys.stdout.isatty():
        console = rich.console
    with Tqdm.external_write_mode() if isinstance(bar, either(TQDMProgressBar)) else nullcontext():
        print_closing_line(text, console)
