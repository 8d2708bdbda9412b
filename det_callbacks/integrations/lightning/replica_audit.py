"""The replicas of a Trainer, compared while it trains: at the start of a fit, after every n-th step, and at its end."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from det_callbacks.errors import DivergenceWarning, NothingComparedError, ReplicaError, SettingsError
from det_callbacks.integrations.lightning.progress import print_beside_bar
from det_callbacks.internals.lightning import model_averager
from det_callbacks.patterns import as_names
from det_callbacks.ranks.group import RankGroup
from det_callbacks.ranks.replicas import ReplicaReport, ReplicatedState, compare_replicas, replicated_state
from det_callbacks.report.fits import replicas_line, replicas_text
from det_callbacks.training.arguments import OnDivergence, require_one_of, require_whole
from det_callbacks.training.fits import note_fit


class Replicas:
    """The audits of the replicas of one fit, after every n-th step (0: never); all ranks call it at the same places.

    An error that a method returns is the same on all ranks, and raised by the caller, who may have more to say first.
    """

    _is_open = False
    _first: ReplicaReport | None = None  # that found a difference
    _num_audits = 0

    def __init__(self, every_n_steps: int, on_divergence: OnDivergence, *, ignore: Sequence[str] = ()) -> None:
        self.every_n_steps, self.on_divergence, self.ignore = every_n_steps, on_divergence, tuple(ignore)
        self.replica_report: ReplicaReport | None = None
        self._group = RankGroup()

    def begin(self, trainer: pl.Trainer) -> None:
        """Compare the replicas that a fit starts with; one process has none, which a line says."""
        self.close()
        if self.every_n_steps and trainer.world_size == 1:
            print_beside_bar(trainer, "det_callbacks: one process has no replicas: nothing to compare")
        elif self.every_n_steps:
            self._group.open()
            self._is_open, self._num_audits, self._first, self.replica_report = True, 0, None, None
            raise_if(self._compare(trainer))

    def after_step(self, trainer: pl.Trainer) -> ReplicaError | None:
        """Compare the replicas when it is their turn."""
        is_turn = self._is_open and not (trainer.fit_loop.epoch_loop.total_batch_idx + 1) % self.every_n_steps
        return self._compare(trainer) if is_turn else None

    def end(self, trainer: pl.Trainer) -> ReplicaError | None:
        """Compare the replicas at the end of a fit, and print the closing line."""
        if not self._is_open:
            return None
        error = self._compare(trainer, is_last=True)
        if self.on_divergence == "collect" and self._first is not None:
            self.replica_report = self._first
            error = ReplicaError(replicas_text(self._first), self._first)
        self.close()
        return error

    def close(self) -> None:
        """Give the group back; may be called more than once."""
        self._is_open = False
        self._group.close()

    def _compare(self, trainer: pl.Trainer, *, is_last: bool = False) -> ReplicaError | None:
        step = trainer.fit_loop.epoch_loop.total_batch_idx
        agreed = None if self.replica_report is None else self.replica_report.last_agreement
        state = partial(_state_of, trainer, self.ignore)
        report = self.replica_report = compare_replicas(self._group, state, step=step, last_agreement=agreed)
        self._num_audits += 1
        if self._first is None and not report.equal:
            self._first = report
            if self.on_divergence == "warn":
                pl.utilities.rank_zero_warn(replicas_text(report), category=DivergenceWarning)
        stops = self.on_divergence == "raise" and not report.equal
        if (is_last or stops) and trainer.is_global_zero:
            has_differed = self._first is not None
            print_beside_bar(trainer, replicas_line(report, num_audits=self._num_audits, has_differed=has_differed))
        return ReplicaError(replicas_text(report), report) if stops else None


class ReplicaAuditCallback(Replicas, Callback):
    """Compare the replicas of a training on several ranks, without a reference.

    Parameters, buffers and optimizer state that several ranks have to hold alike are compared by digest: under DDP all
    of them; of DTensors on a mesh (FSDP2, tensor parallelism) those that are replicated along a dimension, among the
    ranks of one shard. Left out, and counted in what it prints: shards that nobody else holds, running statistics of
    batch norm, all buffers under DDP with ``broadcast_buffers=False``, and what DDP was told to ignore. An audit takes
    one pass over that state at the speed of digests and one exchange of a few bytes, in a gloo group of its own.
    ``DeterminismCallback(audit_replicas_every_n_steps=...)`` does the same.

    Args:
        every_n_steps: they are compared before the first step, after every n-th, and at the end of the fit.
        on_divergence: "raise" stops at the first difference, "collect" raises it at the end, "warn" warns of it.
        ignore: fnmatch patterns over names of tensors that may differ, with their optimizer state: "codebook.*".

    Attributes:
        replica_report: the ReplicaReport of the last audit; None before the first.

    Raises:
        SelectionError: an argument is not one of the allowed ones (at construction).
        SettingsError: there is one process only, or the strategy does not say what has to be equal.
        ReplicaError: replicas differ; ``.report`` says which tensors, on which ranks, and since when.
        NothingComparedError: no parameter has a replica, or the fit had nothing to train.
        RankError: a rank failed, is at another step, or does not come.

    Example:
        >>> trainer = Trainer(strategy="ddp", devices=2, callbacks=[ReplicaAuditCallback()])  # doctest: +SKIP
    """

    def __init__(
        self, every_n_steps: int = 100, on_divergence: OnDivergence = "raise", *, ignore: Sequence[str] = ()
    ) -> None:
        require_one_of("on_divergence", on_divergence, OnDivergence)
        require_whole("every_n_steps", every_n_steps, 1)
        super().__init__(every_n_steps, on_divergence, ignore=as_names("ignore", ignore))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == TrainerFn.FITTING and trainer.world_size == 1:
            raise SettingsError(
                "One process has no replicas, so there is nothing to compare, which would look as if they agreed. "
                "Train with several (devices=2, strategy='ddp'), or leave the audit out."
            )
        self._num_audits = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        note_fit()
        self.begin(trainer)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        raise_if(self.after_step(trainer))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        raise_if(self.end(trainer))

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.close()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.close()
        if stage == TrainerFn.FITTING and not self._num_audits:
            raise NothingComparedError(
                "Nothing was compared: the fit had nothing to train. Audit one that has steps left, or leave it out."
            )


def _state_of(trainer: pl.Trainer, ignore: Sequence[str]) -> ReplicatedState:
    strategy, model = trainer.strategy, trainer.strategy.model
    options: dict[str, Any] = {"everybody": range(trainer.world_size), "ignore": ignore}
    if isinstance(model, DistributedDataParallel):
        # post-local SGD, read at Lightning 2.6.6: its replicas are only equal every now and then
        if isinstance(strategy, DDPStrategy) and model_averager(strategy) is not None:
            raise SettingsError(
                "The replicas differ by design between two averagings of DDPStrategy(model_averaging_period=...), "
                "so an audit of them would say nothing. Leave the audit out, or the averaging."
            )
        options["everybody"] = dist.get_process_group_ranks(model.process_group)
        options |= {"ddp_ignores": model.parameters_to_ignore, "has_own_buffers": not model.broadcast_buffers}
    elif not isinstance(strategy, ModelParallelStrategy):
        raise SettingsError(
            f"{type(strategy).__name__} does not say which ranks hold the same parameters, so its replicas cannot "
            "be compared. Those of DDP and of ModelParallelStrategy (FSDP2, tensor parallelism, meshes) can; "
            "compare runs with DeterminismCallback for others."
        )
    return replicated_state(trainer.lightning_module, trainer.optimizers, **options)


def raise_if(error: Exception | None) -> None:
    """Raise an error where there is one."""
    if error is not None:
        raise error
