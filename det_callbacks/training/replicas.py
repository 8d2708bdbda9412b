"""Compares the replicas of a run at the start and end of a fit, and after every n-th step."""

import warnings
from collections.abc import Sequence
from functools import partial

from det_callbacks.errors import DivergenceWarning
from det_callbacks.ranks.group import RankGroup
from det_callbacks.ranks.replicas import ReplicaError, ReplicaReport, compare_replicas
from det_callbacks.report.closing_lines import replicas_line, replicas_text
from det_callbacks.training.arguments import OnDivergence
from det_callbacks.training.training import Training


class Replicas:
    """The replica audits of one fit, called at the same points on all ranks; 0 steps means never.

    They return errors, equal on all ranks, for the caller to raise.
    """

    _training: Training | None = None  # the training of the open fit
    _first: ReplicaReport | None = None  # the first with a difference
    _num_audits = 0

    def __init__(self, every_n_steps: int, on_divergence: OnDivergence, *, ignore: Sequence[str] = ()) -> None:
        self.every_n_steps, self.on_divergence, self.ignore = every_n_steps, on_divergence, tuple(ignore)
        self.replica_report: ReplicaReport | None = None
        self._group = RankGroup()

    def begin(self, training: Training) -> None:
        self.close()
        if self.every_n_steps and training.world_size == 1:
            training.print_line("det_callbacks: one process has no replicas: nothing to compare")
        elif self.every_n_steps:
            self._group.open()
            self._training, self._num_audits, self._first, self.replica_report = training, 0, None, None
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
        report = self.replica_report = compare_replicas(self._group, state, step=step, last_agreement=agreed)
        self._num_audits += 1
        if self._first is None and not report.equal:
            self._first = report
            if self.on_divergence == "warn" and not training.rank:
                warnings.warn(replicas_text(report), DivergenceWarning, stacklevel=2)
        stops = self.on_divergence == "raise" and not report.equal
        if (is_last or stops) and not training.rank:
            has_differed = self._first is not None
            training.print_line(replicas_line(report, num_audits=self._num_audits, has_differed=has_differed))
        return ReplicaError(replicas_text(report), report) if stops else None
