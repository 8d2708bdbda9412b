"""DeterminismCallback: a training run recorded, or verified against a recorded one."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from det_callbacks.callback.arguments import check_alone, check_processes
from det_callbacks.callback.auditing import Auditing
from det_callbacks.callback.bars import say_beside
from det_callbacks.callback.checkpointing import Checkpointing
from det_callbacks.callback.evidence import Evidence
from det_callbacks.callback.fits import note_ended
from det_callbacks.callback.logged import CALLS
from det_callbacks.callback.loops import after_loading, root_folder
from det_callbacks.callback.manifest import manifest_of
from det_callbacks.callback.metrics import timed
from det_callbacks.callback.options import CallbackOptions
from det_callbacks.callback.recording import Recording
from det_callbacks.callback.run_kinds import new_run
from det_callbacks.callback.tracing import Tracing
from det_callbacks.callback.verifying import Verifying
from det_callbacks.errors import NothingComparedError
from det_callbacks.ranks import ReplicaReport
from det_callbacks.report.fits import no_metrics_text, no_prediction_line
from det_callbacks.tensors.writer import require_room
from det_callbacks.trace.compiled_graphs import COMPILED_GRAPHS


class DeterminismCallback(CallbackOptions):
    """Record a training run, or verify it against a recorded one, bit for bit.

    It changes no bit of the training: weights, losses and generator states are those of a run without it. At level op
    it costs some 10 microseconds an op and a pass over every output at memory speed; see ``recipes/overhead``.

    None for ``level`` to ``compiled``, ``replay`` and ``keep_tensors`` means when recording: level "op", everything,
    all phases, every step, "run", and nothing to replay or keep; when verifying: what the reference was recorded with,
    and any other value is refused.

    Args:
        reference: folder of the reference: written by record, read by verify. Relative to the working directory.
            None for an audit, which needs none.
        mode: "record" writes the reference, "verify" compares with it, "audit" runs ops again to find which are
            nondeterministic, "disabled" does nothing.
        current: verify: folder for the verdict and the diverging steps, by default ``determinism/verify-NNN`` below
            the Trainer's log directory; audit: for ``audit.json`` and ``replay.yaml``, ``determinism/audit-NNN``.
        level: "op" digests every op output of the chosen modules, "module" their outputs and output gradients,
            "state" only batch, loss, gradients, parameters, buffers and optimizer state. Each holds the ones below.
        modules: fnmatch patterns over qualified module names; "*" is everything, ops outside any module included. What
            the module logs is compared as well, but for metrics that a pattern such as "!metric/epoch_time" leaves out.
        phases: among "forward", "backward" and "optimizer".
        every_n_steps: steps whose number is a multiple of it are recorded.
        only_steps: the steps that are recorded, by number (those that a verdict asks for), instead of every n-th. The
            others are not traced. Audit: the steps whose ops are run again, by default the first three.
        compiled: "run": of what torch.compile compiled the ends of each region are recorded, and the ops seen inside;
            "eager": the recorded steps run under ``torch.compiler.set_stance("force_eager")``, with other kernels than
            the compiled ones, so that every op is recorded.
        steps: verify: "all" demands exactly the reference's steps, "common" compares those that both runs have.
        on_divergence: verify: "raise" stops at the first diverging step, "collect" goes on and raises at the end,
            "warn" goes on and ends with a warning.
        settings: checked to be in force before training; None checks nothing. Recorded in either case. Enforce them
            with ``enforce_determinism`` before the model is built (the Hydra preset does).
        replay: ops whose outputs are saved while recording and put back while verifying: ``[phase/][module:]op``
            patterns, or the path of a YAML file with a list of them, such as the ``replay.yaml`` of an audit.
        keep_tensors: ops whose outputs, and what they read, are kept with each step (verify: that differs), so that a
            verdict says by how much they differ: ``[phase/][module:]op`` patterns.
        tensor_budget_mib: MiB that one step of a process may save for replay, and MiB that it may keep. What replay
            cannot save is a ReplayError; what is not kept is said.
        resume: a fit with ``ckpt_path``: "exact" puts generators, data and accumulated gradients back where the
            uninterrupted run had them, and refuses where that is not possible; "warn" does what is possible; "plain"
            leaves all that to Lightning.
        audit_replicas_every_n_steps: several processes: how often their replicas are compared with each other, see
            ``ReplicaAuditCallback``; 0 never.
        overwrite: record: replace a run that is there.
        log_metrics: record, verify: give the Trainer's loggers ``determinism/*`` metrics every ``log_every_n_steps``
            and at the end, and its progress bar a word; on rank 0. They cannot be monitored.

    Attributes:
        verdict: the Verdict of a verification, or of a resumed recording that disagrees with its run; None before the
            end of a fit, in other cases, and while the reference holds more fits (or tests) than have run and nothing
            differs.
        replica_report: the ReplicaReport of the last audit of the replicas; None before the first.
        audit_report: the AuditReport of an audit; None before the end of a fit and in other modes.
        choices: what else was decided for the run, recorded in its environment (see ``capture_environment``).

    Raises:
        SelectionError, SettingsError: an argument is not one of the allowed ones (at construction).
        DivergenceError: the run is not the reference (verify), or not what it goes on with (record, resumed).
        NotComparableError: it differs, and so does the machine in a way that can change bits.
        ReferenceNotFoundError, ReferenceFormatError: the reference is missing, incomplete or damaged.
        ReplayError: what is to be saved is larger than the budget, or the disk.
        RunExistsError: record would write over a run.
        ReplicaError: ranks that have to hold the same parameters, buffers or optimizer state do not.
        AuditError: an audited op differed from itself (at the end of the fit; ``.report`` says what).
        CheckpointMismatchError: a checkpoint that is to be loaded is not what was saved.
        CheckpointFormatError, CheckpointNotFoundError: it, or what stands beside it, is damaged or missing.
        NotResumableError: a checkpoint cannot be resumed to the same run (``resume="exact"``).

    Example:
        >>> trainer = Trainer(callbacks=[DeterminismCallback("refs/run1", mode="record")])  # doctest: +SKIP
    """

    @property
    def replica_report(self) -> ReplicaReport | None:
        """The report of the last audit of the replicas; None before the first."""
        return self._replicas.report

    # before training

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.mode == "disabled":
            return
        if self._checkpointing is None:
            self._checkpointing = Checkpointing(resume=self.resume)
        self._checkpointing.begin_stage(trainer)
        self._call = None
        COMPILED_GRAPHS.follow(self)  # now: a validation may compile the model before a step is traced
        if stage != TrainerFn.FITTING:
            if self.mode != "audit":
                self._set_up_call(trainer, pl_module, CALLS.get(TrainerFn(stage)))
            self._begin_alerts(self.settings, pl_module)
            return
        self._together.begin(trainer)
        self._together.do(lambda: self._check_fit(trainer, pl_module), task="checking the settings")
        self._begin_alerts(self.settings, pl_module)
        run = self._run = self._run or new_run(self, self._together)
        if isinstance(run, Verifying):
            self.selection = run.check_reference(root=lambda: root_folder(trainer))

    def _set_up_call(self, trainer: pl.Trainer, pl_module: pl.LightningModule, call: str | None) -> None:
        """Make ready for the metrics of a test or a validation outside of a fit; a prediction has none."""
        if call is None:
            if self._run is None and trainer.is_global_zero:
                say_beside(trainer, no_prediction_line(self.reference))
            return
        self._together.begin(trainer)
        self._together.do(lambda: self._check_fit(trainer, pl_module), task="checking the settings")
        run = self._run = self._run or new_run(self, self._together)
        if isinstance(run, Verifying):
            self.selection = run.check_reference(root=lambda: root_folder(trainer))
        self._call = call

    @override
    def _begin_call(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._call is not None and not self._is_fitting:
            self._begin_part(trainer, pl_module, is_resumed=False, call=self._call)

    def _begin_part(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *, is_resumed: bool, call: str | None = None
    ) -> Mapping[str, Any]:
        """Open the run for a fit, or for what ``call`` says; return what run.json says of it."""
        run = self._run
        assert isinstance(run, Recording | Verifying), "an audit has no parts"
        run.say = partial(say_beside, trainer)
        manifest = manifest_of(
            trainer,
            pl_module,
            selection=self.selection,
            allow=() if self.settings is None else self.settings.allow,
            choices=self.choices,
            replay=self.replay,
            keep=self.keep_tensors,
        )
        self._together.check_start(trainer, pl_module, manifest, with_weights=call is None)
        self.verdict = None
        if isinstance(run, Recording):
            run.begin_fit(manifest, self.selection, is_resumed=is_resumed, call=call)
        else:
            run.begin_fit(manifest, self.selection, root=root_folder(trainer), is_resumed=is_resumed, call=call)
        self._is_fitting = True
        self._begin_logged(is_resumed=is_resumed)
        return manifest

    def _check_fit(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_alone([other for other in vars(trainer)["callbacks"] if isinstance(other, DeterminismCallback)])
        check_processes(self.mode, trainer.world_size)
        if self.settings is not None:
            self._inherited.require(self.settings, pl_module)
        if self.mode == "record" and self.replay:
            assert self.reference is not None, "checked"
            require_room(self.reference, self.tensor_budget_mib)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        after_loading(trainer, partial(self._begin_fit, trainer, pl_module))

    @timed
    def _begin_fit(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        run = self._run
        if run is None:
            return
        run.say = partial(say_beside, trainer)
        self.selection.check_modules([name for name, _ in pl_module.named_modules()])
        assert self._checkpointing is not None, "setup was called"
        begin_checkpoints = partial(self._checkpointing.begin_fit, run, mode=self.mode, reference=self.reference)
        if isinstance(run, Auditing):
            self.audit_report = None
            run.begin_fit(trainer, pl_module)
            begin_checkpoints()
            self._is_fitting = True
            return
        is_resumed = trainer.ckpt_path is not None
        manifest = self._begin_part(trainer, pl_module, is_resumed=is_resumed)
        begin_checkpoints(environment=manifest["environment"])
        evidence = Evidence()
        self._trace = Tracing(
            pl_module, run, selection=self.selection, alerts=self._alerts, evidence=evidence, is_resumed=is_resumed
        )
        evidence.attach(trainer, own=self)
        if self.log_metrics:
            self._metrics.begin_fit(trainer, is_recording=isinstance(run, Recording))

    @override
    @timed
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(self._run, Auditing):
            self._run.attach(trainer)
        if self._trace is not None:
            self._trace.attach(trainer)
        if self._run is not None:
            self._replicas.begin(trainer)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._logs_in_fit:
            self._stop_together(differs=self._read_epoch(trainer))
            self._is_whole_epoch = True
        self._mark("epoch start")
        if self._checkpointing is not None:
            self._checkpointing.resuming.begin_epoch()

    # a step

    @override
    @timed
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._is_fitting:
            return
        self._close_step()  # one that a module ended by returning -1
        self._step = trainer.fit_loop.epoch_loop.total_batch_idx
        self._note_first_step(trainer)
        if self._trace is None or self.selection.level != "op" or not self.selection.selects_step(self._step):
            self._open_watch()
        if isinstance(self._run, Auditing):
            self._run.begin_step(self._step)
        elif self._trace is not None:
            self._trace.begin_step(self._step, batch)

    @override
    @timed
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self._trace is not None:
            self._trace.note_loss(loss)

    @override
    @timed
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self._trace is not None:
            self._trace.begin_gradients()
        elif isinstance(self._run, Auditing):
            self._run.before_optimizer()

    @override
    @timed
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if isinstance(self._run, Auditing):
            self._run.end_step(self._step)
        self._close_watch()
        if self._trace is None:
            return
        differs = self._trace.end_step(self._step, trainer.current_epoch, outputs)
        self._metrics.after_step(self._trace)
        error = self._replicas.after_step(self._step)
        may_stop = self._trace.may_stop
        if self._together.stops_after(self._step, differs=differs, may_stop=may_stop, is_last=error is not None):
            self._end_fit(is_resumed=True, is_early=True)  # raises what differs from the reference, which says more
        if error is not None:
            raise error

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close_step()
        self._mark("epoch end")
        self._ended_epoch = trainer.current_epoch

    def _close_step(self) -> None:
        if isinstance(self._run, Auditing):
            self._run.end_step(self._step)
        self._close_watch()
        if self._trace is not None:
            self._trace.drop_step()

    # after training

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        error = self._replicas.end()
        if error is not None and isinstance(self._run, Recording):
            raise error  # before the run is complete: it is no reference
        if self._logs_in_fit:
            self._read_epoch(trainer)
        self._end_fit(is_resumed=trainer.ckpt_path is not None)
        if error is not None:
            raise error

    def _end_fit(self, *, is_resumed: bool, is_early: bool = False) -> None:
        if not self._is_fitting:
            return
        if self._trace is not None and not is_early:
            self._trace.end_fit(self._step)
        self._close_trace()
        if isinstance(self._run, Auditing):
            try:
                self._run.end_fit()
            finally:
                self.audit_report = self._run.outcome
            return
        assert self._run is not None
        try:
            self._run.end_fit(is_resumed=is_resumed, is_early=is_early)
        finally:
            self.verdict = self._run.verdict
            self._metrics.end_fit(self.verdict)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave nothing behind on a path that did not reach the end of training."""
        was_fitting, self._call = self._is_fitting, None
        self._close_trace()
        self._metrics.close()
        self._end_alerts()
        COMPILED_GRAPHS.unfollow(self)
        if was_fitting:
            assert self._run is not None
            self._run.stop(type(exception).__name__)
            if not isinstance(self._run, Auditing):
                self.verdict = self._run.verdict
        self._replicas.close()
        self._together.close()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # only a fit that has nothing to train comes here without on_train_end
        self._end_fit(is_resumed=self._call is None and trainer.ckpt_path is not None)
        self._end_alerts()
        COMPILED_GRAPHS.unfollow(self)
        self._replicas.close()
        self._together.close()
        left, self._call = self._call, None
        if left is not None:  # it had no batch
            raise NothingComparedError(no_metrics_text(left, reference=self.reference))

    def _close_trace(self) -> None:
        if self._is_fitting:
            note_ended()
        self._is_fitting = False
        if isinstance(self._run, Auditing):
            self._run.detach()
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.close()
        if self._checkpointing is not None:
            self._checkpointing.end_fit()
