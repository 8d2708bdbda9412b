"""DeterminismCallback: a training run recorded, or verified against a recorded one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from det_callbacks.errors import NothingComparedError, SelectionError
from det_callbacks.integrations.lightning.checkpoint.watch import CheckpointWatch
from det_callbacks.integrations.lightning.logged import CALLS, LoggedMetrics
from det_callbacks.integrations.lightning.progress import ProgressReporter
from det_callbacks.integrations.lightning.replaced import ReplacedInLightning
from det_callbacks.integrations.lightning.trainer import LightningTraining
from det_callbacks.internals.lightning import RESTORE, checkpoint_connector, is_training_done, require
from det_callbacks.internals.twins import join_twins
from det_callbacks.report.fits import no_metrics_text
from det_callbacks.training.following import FollowedRun


@join_twins
class DeterminismCallback(FollowedRun, pl.Callback):
    """Record a training run, or verify it against a recorded one, bit for bit.

    It changes no bit of the training: weights, losses and generator states are those of a run without it. At level op
    it costs some 10 microseconds an op and a pass over every output at memory speed; see ``recipes/overhead``.
    The arguments from ``level`` to ``compiled``, ``replay`` and ``keep_tensors`` are, while None, those that the
    reference was recorded with; a verification refuses others. ``docs/reference/callback.md`` says more of each.

    Args:
        reference: folder of the reference: written by record, read by verify; None for an audit.
        mode: "record" writes the reference, "verify" compares with it, "audit" runs ops twice, "disabled" does nothing.
        current: folder for what verify or audit finds; None is a new one below the Trainer's log directory.
        level: "op" (None) digests every op output of the chosen modules, "module" their outputs and output gradients,
            "state" only batch, loss, gradients, parameters, buffers and optimizer state. Each holds the ones below.
        modules: fnmatch patterns over module names; None is "*", everything; "!metric/NAME" leaves out what is logged.
        phases: among "forward", "backward" and "optimizer"; None is all.
        every_n_steps: steps whose number is a multiple of it are recorded; None is 1.
        only_steps: numbers of the steps that are recorded instead, or audited (None: the first three).
        compiled: of compiled regions "run" (None) records the ends and the ops seen inside; "eager" runs eager code.
        steps: verify: "all" demands exactly the reference's steps, "common" compares those that both runs have.
        on_divergence: "raise" stops at the first diverging step, "collect" raises at the end, "warn" warns there.
        settings: set before training and put back after it; what comes too late is refused by name. None sets nothing.
        replay: ops whose outputs record saves and verify puts back: ``[phase/][module:]op`` patterns, or a YAML file.
        keep_tensors: ops whose outputs are kept, so that a verdict says by how much they differ: such patterns.
        tensor_budget_mib: MiB that one step of a process may save, for replay and to keep, each; of tensors to keep
            that exceed it an even sample of the elements is saved.
        resume: with ``ckpt_path``: "exact" goes on as the uninterrupted run did, or refuses; "plain" is Lightning's.
        audit_replicas_every_n_steps: how often replicas are compared, see ``ReplicaAuditCallback``; 0 never.
        overwrite: record: replace a run that is there, once the new one is whole.
        log_metrics: give the Trainer's loggers ``determinism/*`` metrics, and its progress bar a word.

    Attributes:
        verdict: the Verdict of a verification, or of a resumed recording that disagrees with its run; None before the
            end of a fit, and while the reference holds more fits (or tests) than have run and nothing differs.
        replica_report: the ReplicaReport of the last audit of the replicas; None before the first.
        audit_report: the AuditReport of an audit; None before the end of a fit.
        choices: what else was decided for the run, recorded in its environment (see ``capture_environment``).

    Raises:
        SelectionError, SettingsError: an argument is not one of the allowed ones (at construction), or comes too late.
        ReferenceNotFoundError, ReferenceFormatError, RunExistsError: the reference is missing or damaged, or is there.
        RunInUseError, WriteError: another process writes to the folder; nothing can be written, as on a full disk.
        DivergenceError, NotComparableError: the run is not the reference, or not the run that it resumes.
        ReplayError, ReplicaError, AuditError: too much is saved; replicas differ; an op differs from itself.
        CheckpointMismatchError, CheckpointFormatError: a checkpoint is not what was saved.
        NotResumableError: a checkpoint cannot be resumed to the same run.

    Example:
        >>> trainer = Trainer(callbacks=[DeterminismCallback("refs/run1", mode="record")])  # doctest: +SKIP
    """

    _training: LightningTraining
    gives_way = False  # steps aside where the Trainer has another one

    @override
    def _begin_closed(self) -> None:
        super()._begin_closed()
        join_twins(DeterminismCallback)  # pytorch_lightning may have been imported after this module
        self._logged = LoggedMetrics()
        self._progress = ProgressReporter()
        self._checkpoints: CheckpointWatch | None = None
        self._replaced = ReplacedInLightning()
        self._call: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy takes along: the arguments and the verdict, never the files of a fit under way."""
        # Lightning hangs methods of the module, and so the whole model, on each callback as `log` and `log_dict`.
        options: dict[str, Any] = {"mode": "disabled", "on_divergence": self.on_divergence}
        fresh = vars(type(self)(None, **options, audit_replicas_every_n_steps=self.audit_replicas_every_n_steps))
        return {name: value if name.startswith("_") else vars(self)[name] for name, value in fresh.items()}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.mode == "disabled":
            return
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._checkpoints = CheckpointWatch(trainer, self.resume, self._group)
        self._call = None if self.mode == "audit" else CALLS.get(TrainerFn(stage))
        is_compared = stage == TrainerFn.FITTING or self._call is not None
        self._open_stage(LightningTraining(trainer, self), is_compared=is_compared)

    @override
    def _prepare(self) -> None:
        trainer = self._training.trainer
        require(trainer)
        callbacks = [other for other in vars(trainer)["callbacks"] if isinstance(other, DeterminismCallback)]
        if sum(callback.mode != "disabled" and not callback.gives_way for callback in callbacks) > 1:
            raise SelectionError(
                "This Trainer has two DeterminismCallbacks. Give it one; to record and verify, train twice."
            )
        super()._prepare()

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.mode == "disabled":
            return

        def restore_and_begin(restore: Callable[..., None], *args: Any) -> None:
            self._replaced.restore()
            restore(*args)
            self._begin_training(trainer)

        if trainer.strategy.restore_checkpoint_after_setup:
            # those that shard load now, and until then Lightning does not say whether there is a checkpoint
            connector = checkpoint_connector(trainer)
            self._replaced.put(connector, RESTORE, lambda one: partial(restore_and_begin, one))
        else:
            self._begin_training(trainer)

    def _begin_training(self, trainer: pl.Trainer) -> None:
        assert self._checkpoints is not None, "setup was called"
        self._begin_fit(is_resumed=self._checkpoints.is_resumed)
        session, reference = self._session, None if self.reference is None else str(self.reference)
        run_id = None if session.run is None else session.run.manifest.run_id
        self._checkpoints.begin_fit({"id": run_id, "mode": self.mode, "reference": reference})
        self._follow()
        session.idle_before, self._checkpoints.resuming.reader = self._checkpoints.resuming.idle, session.reader
        if self.log_metrics and self.mode != "audit":
            self._progress.begin_fit(trainer, is_recording=self.mode == "record")

    @override
    def _begin(self, **options: Any) -> None:
        super()._begin(**options)
        self._logged.begin(self._session)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._is_open:
            self._hooks.attach(self._training)
            self._replicas.begin(self._training)

    @override
    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._hooks.mark("before the sanity check")

    @override
    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._hooks.mark("after the sanity check")

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._is_fitting:
            self._stop_together(differs=self._logged.read_epoch(trainer))
            self._logged.whole_epoch = {}
        self._hooks.mark("epoch start")
        if self._checkpoints is not None:
            self._checkpoints.resuming.begin_epoch()

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, *_: Any, **__: Any) -> None:
        if not self._is_open:
            return
        step = trainer.fit_loop.epoch_loop.total_batch_idx
        self._logged.begin_step(trainer, step)
        self._begin_step(step, batch)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._hooks.note_loss(loss)

    @override
    def on_after_backward(self, *_: Any, **__: Any) -> None:
        self._hooks.mark("after backward")

    @override
    def on_before_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._hooks.begin_gradients()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any, **__: Any) -> None:
        if not self._is_open:
            return
        differs = self._hooks.end_step(self._step, trainer.current_epoch, outputs)
        if self._watch is not None:
            self._watch.close()
        self._progress.after_step(self._session.progress())
        if is_training_done(trainer.fit_loop.epoch_loop) or trainer.should_stop:
            self._group.set_place("between")  # after the last batch there may be long validations, saves and hooks
        error = self._replicas.after_step()
        self._stop_together(differs=differs, asks_now=error is not None)  # what differs from the reference says more
        if error is not None:
            raise error

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._group.set_place("between")
        self._hooks.drop_step()
        self._watch_ops(is_on=False)
        self._hooks.mark("epoch end")
        self._logged.ended_epoch = trainer.current_epoch

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._group.set_place("between")
        if not trainer.sanity_checking:
            self._hooks.mark("before validation")
        self._watch_ops(is_on=True)
        if self._call is not None and not self._is_open:
            self._begin(call=self._call)

    @override
    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, *place: Any, **_: Any) -> None:
        if self._is_open:
            self._logged.note_batch(trainer, batch, *place)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._watch_ops(is_on=False)
        if not trainer.sanity_checking:
            self._hooks.mark("after validation")
        session, call, epoch = self._session, self._call, trainer.current_epoch
        if trainer.sanity_checking:
            self._logged.first_batches = {}  # Lightning throws away what is logged there
        elif call is not None and self._is_open:
            self._logged.read(trainer, call, session.num_calls(call), epoch=epoch)
            session.stages.append(call)
            self._call = None
            self._end()
        elif self._is_fitting and not self._logged.is_resuming:
            self._stop_together(differs=self._logged.read(trainer, "validation", self._logged.step, epoch=epoch))

    on_test_start, on_test_batch_start = on_validation_start, on_validation_batch_start
    on_test_end = on_validation_end
    on_predict_start, on_predict_end = on_validation_start, on_validation_end  # predictions log no metrics

    @property
    def _is_fitting(self) -> bool:
        return self._is_open and self._call is None

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._checkpoints is not None:
            self._checkpoints.resuming.end_training()
        error = self._replicas.end()
        if error is not None and self.mode == "record":
            raise error  # before the run is complete: it is no reference
        if self._is_fitting:
            self._logged.read_epoch(trainer)
        self._end()
        if error is not None:
            raise error

    @override
    def _end(self, *, is_early: bool = False) -> None:
        if not self._is_open:
            return
        try:
            super()._end(is_early=is_early)
        finally:
            self._progress.end_fit(self.verdict)

    @override
    def _close_fit(self) -> None:
        self._replaced.restore()
        super()._close_fit()
        if self._checkpoints is not None:
            self._checkpoints.resuming.detach()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._call = None
        self._progress.close()
        self._stop(exception)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        try:
            self._end()  # only a fit that has nothing to train comes here without on_train_end
        finally:
            self._stage.close()
        left, self._call = self._call, None
        if left is not None:  # it had no batch
            raise NothingComparedError(no_metrics_text(left, reference=self.reference))
