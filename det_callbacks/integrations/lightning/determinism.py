"""DeterminismCallback: a training run recorded, or verified against a recorded one."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from det_callbacks.audit import AuditReport
from det_callbacks.errors import DetCallbacksError, NothingComparedError
from det_callbacks.integrations.lightning.checkpoint.watch import CheckpointWatch
from det_callbacks.integrations.lightning.logged import CALLS, LoggedMetrics
from det_callbacks.integrations.lightning.progress import ProgressReporter, print_beside_bar
from det_callbacks.integrations.lightning.replaced import ReplacedInLightning
from det_callbacks.integrations.lightning.replica_audit import Replicas, raise_if
from det_callbacks.internals.lightning import RESTORE, checkpoint_connector, is_training_done, require
from det_callbacks.internals.versions import newer_than_tested
from det_callbacks.ranks.group import RankGroup, require_same_start
from det_callbacks.ranks.replicas import ReplicaReport
from det_callbacks.report.fits import no_metrics_text
from det_callbacks.settings import enforce_around_training, settings_in_force
from det_callbacks.tensors.copies import require_room
from det_callbacks.trace.nondeterministic_ops import NondeterministicOps, NondeterministicOpWatch
from det_callbacks.trace.replaced import REPLACED
from det_callbacks.training.arguments import CallbackArguments, manifest_of, replicated_weights
from det_callbacks.training.auditing import Auditing
from det_callbacks.training.fits import note_fit
from det_callbacks.training.recording import Recording
from det_callbacks.training.session import Session
from det_callbacks.training.verifying import Verifying
from det_callbacks.verdict import Verdict

_RAISING = ("det_callbacks.integrations", "det_callbacks.training", "det_callbacks.checkpoint")


class DeterminismCallback(CallbackArguments):
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
        tensor_budget_mib: MiB that one step of a process may save, for replay and to keep together.
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
        DivergenceError, NotComparableError: the run is not the reference, or not the run that it resumes.
        ReplayError, ReplicaError, AuditError: too much is saved; replicas differ; an op differs from itself.
        CheckpointMismatchError, CheckpointFormatError: a checkpoint is not what was saved.
        NotResumableError: a checkpoint cannot be resumed to the same run.

    Example:
        >>> trainer = Trainer(callbacks=[DeterminismCallback("refs/run1", mode="record")])  # doctest: +SKIP
    """

    @override
    def _begin_closed(self) -> None:
        self.verdict: Verdict | None = None
        self.audit_report: AuditReport | None = None
        self._group = RankGroup()
        self._session = self._hooks = Session()  # the hooks are the session's while a fit is open
        self._stage = ExitStack()  # what is closed when a fit, or another stage, is over
        self._ops: NondeterministicOps | None = None
        self._watch: NondeterministicOpWatch | None = None
        self._logged = LoggedMetrics()
        self._progress = ProgressReporter()
        self._replicas = Replicas(self.audit_replicas_every_n_steps, self.on_divergence)
        self._checkpoints: CheckpointWatch | None = None
        self._replaced = ReplacedInLightning()
        self._is_open = False
        self._call: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy takes along: the arguments and the verdict, never the files of a fit under way."""
        # Lightning hangs methods of the module, and so the whole model, on each callback as `log` and `log_dict`.
        options: dict[str, Any] = {"mode": "disabled", "on_divergence": self.on_divergence}
        fresh = vars(type(self)(None, **options, audit_replicas_every_n_steps=self.audit_replicas_every_n_steps))
        return {name: value if name.startswith("_") else vars(self)[name] for name, value in fresh.items()}

    @property
    def replica_report(self) -> ReplicaReport | None:
        """The report of the last audit of the replicas; None before the first."""
        return self._replicas.replica_report

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.mode == "disabled":
            return
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._checkpoints = CheckpointWatch(trainer, self.resume, self._group)
        self._stage.close()
        self._stage.callback(REPLACED.unfollow, self)
        REPLACED.follow(self)  # now: a validation may compile the model before a step is traced
        self._call = None if self.mode == "audit" else CALLS.get(TrainerFn(stage))
        if stage == TrainerFn.FITTING or self._call is not None:
            self._stage.callback(self._group.close)
            self._stage.callback(self._replicas.close)
            self._group.open(trainer.world_size)
            self._group.run_on_all(partial(self._prepare, trainer, pl_module), task="checking the settings")
            if self._session.is_over:
                kind = {"record": Recording, "verify": Verifying, "audit": Auditing}[self.mode]
                self._session = kind(self, self._group)
            self._session.root = Path(trainer.log_dir or trainer.default_root_dir)  # told by rank 0 to all
            self.selection = self._session.prepare()
        self._ops = self._watch = None
        if settings_in_force()["deterministic_algorithms"] != "disabled":
            self._ops = NondeterministicOps(() if self.settings is None else self.settings.allow)
            self._watch = NondeterministicOpWatch(self._ops, pl_module)
            self._stage.callback(self._ops.close)
            self._stage.callback(self._watch.close)

    def _prepare(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check what all ranks check alike, and put the settings in force."""
        require(trainer)
        self.check_trainer(trainer)
        if self.settings is not None:
            self._stage.callback(enforce_around_training(self.settings, pl_module).restore)
        if self.mode == "record" and self.replay and self.reference is not None:
            require_room(self.reference, self.tensor_budget_mib)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.mode == "disabled":
            return
        begin = partial(self._begin_fit, trainer, pl_module)

        def restore_and_begin(restore: Callable[..., None], *args: Any) -> None:
            self._replaced.restore()
            restore(*args)
            begin()

        if trainer.strategy.restore_checkpoint_after_setup:
            # those that shard load now, and until then Lightning does not say whether there is a checkpoint
            connector = checkpoint_connector(trainer)
            self._replaced.put(connector, RESTORE, lambda one: partial(restore_and_begin, one))
        else:
            begin()

    def _begin_fit(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.selection.check_modules([name for name, _ in pl_module.named_modules()])
        assert self._checkpoints is not None, "setup was called"
        for line in newer_than_tested() if trainer.is_global_zero else ():
            print_beside_bar(trainer, f"det_callbacks: {line}")
        self._begin(trainer, pl_module, is_resumed=self._checkpoints.is_resumed)
        session, reference = self._session, None if self.reference is None else str(self.reference)
        run_id = None if session.run is None else session.run.manifest.run_id
        self._checkpoints.begin_fit({"id": run_id, "mode": self.mode, "reference": reference})
        session.follow(trainer, self._ops)
        self._hooks = session
        if self.log_metrics and self.mode != "audit":
            self._progress.begin_fit(trainer, is_recording=self.mode == "record")

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule, **options: Any) -> None:
        session = self._session
        session.print_line = partial(print_beside_bar, trainer)
        session.manifest = manifest_of(trainer, pl_module, self)
        # what is no fit broadcasts no weights
        weights = None if "call" in options else replicated_weights(trainer, pl_module)
        require_same_start(self._group, session.manifest, weights)
        self.verdict = self.audit_report = None
        session.begin(**options)
        self._is_open = True
        note_fit()
        self._logged.begin(session)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._hooks.attach(trainer)
        if self._is_open:
            self._replicas.begin(trainer)

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
        self._group.set_place("step")
        self._hooks.drop_step()  # one that a module ended by returning -1
        step = trainer.fit_loop.epoch_loop.total_batch_idx
        self._logged.begin_step(trainer, step)
        sees_ops = self.mode != "audit" and self.selection.level == "op" and self.selection.selects_step(step)
        self._watch_ops(is_on=not sees_ops)
        self._hooks.begin_step(step, batch)

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
        step = self._logged.step
        differs = self._hooks.end_step(step, trainer.current_epoch, outputs)
        self._watch_ops(is_on=False)
        self._progress.after_step(self._session.progress())
        if is_training_done(trainer.fit_loop.epoch_loop) or trainer.should_stop:
            self._group.set_place("between")  # after the last batch there may be long validations, saves and hooks
        error = self._replicas.after_step(trainer)
        self._stop_together(differs=differs, asks_now=error is not None)  # what differs from the reference says more
        raise_if(error)

    def _stop_together(self, *, differs: bool, asks_now: bool = True) -> None:
        """End the fit on all ranks where something differed on one of them."""
        may_stop = self._session.may_stop
        if self._group.stops_after(self._logged.step, differs=differs, may_stop=may_stop, asks_now=asks_now):
            self._end(is_early=True)

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
            self._begin(trainer, pl_module, call=self._call)

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
        error = self._replicas.end(trainer)
        if self.mode == "record":
            raise_if(error)  # before the run is complete: it is no reference
        if self._is_fitting:
            self._logged.read_epoch(trainer)
        self._end()
        raise_if(error)

    def _end(self, *, is_early: bool = False) -> None:
        if not self._is_open:
            return
        if not is_early:
            self._hooks.flush(self._logged.step + 1)
        self._close_fit()
        try:
            self._session.end(is_early=is_early)
        finally:
            self.verdict, self.audit_report = self._session.verdict, self._session.audit_report
            self._progress.end_fit(self.verdict)

    def _close_fit(self) -> None:
        """Leave no trace open, and loops and loaders as they were."""
        self._is_open = False
        self._replaced.restore()
        hooks, self._hooks = self._hooks, Session()
        hooks.close()
        if self._checkpoints is not None:
            self._checkpoints.resuming.detach()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        note_fit(ended_by=exception)
        frames = walk_tb(exception.__traceback__) if isinstance(exception, DetCallbacksError) else ()
        packages = (frame.f_globals.get("__package__") or "" for frame, _ in frames)
        if any(package.startswith(_RAISING) for package in packages):
            exception.__traceback__ = exception.__cause__ = None  # it says where; frames of ours and the loops bury it
        was_open, self._call = self._is_open, None
        self._close_fit()
        self._progress.close()
        try:
            if was_open:
                self._session.stop(type(exception).__name__)
                self.verdict, self.audit_report = self._session.verdict, self._session.audit_report
        finally:
            self._stage.close()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        try:
            self._end()  # only a fit that has nothing to train comes here without on_train_end
        finally:
            self._stage.close()
        left, self._call = self._call, None
        if left is not None:  # it had no batch
            raise NothingComparedError(no_metrics_text(left, reference=self.reference))

    def _watch_ops(self, *, is_on: bool) -> None:
        """Watch for nondeterministic ops outside of the trace, if at all; closed more than once."""
        if self._watch is not None:
            (self._watch.open if is_on else self._watch.close)()
