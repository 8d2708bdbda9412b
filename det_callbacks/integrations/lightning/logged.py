"""What Lightning logs and shows: metrics after it has computed them, and progress bars."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from det_callbacks.compare.record import REPORT_FILE, VERDICT_FILE
from det_callbacks.digest.components import digest_tensor
from det_callbacks.digest.host import format_digest
from det_callbacks.digest.unobserved import unobserved
from det_callbacks.internals.lightning import (
    callback_metrics,
    combined_loader,
    either,
    epoch_results,
    logger_connector,
    name_of_result,
    num_optimizer_steps,
    progress_bar_metrics,
    results,
    should_accumulate,
)
from det_callbacks.report.closing_lines import progress_word
from det_callbacks.report.console import print_closing_line
from det_callbacks.runs.metrics import RESUMED, Reading, ReadRow
from det_callbacks.settings.generators import RewindPoint
from det_callbacks.trace.components import holds_data
from det_callbacks.trace.leaves import flatten
from det_callbacks.training.evidence import generator_states, metric_of
from det_callbacks.training.session import Progress, Session
from det_callbacks.verdict import Verdict

# stages that log without a fit
CALLS = {TrainerFn.VALIDATING: "trainer.validate", TrainerFn.TESTING: "trainer.test"}


class LoggedMetrics:
    """Passes the metrics that the module logs on rank 0 to a session.

    Lightning computes an epoch's metrics after its last hook, so this reads them in the next hook.
    """

    step = -1  # the last batch that began
    is_resuming = False  # whether no batch has begun since a checkpoint was loaded
    # what is known of the open epoch, or None if it began in another process
    whole_epoch: tuple[ReadRow, ...] | None = None
    ended_epoch: int | None = None  # the epoch whose last hooks run
    _session: Session | None = None

    def __init__(self) -> None:
        self.first_batches: list[ReadRow] = []  # of each loader in the open validation or test
        self._seen: dict[str, Any] = {}

    def begin(self, session: Session) -> None:
        self._session = session
        self.is_resuming, self.whole_epoch, self.ended_epoch = session.is_resumed, None, None

    def begin_step(self, trainer: pl.Trainer, step: int) -> None:
        self.step = step
        if self.is_resuming:
            self.is_resuming = False
            if not trainer.fit_loop.epoch_loop.batch_idx:
                self.whole_epoch = (
                    ReadRow(
                        "hook", "on_train_epoch_start", "left out, or on_train_start ran as well"
                    ),
                )
            self._put_resumed(trainer, step - 1, is_first=True)

    def begin_evaluation_step(self, step: int) -> None:
        self.step, self.is_resuming = step, False

    def resume(self, trainer: pl.Trainer, step: int) -> None:
        """Begin with a later step of the reference, which may be in the middle of its epoch."""
        self.whole_epoch = None
        self._put_resumed(trainer, step - 1, is_first=True)

    def note_batch(
        self, trainer: pl.Trainer, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not batch_idx and trainer.is_global_zero:
            with unobserved():
                for name, value in flatten(batch, f"loader {dataloader_idx}: batch", is_whole=True):
                    if isinstance(value, Tensor) and holds_data(value):
                        self.first_batches.append(
                            ReadRow("batch", name, format_digest(digest_tensor(value)))
                        )

    def read_epoch(self, trainer: pl.Trainer) -> bool:
        epoch, self.ended_epoch = self.ended_epoch, None
        whole, self.whole_epoch = self.whole_epoch, None
        if epoch is not None and whole is not None:
            return self.read(trainer, "epoch", self.step, epoch=epoch, known=whole)
        if epoch is not None:
            self._fresh(trainer, "epoch")  # discards means of part of an epoch
            if not self.is_resuming:
                self._put_resumed(trainer, self.step)
        return False

    def read(
        self,
        trainer: pl.Trainer,
        where: str,
        number: int,
        *,
        epoch: int,
        known: tuple[ReadRow, ...] = (),
    ) -> bool:
        session = self._session
        if session is None or not trainer.is_global_zero:
            return False
        fresh = self._fresh(trainer, where)
        first_batches, self.first_batches = self.first_batches, []
        with unobserved():
            values = {
                name: value
                for name, value in fresh.items()
                if isinstance(value, Tensor | float | int)
            }
            selects = session.arguments.selection.selects_metric
            metrics = {name: metric_of(value) for name, value in values.items() if selects(name)}
        if not metrics and not known:
            return False
        of_data = () if where == "epoch" else (*_lengths(trainer, where), *first_batches)
        reads = (*known, *generator_states(session.reader), *of_data)
        place: dict[str, Any] = {
            "where": where,
            "number": number,
            "step": self.step,
            "epoch": epoch,
        }
        return bool(session.put_metrics(Reading(**place, metrics=metrics, reads=reads)))

    def _put_resumed(self, trainer: pl.Trainer, step: int, *, is_first: bool = False) -> None:
        if self._session is not None and trainer.is_global_zero:
            place = Reading(
                where=RESUMED, number=step, step=step, epoch=trainer.current_epoch, metrics={}
            )
            self._session.resume_metrics(place, is_first=is_first)

    def _fresh(self, trainer: pl.Trainer, where: str) -> dict[str, Any]:
        """Return the values logged since the last reading: Lightning makes a
        new object for each value.

        Other callbacks also log values, such as the next learning rate.
        """
        found = epoch_results(trainer.fit_loop.epoch_loop) if where == "epoch" else results(trainer)
        logged = {
            name
            for one in found.result_metrics
            for name in name_of_result(found, one, on_step=False)
        }
        values = callback_metrics(logger_connector(trainer))
        known = {name: value for name, value in values.items() if name in logged}
        fresh = {name: value for name, value in known.items() if value is not self._seen.get(name)}
        self._seen |= known
        return fresh


def _lengths(trainer: pl.Trainer, where: str) -> list[ReadRow]:
    loop: Any = trainer.test_loop if where == "trainer.test" else trainer.validate_loop
    loop = trainer.fit_loop.epoch_loop.val_loop if where == "validation" else loop
    sets: list[Any] = [
        getattr(loader, "dataset", None) for loader in combined_loader(loop).flattened
    ]
    sized = [(at, data) for at, data in enumerate(sets) if hasattr(data, "__len__")]
    return [ReadRow("length", f"loader {at}", str(len(data))) for at, data in sized]


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
            logger.log_metrics(
                {f"{KEY}/{name}": float(value) for name, value in metrics.items()}, step=self._step
            )
            logger.save()
        states.put_back()


def _give_verdict(logger: Logger, verdict: Verdict, step: int) -> None:
    files = [
        path
        for name in (VERDICT_FILE, REPORT_FILE)
        if (path := Path(verdict.current, name)).is_file()
    ]
    if isinstance(logger, either(TensorBoardLogger)):
        logger.experiment.add_text(
            f"{KEY}/verdict", f"{verdict.verdict}: {verdict.explanation}", step
        )
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
