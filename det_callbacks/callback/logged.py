"""What a module logs, read where Lightning has computed it."""

from collections.abc import Collection
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, as_tensor
from typing_extensions import override

from det_callbacks.callback.auditing import Auditing
from det_callbacks.callback.metrics import timed
from det_callbacks.callback.recording import Recording
from det_callbacks.callback.together import Together
from det_callbacks.callback.tracing import MarksPoints
from det_callbacks.callback.verifying import Verifying
from det_callbacks.compare.metrics import FIRST_BATCH, GENERATOR, LENGTH
from det_callbacks.digest import digest_tensor, format_digest, unobserved
from det_callbacks.resume.fit import local_part
from det_callbacks.runs.metrics import RESUMED, Metric, Reading
from det_callbacks.runs.selection import Selection
from det_callbacks.trace.components import holds_data
from det_callbacks.trace.leaves import flatten
from det_callbacks.trace.ledger import Ledger

CALLS = {TrainerFn.VALIDATING: "trainer.validate", TrainerFn.TESTING: "trainer.test"}
"""What logs metrics without a fit."""


class LoggedHooks(MarksPoints):
    """Hands what the module logs to the run of a callback: the values of rank 0, which all ranks wait for together.

    Those of a training epoch are computed after the last hook of the epoch, and read in the first one after it.
    """

    selection: Selection
    _together: Together
    _run: Recording | Verifying | Auditing | None
    _is_fitting: bool
    _step: int
    _call: str | None
    _is_resuming = False
    _is_whole_epoch = False
    _ended_epoch: int | None = None
    _seen: dict[str, Any] = {}  # noqa: RUF012  # never changed in place
    _first_batches: dict[str, str] = {}  # noqa: RUF012  # likewise

    def _begin_call(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the run for a test or a validation outside of a fit."""
        raise NotImplementedError

    def _end_fit(self, *, is_resumed: bool, is_early: bool = False) -> None:
        raise NotImplementedError

    # what a resumed fit lacks

    def _begin_logged(self, *, is_resumed: bool) -> None:
        self._is_resuming, self._is_whole_epoch, self._ended_epoch = is_resumed, False, None

    def _note_first_step(self, trainer: pl.Trainer) -> None:
        if self._is_resuming:
            self._is_resuming = False
            self._put_resumed(trainer, self._step - 1, is_first=True)

    def _put_resumed(self, trainer: pl.Trainer, step: int, *, is_first: bool = False) -> None:
        if trainer.is_global_zero and isinstance(self._run, Recording | Verifying):
            place = Reading(where=RESUMED, number=step, step=step, epoch=trainer.current_epoch, metrics={})
            self._run.resume_metrics(place, is_first=is_first)

    # the readings

    @timed
    def _read_epoch(self, trainer: pl.Trainer) -> bool:
        """Read what was computed at the end of the last epoch, if one has ended; return whether it differs."""
        epoch, self._ended_epoch = self._ended_epoch, None
        is_whole, self._is_whole_epoch = self._is_whole_epoch, False
        if epoch is None:
            return False
        if not is_whole:
            self._fresh(trainer)  # a mean that began anew in the middle of the epoch
            if not self._is_resuming:
                self._put_resumed(trainer, self._step)
            return False
        return self._put_reading(trainer, "epoch", self._step, epoch=epoch)

    def _put_reading(self, trainer: pl.Trainer, where: str, number: int, *, epoch: int) -> bool:
        run, step = self._run, self._step
        if not trainer.is_global_zero or not isinstance(run, Recording | Verifying):
            return False
        fresh = self._fresh(trainer, only=None if where == "epoch" else _evaluated(trainer))
        first_batches, self._first_batches = self._first_batches, {}
        with unobserved():
            metrics = {
                name: _metric(value)
                for name, value in fresh.items()
                if isinstance(value, Tensor | float | int) and self.selection.selects_metric(name)
            }
        if not metrics:
            return False
        data = {} if where == "epoch" else {**_lengths(trainer, where), **first_batches}
        evidence = {**_generators(), **data}
        reading = Reading(where=where, number=number, step=step, epoch=epoch, metrics=metrics, evidence=evidence)
        return run.put_metrics(reading)

    def _fresh(self, trainer: pl.Trainer, *, only: Collection[str] | None = None) -> dict[str, Any]:
        """Return what was computed since it was last returned; a value that was computed again is another object."""
        # trainer.callback_metrics would compute what is not computed yet, which can be a collective (Lightning 2.6.6)
        computed: dict[str, Any] = trainer._logger_connector._callback_metrics
        known = {name: value for name, value in computed.items() if only is None or name in only}
        fresh = {name: value for name, value in known.items() if value is not self._seen.get(name)}
        self._seen = {**self._seen, **known}
        return fresh

    def _stop_together(self, *, differs: bool) -> None:
        """End the fit on all ranks where a metric of rank 0 differs."""
        may_stop = isinstance(self._run, Verifying) and self._run.may_stop
        differs = differs and may_stop
        if self._together.stops_after(self._step, differs=differs, may_stop=may_stop, is_last=True):
            self._end_fit(is_resumed=True, is_early=True)

    @property
    def _logs_in_fit(self) -> bool:
        return self._is_fitting and self._call is None and not isinstance(self._run, Auditing)

    def _end_evaluation(self, trainer: pl.Trainer) -> None:
        if trainer.sanity_checking:
            self._first_batches = {}  # Lightning throws away what is logged there
        elif self._call is not None and self._is_fitting:
            assert isinstance(self._run, Recording | Verifying), "an audit has no such calls"
            self._put_reading(trainer, self._call, self._run.num_calls(self._call), epoch=trainer.current_epoch)
            self._run.count_call(self._call)
            self._call = None
            self._end_fit(is_resumed=False)
        elif self._logs_in_fit and not self._is_resuming:
            differs = self._put_reading(trainer, "validation", self._step, epoch=trainer.current_epoch)
            self._stop_together(differs=differs)

    @timed
    def _note_batch(self, trainer: pl.Trainer, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        if batch_idx or not self._is_fitting or not trainer.is_global_zero:
            return
        with unobserved():
            for name, value in flatten(batch, "batch", is_whole=True):
                if isinstance(value, Tensor) and holds_data(value):
                    place = f"{FIRST_BATCH}loader {dataloader_idx}: {name}"
                    self._first_batches = {**self._first_batches, place: format_digest(digest_tensor(value))}

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        self._begin_call(trainer, pl_module)

    @override
    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        super().on_validation_batch_start(trainer, pl_module, batch, batch_idx, dataloader_idx)
        self._note_batch(trainer, batch, batch_idx, dataloader_idx)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        self._end_evaluation(trainer)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_test_start(trainer, pl_module)
        self._begin_call(trainer, pl_module)

    @override
    def on_test_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        super().on_test_batch_start(trainer, pl_module, batch, batch_idx, dataloader_idx)
        self._note_batch(trainer, batch, batch_idx, dataloader_idx)

    @override
    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_test_end(trainer, pl_module)
        self._end_evaluation(trainer)


def _evaluated(trainer: pl.Trainer) -> set[str]:
    """Return the names of what the validation or test that has just ended has logged (Lightning 2.6.6)."""
    results = trainer._results
    assert results is not None, "an evaluation has ended"
    return {name for result in results.result_metrics for name in results._forked_name(result, on_step=False)}


def _metric(value: Tensor | float) -> Metric:
    tensor = local_part(as_tensor(value).detach()).cpu()
    shown = tensor.item() if tensor.numel() == 1 else tensor.tolist()
    return Metric(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        digest=format_digest(digest_tensor(tensor)),
        value=repr(shown),
    )


def _generators() -> dict[str, str]:
    ledger = Ledger()
    ledger.mark("")
    return {f"{GENERATOR}{row.name}": format_digest(row.value) for row in ledger.take(0)}


def _lengths(trainer: pl.Trainer, where: str) -> dict[str, str]:
    """Return how many samples the data sets of the loaders have that were gone through."""
    loop: Any = trainer.test_loop if where == "trainer.test" else trainer.validate_loop
    loop = trainer.fit_loop.epoch_loop.val_loop if where == "validation" else loop
    found = {}
    for number, loader in enumerate(loop._combined_loader.flattened):
        data: Any = getattr(loader, "dataset", None)
        if hasattr(data, "__len__"):
            found[f"{LENGTH}loader {number}"] = str(len(data))
    return found
