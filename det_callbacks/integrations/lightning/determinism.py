"""DeterminismCallback: records a training run, or verifies it against a recorded one."""

from collections.abc import Callable
from functools import cache
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from det_callbacks.errors import NothingComparedError, SelectionError
from det_callbacks.integrations.command import (
    claim_run,
    print_errors_plainly,
    read_arguments,
    report_to_command,
)
from det_callbacks.integrations.lightning.checkpoint.watch import CheckpointWatch
from det_callbacks.integrations.lightning.logged import (
    CALLS,
    LoggedMetrics,
    ProgressReporter,
    print_beside_bar,
)
from det_callbacks.integrations.lightning.trainer import LightningEvaluation, LightningTraining
from det_callbacks.internals.lightning import (
    RESTORE,
    checkpoint_connector,
    is_training_done,
    join_twins,
    require,
)
from det_callbacks.internals.replaced import ReplacedMethods
from det_callbacks.report.closing_lines import no_batch_text, no_metrics_text, no_stage_text
from det_callbacks.training.following import FollowedRun
from det_callbacks.training.recording import stop_waiting, wait


@join_twins
class DeterminismCallback(FollowedRun, pl.Callback):
    """Record a training run, or verify it bit for bit against a recorded one.

    The callback changes no bits of the training. Level op costs about 10 microseconds an op, and a
    pass over every output at memory speed; see ``recipes/overhead``. A verification takes the
    arguments from ``level`` to ``compiled``, ``replay`` and ``keep_tensors`` from the reference,
    and refuses different ones. ``docs/reference/callback.md`` has details on each argument.

    Args:
        reference: folder of the reference, written by record and read by verify,
            or None for an audit.
        mode: "record" writes the reference, "verify" compares with it, "audit" runs ops twice,
            "disabled" does nothing.
        current: folder for the results of verify or audit; by default a new one below the Trainer's
            log directory.
        level: "op" (default) digests every op output of the chosen modules, "module" their outputs
            and output gradients, "state" the batch, loss, gradients, parameters, buffers and
            optimizer state. Each level includes those after it.
        modules: fnmatch patterns for module names; default "*". "!metric/NAME" excludes a logged
            value.
        phases: some of "forward", "backward" and "optimizer"; all by default.
        every_n_steps: record steps whose number is a multiple of this; 1 by default.
        only_steps: record only these step numbers, or audit them (by default the first three).
        compiled: "run" (default) records inputs and outputs of compiled regions, and the ops seen
            inside; "eager" runs the eager code instead.
        steps: "all" requires exactly the reference's steps, "common" compares the steps that both
            runs have.
        on_divergence: "raise" stops at the first diverging step, "collect" raises at the end,
            "warn" warns at the end.
        settings: in force during training, and restored after it;
            an error if one can no longer take effect.
        replay: ops whose outputs record saves and verify restores: ``[phase/][module:]op``
            patterns, or a YAML file.
        keep_tensors: the same patterns, for ops whose outputs are kept to report distances.
        tensor_budget_mib: MiB that a process may save in a step for replay, and again for
            keep_tensors, which saves an even sample of the elements if the tensors exceed it.
        resume: with ``ckpt_path``, "exact" continues like the uninterrupted run or refuses; "plain"
            is Lightning's resume.
        audit_replicas_every_n_steps: how often to compare replicas, see ``ReplicaAuditCallback``; 0
            means never.
        overwrite: replace a recorded run once the process has ended well, or opens the folder.
        log_metrics: log ``determinism/*`` metrics, and show a status in the progress bar.
        stages: calls of the Trainer that are recorded step by step: some of "fit", "validate",
            "test" and "predict". If fits are recorded, a ``validate`` or ``test`` that is not
            listed is recorded by its metrics.

    Attributes:
        verdict: the Verdict of a verification, or of a resumed recording that differs from its run.
            None before the end of a fit, and while nothing differs but fits or tests of the
            reference are still missing.
        replica_report: the ReplicaReport of the last audit of the replicas, or None.
        audit_report: the AuditReport of an audit, or None before the end of a fit.
        choices: additional entries for the recorded environment (see ``capture_environment``).

    Raises:
        SelectionError, SettingsError: an argument is not allowed (at construction),
            or can no longer take effect.
        ReferenceNotFoundError, ReferenceFormatError, RunExistsError: the reference is missing or
            damaged, or the folder already holds a run.
        RunInUseError, WriteError: another process writes to the folder; the folder cannot be
            written, for example because the disk is full.
        DivergenceError, NotComparableError: the run does not match the reference,
            or the run that it resumes.
        ReplayError, ReplicaError, AuditError: the tensors exceed the budget; replicas differ; an op
            does not repeat its bits.
        CheckpointMismatchError, CheckpointFormatError: a checkpoint does not match its digests.
        NotResumableError: a checkpoint cannot be resumed to the same run.

    Examples:
        >>> def fit(mode):
        ...     with enforce_determinism({"seed": 0}):
        ...         callback = DeterminismCallback("refs/boring", mode=mode)
        ...         Trainer(callbacks=[callback], max_steps=3, **quiet).fit(BoringModel())
        ...     return callback.verdict
        >>> fit("record")
        det_callbacks: recorded 3 steps, ...
        >>> fit("verify").verdict
        det_callbacks: match: verified 3 steps, ...
        'match'
    """

    _training: LightningTraining
    gives_way = False  # whether this callback leaves the Trainer to another one

    @override
    def _reset(self) -> None:
        super()._reset()
        join_twins(DeterminismCallback)  # pytorch_lightning may be imported later than this module
        self._logged = LoggedMetrics()
        self._progress = ProgressReporter()
        self._checkpoints: CheckpointWatch | None = None
        self._num_before = 0  # steps of the reference before the first one of a resumed fit
        self._replaced = ReplacedMethods()
        self._call: str | None = None  # of which only the metrics are compared
        self._evaluation: str | None = None  # "validate" or the like, of which each batch is a step

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments and the verdict, without the files of a fit."""
        # without `log` and `log_dict`, which Lightning sets on each
        # callback to methods of the module
        options: dict[str, Any] = {"mode": "disabled", "on_divergence": self.on_divergence}
        fresh = vars(
            type(self)(
                None, **options, audit_replicas_every_n_steps=self.audit_replicas_every_n_steps
            )
        )
        return {
            name: value if name.startswith("_") else vars(self)[name]
            for name, value in fresh.items()
        }

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.mode == "disabled":
            return
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._checkpoints = CheckpointWatch(trainer, self.resume, self._group)
        call = TrainerFn(stage)
        is_recorded = call in self.stages
        training = LightningTraining(trainer, self)
        self._call = self._evaluation = None
        if call != TrainerFn.FITTING and is_recorded:
            training = LightningEvaluation(trainer, self, call.value)
            self._evaluation = call.value
        elif self.mode != "audit" and TrainerFn.FITTING in self.stages:
            self._call = CALLS.get(call)
        is_compared = is_recorded or self._call is not None
        if not is_compared and self.stages != ("fit",) and not self._session.stages:
            wait(self, self._nothing_of_its_stages)
        self._open_stage(training, is_compared=is_compared)

    def _nothing_of_its_stages(self) -> NothingComparedError:
        return NothingComparedError(no_stage_text(self.stages, reference=self.reference))

    @override
    def _prepare(self) -> None:
        trainer = self._training.trainer
        require(trainer)
        callbacks = [
            other for other in vars(trainer)["callbacks"] if isinstance(other, DeterminismCallback)
        ]
        if (
            sum(callback.mode != "disabled" and not callback.gives_way for callback in callbacks)
            > 1
        ):
            raise SelectionError(
                "This Trainer has two DeterminismCallbacks. Use only one; to record and verify, "
                "train twice."
            )
        super()._prepare()

    @override
    def on_fit_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if self.mode == "disabled" or TrainerFn.FITTING not in self.stages:
            return

        def restore_and_begin(restore: Callable[..., None], *args: Any) -> None:
            self._replaced.restore()
            restore(*args)
            self._begin_training(trainer)

        if trainer.strategy.restore_checkpoint_after_setup:
            # sharding strategies load now; only then is it known whether they resume
            connector = checkpoint_connector(trainer)
            self._replaced.around(connector, RESTORE, restore_and_begin)
        else:
            self._begin_training(trainer)

    def _begin_training(self, trainer: pl.Trainer) -> None:
        assert self._checkpoints is not None, "setup was called"
        self._begin_fit(is_resumed=self._checkpoints.is_resumed)
        self._checkpoints.begin_fit(self._identity())
        self._follow()
        resuming = self._checkpoints.resuming
        self._session.idle_before = resuming.idle
        resuming.reader = self._session.reader
        if self.log_metrics and self.mode != "audit":
            self._progress.begin_fit(trainer, is_recording=self.mode == "record")

    @override
    def _begin(self, **options: Any) -> None:
        stop_waiting(self)
        super()._begin(**options)
        self._num_before = 0
        self._logged.begin(self._session)

    @override
    def on_train_start(self, *_: Any, **__: Any) -> None:
        if self._is_open:
            self._hooks.attach(self._training)
            self._replicas.begin(self._training)

    @override
    def on_sanity_check_start(self, *_: Any, **__: Any) -> None:
        self._hooks.mark("before the sanity check")

    @override
    def on_sanity_check_end(self, *_: Any, **__: Any) -> None:
        self._hooks.mark("after the sanity check")

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if self._is_fitting:
            self._stop_together(differs=self._logged.read_epoch(trainer))
            self._logged.whole_epoch = ()
        self._hooks.mark("epoch start")
        if self._checkpoints is not None:
            self._checkpoints.resuming.begin_epoch()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        if not self._is_open:
            return
        step = trainer.fit_loop.epoch_loop.total_batch_idx
        found = self._hooks.find_resumed(batch)
        if found is not None:  # weights loaded by hand, so the Trainer counts from 0
            self._num_before = found - step
            self._logged.resume(trainer, found)
        step += self._num_before
        self._logged.begin_step(trainer, step)
        self._begin_step(step, batch)

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        self._hooks.note_loss(loss)

    @override
    def on_after_backward(self, *_: Any, **__: Any) -> None:
        self._hooks.mark("after backward")

    @override
    def on_before_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._hooks.begin_gradients()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any, **__: Any
    ) -> None:
        if self._is_open:
            self._end_step(trainer.current_epoch, outputs)

    @override
    def _after_step(self) -> bool:
        self._progress.after_step(self._session.progress())
        trainer = self._training.trainer
        if is_training_done(trainer.fit_loop.epoch_loop) or trainer.should_stop:
            self._group.set_place("between")  # long validations, saves and hooks may follow
        return False

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self._group.set_place("between")
        self._hooks.drop_step()
        self._watch_ops(is_on=False)
        self._hooks.mark("epoch end")
        self._logged.ended_epoch = trainer.current_epoch

    @override
    def on_validation_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self._group.set_place("between")
        if not trainer.sanity_checking:
            self._hooks.mark("before validation")
        self._watch_ops(is_on=True)
        if self._call is not None and not self._is_open:
            self._begin(call=self._call)
        if self._evaluation is not None and not self._is_open:
            self._begin_fit(is_resumed=False, stage=self._evaluation)
            self._follow()
            self._hooks.attach(self._training)
            self._step = -1

    @override
    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, *place: Any, **_: Any
    ) -> None:
        if self._is_open:
            self._logged.note_batch(trainer, batch, *place)
        if self._evaluation is not None:
            step = self._step + 1
            self._logged.begin_evaluation_step(step)
            self._begin_step(step, batch)

    @override
    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any, **__: Any
    ) -> None:
        if self._evaluation is not None and self._is_open:
            self._end_step(trainer.current_epoch, outputs)

    @override
    def on_validation_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self._watch_ops(is_on=False)
        if not trainer.sanity_checking:
            self._hooks.mark("after validation")
        if trainer.sanity_checking:
            self._logged.first_batches = []  # Lightning discards values logged there
        elif self._evaluation is not None and self._is_open:
            self._end_evaluation(trainer, self._evaluation)
        elif self._call is not None and self._is_open:
            self._end_call(trainer, self._call)
        elif self._is_fitting and not self._logged.is_resuming:
            differs = self._logged.read(
                trainer, "validation", self._logged.step, epoch=trainer.current_epoch
            )
            self._stop_together(differs=differs)

    def _end_call(self, trainer: pl.Trainer, call: str) -> None:
        """End a call of ``trainer.validate`` or ``trainer.test``,
        which is compared by its metrics.
        """
        self._logged.read(trainer, call, self._session.num_calls(call), epoch=trainer.current_epoch)
        self._session.stages.append(call)
        self._call = None
        self._end()

    def _end_evaluation(self, trainer: pl.Trainer, stage: str) -> None:
        self._evaluation, call = None, f"trainer.{stage}"
        if call in CALLS.values():  # a prediction logs nothing
            differs = self._logged.read(trainer, call, 0, epoch=trainer.current_epoch)
            self._stop_together(differs=differs)
        self._end()

    on_test_start, on_test_batch_start = on_validation_start, on_validation_batch_start
    on_test_batch_end, on_test_end = on_validation_batch_end, on_validation_end
    on_predict_start, on_predict_batch_start = on_validation_start, on_validation_batch_start
    on_predict_batch_end, on_predict_end = on_validation_batch_end, on_validation_end

    @property
    def _is_fitting(self) -> bool:
        return self._is_open and self._call is None and self._evaluation is None

    @override
    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._checkpoints is not None:
            self._checkpoints.resuming.end_training()
        self._end_training()

    @override
    def _end(self, *, is_early: bool = False) -> None:
        if not self._is_open:
            return
        if self._is_fitting and not is_early:
            self._logged.read_epoch(self._training.trainer)
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
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._call = self._evaluation = None
        self._progress.close()
        self._stop(exception)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        try:
            self._end()  # a fit without steps skips on_train_end
        finally:
            self._stage.close()
        call, evaluation = self._call, self._evaluation
        self._call = self._evaluation = None
        if call is not None:
            raise NothingComparedError(no_metrics_text(call, reference=self.reference))
        if evaluation is not None:
            raise NothingComparedError(
                no_batch_text(f"trainer.{evaluation}", reference=self.reference)
            )


class LaunchedCallback(DeterminismCallback):
    """Records all fits of a script as one run, unless the script has a DeterminismCallback."""

    gives_way = is_of_command = True
    _has_claimed = False

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._is_fitting:
            raise SelectionError(
                "This script trains one model inside the fit of another, but det-callbacks records "
                "fits only one after the other. Add a DeterminismCallback to one Trainer, and "
                "start the script without det-callbacks."
            )
        ours = [one for one in vars(trainer)["callbacks"] if isinstance(one, DeterminismCallback)]
        if any(one.mode != "disabled" and not one.gives_way for one in ours):
            if self._has_claimed:
                raise SelectionError(
                    "One Trainer of this script has a DeterminismCallback and another has none, so "
                    "det-callbacks cannot record them as one run. Add the callback to all "
                    "Trainers, or to none."
                )
            if trainer.is_global_zero and self.mode != "disabled":
                print_beside_bar(
                    trainer,
                    "det_callbacks: the script has its own DeterminismCallback, which is used",
                )
            self.mode = "disabled"
        elif trainer.is_global_zero and not self._has_claimed and self.mode != "disabled":
            claim_run()
            self._has_claimed = True
        super().setup(trainer, pl_module, stage)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        super().on_exception(trainer, pl_module, exception)
        report_to_command(exception)  # Hydra or the script may catch it


@cache  # all Trainers share one run
def launched_callback(asked: str) -> LaunchedCallback:
    """Return the callback of this process; from now on print errors without a traceback."""
    print_errors_plainly()
    return LaunchedCallback(**read_arguments(asked))
