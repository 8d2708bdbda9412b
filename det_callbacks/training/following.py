"""Follows a run from setup to verdict, on every exit path; each integration calls it."""

import os
from contextlib import ExitStack
from traceback import walk_tb
from typing import Any

from typing_extensions import override

from det_callbacks.audit.result import AuditReport
from det_callbacks.digest.unobserved import hidden
from det_callbacks.environment.variables import LAST_STEP
from det_callbacks.errors import DetCallbacksError, WriteError
from det_callbacks.internals.torch import TORCH, modules_in
from det_callbacks.internals.versions import newer_than_tested
from det_callbacks.ranks.group import RankGroup, require_same_start
from det_callbacks.ranks.replicas import ReplicaReport
from det_callbacks.settings import enforce_around_training, settings_in_force
from det_callbacks.tensors.copies import require_room
from det_callbacks.trace.compiled.replaced import REPLACED
from det_callbacks.trace.nondeterministic_ops import NondeterministicOps, NondeterministicOpWatch
from det_callbacks.training.arguments import RunArguments, manifest_of
from det_callbacks.training.auditing import Auditing, Replicas
from det_callbacks.training.recording import Recording, note_fit
from det_callbacks.training.session import FIT, Session, Steps
from det_callbacks.training.training import Training
from det_callbacks.training.verifying import Verifying
from det_callbacks.verdict import Verdict

_OWN_PACKAGES = ("det_callbacks.training", "det_callbacks.integrations", "det_callbacks.checkpoint")


class FollowedRun(RunArguments):
    """The arguments of a run, and the session that follows its training;
    an integration is a subclass.

    It calls, in this order: ``_open_stage`` before the fit builds anything; ``_begin_fit`` when
    weights and a checkpoint are loaded; ``_follow`` before the loaders are set up, or right after;
    ``_hooks.attach`` when the optimizers exist; for each step ``_begin_step`` and ``_end_step``;
    ``_end_training`` after the last one; and ``_stop`` instead if an exception ends the fit.
    ``_stage.close`` always comes last. In between, ``_hooks`` takes what else is known of a step
    (``mark``, ``note_loss``, ``begin_gradients``, ``find_resumed``). For a call that compares only
    metrics (a validation or a test), ``_begin`` and ``_end`` follow ``_open_stage``.
    """

    _training: Training

    @override
    def _reset(self) -> None:
        self.verdict: Verdict | None = None
        self.audit_report: AuditReport | None = None
        self._group = RankGroup()
        self._session = Session()
        self._hooks = Steps()  # the session while a fit is open, else one that ignores everything
        self._stage = ExitStack()  # closes everything that a fit or another stage opened
        self._ops: NondeterministicOps | None = None
        self._watch: NondeterministicOpWatch | None = None
        self._replicas = Replicas(self.audit_replicas_every_n_steps, self.on_divergence)
        self._is_open = False
        self._step = -1  # the last started step
        self._num_ended = 0  # steps of all fits

    @property
    def replica_report(self) -> ReplicaReport | None:
        return self._replicas.replica_report

    def _open_stage(self, training: Training, *, is_compared: bool) -> None:
        """Open a fit or another stage; if nothing is compared, watch only nondeterministic ops."""
        self._stage.close()
        self._training = training
        self._stage.callback(REPLACED.unfollow, self)
        REPLACED.follow(self)  # a validation may compile the model before the first step
        if is_compared:
            self._stage.callback(self._group.close)
            self._stage.callback(self._replicas.close)
            self._group.open(training.world_size)
            if self._session.is_over:
                kind = {"record": Recording, "verify": Verifying, "audit": Auditing}[self.mode]
                self._session = kind(self, self._group)
            self._session.clear_results()
            self._group.run_on_all(self._prepare, task="checking the settings")
            self._session.root = training.folder
            self.selection = self._session.prepare()
        self._ops = self._watch = None
        if settings_in_force()["deterministic_algorithms"] != "disabled":
            self._ops = NondeterministicOps(() if self.settings is None else self.settings.allow)
            self._watch = NondeterministicOpWatch(self._ops, training.module)
            self._stage.callback(self._ops.close)
            self._stage.callback(self._watch.close)

    def _prepare(self) -> None:
        TORCH.require()
        self.check_world_size(self._training.world_size)
        if self.settings is not None:
            self._stage.callback(
                enforce_around_training(self.settings, self._training.module).restore
            )
        if self.mode == "record" and self.replay and self.reference is not None:
            require_room(self.reference, self.tensor_budget_mib)

    def _begin_fit(self, *, is_resumed: bool, stage: str = FIT) -> None:
        self.selection.check_modules([name for name, _ in modules_in(self._training.module)])
        for line in newer_than_tested(self._training.framework) if not self._training.rank else ():
            self._training.print_line(f"det_callbacks: {line}")
        self._begin(is_resumed=is_resumed, stage=stage)

    @hidden
    def _begin(self, **options: Any) -> None:
        session, training = self._session, self._training
        session.print_line = training.print_line
        session.manifest = manifest_of(training, self, is_resumed=options.get("is_resumed", False))
        # only a fit broadcasts weights
        weights = None if "call" in options else training.replicated_weights()
        require_same_start(self._group, session.manifest, weights)
        self.verdict = self.audit_report = None
        session.begin(**options)
        self._is_open = True
        note_fit()

    def _follow(self) -> None:
        self._session.follow(self._training, self._ops)
        self._hooks = self._session

    def _identity(self) -> dict[str, str | None]:
        """Return id, mode and reference of the run for the sidecar of a checkpoint."""
        run_id = None if self._session.run is None else self._session.run.manifest.run_id
        reference = None if self.reference is None else str(self.reference)
        return {"id": run_id, "mode": self.mode, "reference": reference}

    def _begin_step(self, step: int, batch: Any) -> None:
        self._group.set_place("step")
        self._hooks.drop_step()  # a step that did not end
        self._step = step
        is_traced = self.mode != "audit" and self.selection.selects_step(step)
        self._watch_ops(is_on=not is_traced or self.selection.level != "op")
        self._hooks.begin_step(step, batch)

    def _end_step(self, epoch: int, outputs: Any) -> None:
        differs = self._hooks.end_step(self._step, epoch, outputs)
        self._watch_ops(is_on=False)
        differs |= self._after_step()
        error = self._replicas.after_step()
        # a difference from the reference is more informative than one between replicas
        self._stop_together(differs=differs, asks_now=error is not None)
        if error is not None:
            raise error
        self._num_ended += 1
        if self._is_open and self._is_last_wanted():
            self._exit_program()

    def _exit_program(self) -> None:
        """End the fit and the program: the command asked for no later step."""
        self._end()
        self._stage.close()
        raise SystemExit(0)

    def _is_last_wanted(self) -> bool:
        """Return whether the command needs no later step."""
        wanted = os.environ.get(LAST_STEP, "")
        if not wanted:
            return False
        return (
            self._num_ended >= int(wanted) if wanted.startswith("+") else self._step >= int(wanted)
        )

    def _after_step(self) -> bool:
        """Return whether something other than the step differs, such as a metric."""
        return False

    def _stop_together(self, *, differs: bool, asks_now: bool = True) -> None:
        may_stop = self._session.may_stop
        if self._group.stops_after(
            self._step, differs=differs, may_stop=may_stop, asks_now=asks_now
        ):
            self._end(is_early=True)

    def _end_training(self) -> None:
        error = self._replicas.end()
        if error is not None and self.mode == "record":
            raise error  # before the run is complete, so it is not a reference
        self._end()
        if error is not None:
            raise error

    def _end(self, *, is_early: bool = False) -> None:
        if not self._is_open:
            return
        if not is_early:
            self._hooks.flush(self._step + 1)
        self._close_fit()
        try:
            self._session.end(is_early=is_early)
        finally:
            self.verdict, self.audit_report = self._session.verdict, self._session.audit_report

    def _close_fit(self) -> None:
        self._is_open = False
        hooks, self._hooks = self._hooks, Steps()
        hooks.close()

    def _stop(self, exception: BaseException) -> None:
        """End a fit with an exception; our errors drop our frames, which would bury the message."""
        note_fit(ended_by=exception)
        frames = (
            walk_tb(exception.__traceback__) if isinstance(exception, DetCallbacksError) else ()
        )
        packages = (str(frame.f_globals.get("__package__")) for frame, _ in frames)
        if any(package.startswith(_OWN_PACKAGES) for package in packages):
            exception.__traceback__ = exception.__cause__ = None
        was_open = self._is_open
        self._close_fit()
        try:
            if was_open:
                self._close_files(exception)
                self.verdict, self.audit_report = self._session.verdict, self._session.audit_report
        finally:
            self._stage.close()

    def _close_files(self, exception: BaseException) -> None:
        """Close the files of a fit; a full disk does not replace the exception that ended it."""
        try:
            self._session.stop(type(exception).__name__)
        except WriteError as error:
            if not isinstance(exception, WriteError):
                self._session.print_line(f"det_callbacks: {error}")

    def _watch_ops(self, *, is_on: bool) -> None:
        if self._watch is not None:
            (self._watch.open if is_on else self._watch.close)()
