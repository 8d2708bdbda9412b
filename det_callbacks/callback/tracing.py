"""The trace of one fit, and the watch for nondeterministic ops outside of it: closed on every path."""

from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from det_callbacks.callback.evidence import Evidence
from det_callbacks.callback.session import Session, StepHooks
from det_callbacks.errors import TraceError
from det_callbacks.observers import Observations, activate, deactivate
from det_callbacks.replaced_in_lightning import ReplacedInLightning
from det_callbacks.settings import DeterminismSettings, settings_in_force
from det_callbacks.trace.hash_mode import HashMode
from det_callbacks.trace.nondeterministic_ops import NondeterministicOps, NondeterministicOpWatch


class OpWatch:
    """Attributes nondeterministic ops to module and line, in training, validation, test and prediction alike.

    Where a trace at level op is open, the trace does it. Elsewhere a dispatch mode of its own does, some 5 microseconds
    an op, and only while torch's deterministic algorithms are on.

    Attributes:
        found: the ops that were called; None while deterministic algorithms are off.
    """

    def __init__(self) -> None:
        self.found: NondeterministicOps | None = None
        self._watch: NondeterministicOpWatch | None = None

    def begin(self, settings: DeterminismSettings | None, pl_module: pl.LightningModule) -> None:
        """Begin anew, for a fit or another stage."""
        self.end()
        self.found = None
        if settings_in_force()["deterministic_algorithms"] != "disabled":
            self.found = NondeterministicOps(() if settings is None else settings.allow)
            self._watch = NondeterministicOpWatch(self.found, pl_module)

    def open(self) -> None:
        """Watch from here on."""
        if self._watch is not None:
            self._watch.open()

    def close(self) -> None:
        """Watch no longer; may be called more than once."""
        if self._watch is not None:
            self._watch.close()

    def end(self) -> None:
        """The stage is over; may be called more than once."""
        self.close()
        self._watch = None
        if self.found is not None:
            self.found.close()


class Tracing(StepHooks):
    """Traces the selected steps of a fit that begins, and hands them to its session.

    Args:
        trainer: that trains.
        session: what the steps are handed to; it knows what is traced, and how the fit began.
        name: of the session, for messages.
        ops: collects ops without a deterministic implementation; None where nothing does.
        own: the callback that this is for.
    """

    def __init__(
        self, trainer: pl.Trainer, session: Session, *, name: str, ops: NondeterministicOps | None, own: pl.Callback
    ) -> None:
        self._session = session
        self._selection = selection = session.stage.selection
        self._ops = ops
        # A resumed step is recorded as one in the middle is, so that it can be compared with the same uninterrupted.
        self._is_first = not session.stage.is_resumed
        self._evidence = Evidence(trainer, own)
        self._hash_mode = HashMode.for_training(trainer.lightning_module, selection)
        recorder = self._hash_mode.recorder
        recorder.nondeterministic_ops = ops
        recorder.output_hooks = tuple(hook for hook in (session.op_replay, session.keeper) if hook is not None)
        self._observations = Observations(
            recorder, owner=name, level=selection.level, is_every_step=selection.is_every_step
        )
        activate(self._observations)
        self._replaced = ReplacedInLightning()
        self._evidence.attach()
        if ops is not None:
            ops.on_new = self._put_ops

    @override
    def attach(self, trainer: pl.Trainer) -> None:
        self._evidence.check_loaders()
        self._hash_mode.optimizers = list(trainer.optimizers)
        self._replaced.put(trainer.strategy, "training_step", self._hash_mode.marks_forward)
        # Lightning makes its sums when a name is first logged and clears them at an epoch's first batch, so a step that
        # comes first after a resume has ops that the same step of the uninterrupted run has not
        results: Any = trainer.fit_loop.epoch_loop._results
        for name in ("log", "reset"):
            self._replaced.put(results, name, self._hash_mode.leaves_out)

    @override
    def mark(self, point: str) -> None:
        self._evidence.mark(point)

    @override
    def begin_step(self, step: int, batch: Any) -> None:
        if not self._selection.selects_step(step):
            self._evidence.begin_step(batch)
            return
        expected = self._session.expectation(step, self._hash_mode.digest_state)
        # one that an exception had ended is done again after a resume; a step that was chosen by number is the same one
        # whether its fit came to it from the start or from a checkpoint
        is_first = step == 0 or (self._is_first and self._selection.only_steps is None)
        self._hash_mode.begin(batch=batch, is_first=is_first, expected=expected)
        self._observations.begin(self._session.replay)
        self._evidence.begin_step(batch)

    @override
    def note_loss(self, loss: Any) -> None:
        self.mark("after forward")
        self._hash_mode.record_values("forward", loss, "loss")

    @override
    def begin_gradients(self) -> None:
        self._hash_mode.recorder.phase = "gradient"

    @override
    def end_step(self, step: int, epoch: int, outputs: Any) -> bool:
        self.mark("batch end")
        if not self._hash_mode.is_open:
            self._session.put_evidence(self._evidence.take(step))
            return False
        self._hash_mode.record_values("state", outputs, "outputs")
        self._observations.end()
        trace = self._hash_mode.finish()
        self._evidence.note_samples(self._hash_mode.sketch)
        self._session.put_evidence(self._evidence.take(step))
        if trace is None:
            raise TraceError(
                f"Step {step} could not be traced, because a dispatch mode was left open in it, so nothing after step "
                f"{step - 1} would be recorded or verified. Close that mode within the training step."
            )
        self._is_first = False
        return self._session.add(trace, step=step, epoch=epoch)

    @override
    def drop_step(self) -> None:
        self._observations.drop()
        self._hash_mode.abandon()

    @override
    def flush(self, step: int) -> None:
        self._session.put_evidence(self._evidence.take(step + 1))

    @override
    def close(self) -> None:
        self._evidence.detach()
        self._observations.abandon()
        deactivate(self._observations)
        self._hash_mode.abandon()
        if self._ops is not None and self._ops.found:
            self._put_ops()  # with the number of calls
        self._replaced.restore()

    def _put_ops(self) -> None:
        assert self._ops is not None
        self._session.put_nondeterministic_ops(self._ops.found)
