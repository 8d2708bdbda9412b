"""The hooks in which batches that are not trained on are recorded, or compared."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from det_callbacks.callback.arguments import STAGE_ARGUMENTS
from det_callbacks.callback.auditing import Auditing
from det_callbacks.callback.metrics import timed
from det_callbacks.callback.recording import Recording
from det_callbacks.callback.together import Together
from det_callbacks.callback.tracing import MarksPoints
from det_callbacks.callback.verifying import Verifying
from det_callbacks.digest import digest_tensor, unobserved
from det_callbacks.trace.batches import MAX_SAMPLES, samples_of
from det_callbacks.trace.components import holds_data
from det_callbacks.trace.eval_batches import SAMPLES, Batch, point_of
from det_callbacks.trace.evidence import Row
from det_callbacks.trace.leaves import flatten
from det_callbacks.trace.tree import scalar_bits

STAGES_OF_TRAINER = {
    TrainerFn.VALIDATING: "validation",
    TrainerFn.TESTING: "test",
    TrainerFn.PREDICTING: "prediction",
}
"""What a Trainer does without a fit."""


class EvalHooks(MarksPoints):
    """Hands the batches of validations, sanity checks, tests and predictions to the run of a callback.

    Those of a fit go into the fit. Each call of ``trainer.test``, ``validate`` or ``predict`` whose batches are asked
    for is a part of the run by itself.
    """

    _together: Together
    _run: Recording | Verifying | Auditing | None
    _is_fitting: bool
    _step: int
    _stage: str | None
    _stages: tuple[str, ...] = ()

    @property
    def _asked_stages(self) -> tuple[str, ...]:
        return tuple(stage for stage, argument in STAGE_ARGUMENTS.items() if getattr(self, argument))

    def _begin_stage(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the part of the run that a test or the like is; what it needs is in force."""
        raise NotImplementedError

    def _end_fit(self, *, is_resumed: bool, is_early: bool = False) -> None:
        raise NotImplementedError

    @timed
    def _note_batch(self, trainer: pl.Trainer, stage: str, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        step = _next_step(trainer)
        if not self._is_fitting or stage not in self._stages or isinstance(self._run, Auditing):
            return
        if stage == "sanity check" and step:
            return  # of a fit that was resumed: the uninterrupted one has none there
        assert self._run is not None, "a part of it was begun"
        self._run.put_batch(rows_of_batch(batch, point_of(stage, batch_idx, dataloader_idx), step))

    def _end_stage(self, trainer: pl.Trainer, stage: str) -> None:
        """End a part of the run; or, in a fit, stop on all ranks together where one had another batch."""
        if self._stage is not None:
            if self._is_fitting:
                assert isinstance(self._run, Recording | Verifying), "an audit has no parts"
                self._run.end_stage(None)
                self._stage = None
                self._end_fit(is_resumed=False)
            return
        if not self._is_fitting or stage not in self._stages or isinstance(self._run, Auditing):
            return
        assert self._run is not None, "a fit was begun"
        differs = self._run.end_stage(_next_step(trainer))
        may_stop = isinstance(self._run, Verifying) and self._run.may_stop
        if self._together.stops_after(self._step, differs=differs, may_stop=may_stop, is_last=True):
            self._end_fit(is_resumed=True, is_early=True)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        self._begin_stage(trainer, pl_module)

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
        self._note_batch(trainer, _validation(trainer), batch, batch_idx, dataloader_idx)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        self._end_stage(trainer, _validation(trainer))

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_test_start(trainer, pl_module)
        self._begin_stage(trainer, pl_module)

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
        self._note_batch(trainer, "test", batch, batch_idx, dataloader_idx)

    @override
    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_test_end(trainer, pl_module)
        self._end_stage(trainer, "test")

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_predict_start(trainer, pl_module)
        self._begin_stage(trainer, pl_module)

    @override
    def on_predict_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        super().on_predict_batch_start(trainer, pl_module, batch, batch_idx, dataloader_idx)
        self._note_batch(trainer, "prediction", batch, batch_idx, dataloader_idx)

    @override
    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_predict_end(trainer, pl_module)
        self._end_stage(trainer, "prediction")


def rows_of_batch(batch: Any, point: str, step: int) -> Batch:
    """Return what is noted of a batch: a digest of each tensor and of its samples without their order.

    Args:
        batch: as the step gets it; a pass over its tensors.
        point: where it is noted.
        step: training step that follows; 0 where there is none.
    """
    rows = []
    with unobserved():
        for name, value in flatten(batch, "batch", is_whole=True):
            if not isinstance(value, Tensor):
                rows.append(Row(step, point, name, scalar_bits(value)[0]))
            elif holds_data(value):
                rows.append(Row(step, point, name, digest_tensor(value)))
                is_list = not value.is_nested and value.dim() and 2 <= value.shape[0] <= MAX_SAMPLES
                if is_list and (samples := samples_of(value)) is not None:
                    rows.append(Row(step, point, f"{SAMPLES}{name}", samples.digest))
    return rows or (Row(step, point, "a batch without tensors and numbers", 0),)


def _validation(trainer: pl.Trainer) -> str:
    return "sanity check" if trainer.sanity_checking else "validation"


def _next_step(trainer: pl.Trainer) -> int:
    """Return the training step that follows, 0 where nothing is trained."""
    return trainer.fit_loop.epoch_loop.total_batch_idx + 1 if trainer.state.fn == TrainerFn.FITTING else 0
