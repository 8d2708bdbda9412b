"""Audits fits: runs the ops of some steps twice (``mode="audit"``)."""

import json
import math
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import yaml
from typing_extensions import override

from det_callbacks.audit.equivalence import BitwiseEquivalenceMode
from det_callbacks.audit.result import AuditError, AuditFinding, AuditReport, OpMismatch
from det_callbacks.errors import DivergenceWarning, NothingComparedError
from det_callbacks.ranks.group import RankGroup
from det_callbacks.ranks.replicas import ReplicaError, ReplicaReport, compare_replicas
from det_callbacks.report.closing_lines import audit_line, audit_lines, replicas_line, replicas_text
from det_callbacks.runs.files import ANOTHER_FOLDER, make_folder, replace_atomically, writing
from det_callbacks.runs.peers import Peers
from det_callbacks.trace.optimizers import in_phase
from det_callbacks.trace.places import set_phase
from det_callbacks.training.arguments import OnDivergence, RunArguments
from det_callbacks.training.session import FIT, Session
from det_callbacks.training.training import Training
from det_callbacks.verify.verification import free_folder

AUDIT_FILE = "audit.json"
REPLAY_FILE = "replay.yaml"
NUM_STEPS = 3  # audited by default


class Auditing(Session):
    """Audits the fits of one run; files go to ``current``,
    or to a new folder below the training's.
    """

    _folder: Path
    _mode: BitwiseEquivalenceMode

    def __init__(self, arguments: RunArguments, peers: Peers) -> None:
        super().__init__(arguments, peers)
        self._step = -1
        self._steps: list[int] = []
        self._found: dict[tuple[str, str, str], list[tuple[int, OpMismatch]]] = {}

    @override
    def clear_results(self) -> None:
        if not self.stages and self.arguments.current is not None:
            self._remove_files(self.arguments.current)

    def _remove_files(self, folder: Path) -> None:
        for name in (AUDIT_FILE, REPLAY_FILE):  # of an earlier audit
            with writing(folder, instead=ANOTHER_FOLDER["audit"]):
                (folder / name).unlink(missing_ok=True)

    @override
    def follow(self, training: Training, ops: object) -> None:
        self.audit_report, self._training = None, training
        if self.stages == [FIT]:
            self._folder = self.arguments.current or free_folder(self.root, kind="audit")
            self._mode = BitwiseEquivalenceMode(
                model=training.module, base_phase=training.base_phase
            )
        self._remove_files(self._folder)

    @override
    def attach(self, training: Training) -> None:
        training.mark_forward(partial(in_phase, self._mode.places, "forward"))
        if training.is_own_loop:
            self._mode.on_updated = partial(self._set_phase, "other")

    @override
    def begin_step(self, step: int, batch: object) -> None:
        chosen = self.arguments.selection.only_steps
        if step in chosen if chosen is not None else len(self._steps) < NUM_STEPS:
            self._step = step
            self._mode.begin()

    @override
    def begin_gradients(self) -> None:
        self._set_phase("gradient")

    def _set_phase(self, phase: str) -> None:
        places = self._mode.places
        set_phase(places, phase, places.modules, is_own_loop=self._training.is_own_loop)

    @override
    def end_step(self, *_: object) -> bool:
        if self._mode.is_open:
            self._steps.append(self._step)
            for mismatch in self._mode.finish():
                place = (mismatch.phase, mismatch.module, mismatch.op)
                self._found.setdefault(place, []).append((self._step, mismatch))
        return False

    @override
    def drop_step(self) -> None:
        self.end_step()  # a step that the module cuts short was also audited

    @override
    def close(self) -> None:
        self._mode.abandon()
        self._training.leave()

    @override
    def end(self, *, is_early: bool = False) -> None:
        chosen, mode, folder = self.arguments.selection.only_steps, self._mode, self._folder
        if not mode.num_compared:
            why = "no op ran twice. Train at least one step"
            if chosen is not None:
                steps = ", ".join(map(str, chosen))
                why = (
                    f"the fit ran none of the steps in only_steps ({steps}). Select steps that the "
                    "fit reaches"
                )
            raise NothingComparedError(f"Nothing was audited, because {why}.")
        report = self.audit_report = AuditReport(
            steps=tuple(self._steps),
            num_compared=mode.num_compared,
            skipped=dict(mode.skipped),
            findings=tuple(map(AuditFinding.of, self._found.values())),
        )
        make_folder(folder, instead=ANOTHER_FOLDER["audit"])
        replace_atomically(folder / AUDIT_FILE, json.dumps(report.to_dict(), indent=1).encode())
        replay = folder / REPLAY_FILE
        steps = ", ".join(map(str, report.steps))
        text = (
            f"# The ops that an audit of the steps {steps} found. Pass this file to record and "
            "verify:\n"
            f"# determinism.replay={replay} (Hydra), or replay={str(replay)!r}\n"
        )
        replace_atomically(
            replay, (text + yaml.safe_dump(list(report.replay), width=math.inf)).encode()
        )
        self.print_line(
            audit_line(
                report, folder=folder, missed=sorted(set(chosen or ()).difference(report.steps))
            )
        )
        if report.findings:
            text = audit_lines(report, replay=replay)
            if self.arguments.on_divergence != "warn":
                raise AuditError(text, report)
            self._warn_once(text, DivergenceWarning)


class Replicas:
    """The replica audits of one fit, called at the same points on all ranks; 0 steps means never.

    They return errors, equal on all ranks, for the caller to raise.
    """

    _training: Training | None = None  # the training of the open fit
    _first: ReplicaReport | None = None  # the first with a difference
    _num_audits = 0

    def __init__(
        self, every_n_steps: int, on_divergence: OnDivergence, *, ignore: Sequence[str] = ()
    ) -> None:
        self.every_n_steps, self.on_divergence, self.ignore = (
            every_n_steps,
            on_divergence,
            tuple(ignore),
        )
        self.replica_report: ReplicaReport | None = None
        self._group = RankGroup()

    def begin(self, training: Training) -> None:
        self.close()
        if self.every_n_steps and training.world_size == 1:
            training.print_line("det_callbacks: one process has no replicas: nothing to compare")
        elif self.every_n_steps:
            self._group.open()
            self._training, self._num_audits, self._first, self.replica_report = (
                training,
                0,
                None,
                None,
            )
            if (error := self._compare(training)) is not None:
                raise error

    def after_step(self) -> ReplicaError | None:
        training = self._training
        is_turn = training is not None and not (training.step + 1) % self.every_n_steps
        return self._compare(training) if training is not None and is_turn else None

    def end(self) -> ReplicaError | None:
        if self._training is None:
            return None
        error = self._compare(self._training, is_last=True)
        if self.on_divergence == "collect" and self._first is not None:
            self.replica_report = self._first
            error = ReplicaError(replicas_text(self._first), self._first)
        self.close()
        return error

    def close(self) -> None:
        self._training = None
        self._group.close()

    def _compare(self, training: Training, *, is_last: bool = False) -> ReplicaError | None:
        agreed = None if self.replica_report is None else self.replica_report.last_agreement
        state = partial(training.replicated_state, self.ignore)
        step = training.step
        report = self.replica_report = compare_replicas(
            self._group, state, step=step, last_agreement=agreed
        )
        self._num_audits += 1
        if self._first is None and not report.equal:
            self._first = report
            if self.on_divergence == "warn" and not training.rank:
                warnings.warn(replicas_text(report), DivergenceWarning, stacklevel=2)
        stops = self.on_divergence == "raise" and not report.equal
        if (is_last or stops) and not training.rank:
            has_differed = self._first is not None
            training.print_line(
                replicas_line(report, num_audits=self._num_audits, has_differed=has_differed)
            )
        return ReplicaError(replicas_text(report), report) if stops else None
