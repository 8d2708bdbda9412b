"""The trace of one fit: open during its steps, and closed on every path."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from det_callbacks.callback.evidence import Evidence
from det_callbacks.callback.loops import leave_out_logging, mark_training_step
from det_callbacks.callback.metrics import Metrics, timed
from det_callbacks.callback.progress import Progress
from det_callbacks.callback.recording import Recording
from det_callbacks.callback.verifying import Verifying
from det_callbacks.errors import TraceError
from det_callbacks.observers import Observations, activate, deactivate
from det_callbacks.runs.selection import Selection
from det_callbacks.trace.hash_mode import HashMode
from det_callbacks.trace.nondeterministic_ops import NondeterministicOps


class Tracing:
    """Traces the selected steps of a fit and hands them to its run.

    Args:
        pl_module: that is trained.
        run: what the steps are written to, or compared with.
        selection: what is traced.
        alerts: collects ops without a deterministic implementation; None where nothing does.
        evidence: gathers what explains a difference.
        is_resumed: the fit begins in the middle of a run.
    """

    def __init__(
        self,
        pl_module: pl.LightningModule,
        run: Recording | Verifying,
        *,
        selection: Selection,
        alerts: NondeterministicOps | None,
        evidence: Evidence,
        is_resumed: bool,
    ) -> None:
        self._run = run
        self.evidence = evidence
        self._selection = selection
        self._alerts = alerts
        # A resumed step is recorded as one in the middle is, so that it can be compared with the same uninterrupted.
        self._is_first = not is_resumed
        self._hash_mode = HashMode.for_training(pl_module, selection)
        recorder = self._hash_mode.recorder
        recorder.nondeterministic_ops = alerts
        recorder.exchange = run.exchange
        recorder.keeper = run.keeper
        recorder.trie.earlier = run.earlier_programs if isinstance(run, Recording) else ()
        self._observations = Observations(
            recorder,
            owner=f"the DeterminismCallback of {run.path}",
            level=selection.level,
            is_every_step=selection.is_every_step,
        )
        activate(self._observations)
        self._undo: list[Callable[[], object]] = []
        if alerts is not None:
            alerts.on_new = self._put_alerts

    @property
    def progress(self) -> Progress:
        """What was recorded or compared so far."""
        return self._run.progress

    @property
    def seconds(self) -> float:
        """Time of ours between the training's own ops, in all steps; not what is spent op by op."""
        return self._hash_mode.seconds

    @property
    def may_stop(self) -> bool:
        """Whether a step that differs ends the fit."""
        return self._run.may_stop

    def attach(self, trainer: pl.Trainer) -> None:
        """Follow the optimizers and the training step of a Trainer that is about to train, and whose data is set up."""
        self.evidence.check_loaders()
        self._hash_mode.optimizers = list(trainer.optimizers)
        self._undo.append(mark_training_step(trainer, self._hash_mode.marks_forward))
        self._undo.append(leave_out_logging(trainer, self._hash_mode.leaves_out))

    def begin_step(self, step: int, batch: Any) -> None:
        """Open the trace for a step, if it is a selected one."""
        if not self._selection.selects_step(step):
            self.evidence.begin_step(batch)
            return
        expected = self._run.expectation(step, self._hash_mode.digest_state)
        # one that an exception had ended is done again after a resume; a step that was chosen by number is the same one
        # whether its fit came to it from the start or from a checkpoint
        is_first = step == 0 or (self._is_first and self._selection.only_steps is None)
        self._hash_mode.begin(batch=batch, is_first=is_first, expected=expected)
        self._observations.begin(self._run.replay)
        self.evidence.begin_step(batch, self._hash_mode.sketch.digests)

    def note_loss(self, loss: Any) -> None:
        """Record the loss, before the backward pass."""
        self.evidence.mark("after forward")
        self._hash_mode.record_values("forward", loss, "loss")

    def begin_gradients(self) -> None:
        """Note that what follows is done to gradients, until the optimizer steps."""
        self._hash_mode.recorder.phase = "gradient"

    def end_step(self, step: int, epoch: int, outputs: Any) -> bool:
        """Hand a step over to the run; return whether to stop because it differs.

        Raises:
            TraceError: it could not be traced.
        """
        self.evidence.mark("batch end")
        if not self._hash_mode.is_open:
            self._run.put_evidence(self.evidence.take(step))
            return False
        self._hash_mode.record_values("state", outputs, "outputs")
        self._observations.end()
        trace = self._hash_mode.finish()
        if self._hash_mode.sketch.is_late:
            self.evidence.note_samples(self._hash_mode.sketch.digests)
        self._run.put_evidence(self.evidence.take(step))
        if trace is None:
            raise TraceError(
                f"Step {step} could not be traced, because a dispatch mode was left open in it, so nothing after step "
                f"{step - 1} would be {'recorded' if isinstance(self._run, Recording) else 'verified'}. Close that "
                "mode within the training step."
            )
        self._is_first = False
        return self._run.add(trace, step=step, epoch=epoch)

    def end_fit(self, step: int) -> None:
        """Hand over what was gathered since the last step: of the validation after it."""
        self._run.put_evidence(self.evidence.take(step + 1))

    def drop_step(self) -> None:
        """Forget a step that did not come to its end."""
        self._observations.drop()
        self._hash_mode.abandon()

    def close(self) -> None:
        """Leave nothing open. May be called more than once."""
        self.evidence.detach()
        self._observations.abandon()
        deactivate(self._observations)
        self._hash_mode.abandon()
        if self._alerts is not None and self._alerts.found:
            self._put_alerts()  # with the number of calls
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _put_alerts(self) -> None:
        assert self._alerts is not None
        self._run.put_nondeterministic_ops(self._alerts.found)


class MarksPoints(pl.Callback):
    """The hooks of a callback in which nothing is done but to note the generators."""

    _trace: Tracing | None = None
    _metrics: Metrics

    @timed
    def _mark(self, point: str) -> None:
        if self._trace is not None:
            self._trace.evidence.mark(point)

    @override
    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_sanity_check_start(trainer, pl_module)
        self._mark("before the sanity check")

    @override
    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_sanity_check_end(trainer, pl_module)
        self._mark("after the sanity check")

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        if not trainer.sanity_checking:
            self._mark("before validation")

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if not trainer.sanity_checking:
            self._mark("after validation")

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_after_backward(trainer, pl_module)
        self._mark("after backward")
