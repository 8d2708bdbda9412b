"""ReplicaAuditCallback: are the replicas still equal? It needs no reference."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from det_callbacks.callback.arguments import check_replica_audit
from det_callbacks.callback.fits import note_ended
from det_callbacks.callback.replicas import OnDivergence, Replicas
from det_callbacks.errors import NothingComparedError, SettingsError
from det_callbacks.ranks import ReplicaReport
from det_callbacks.runs.selection import as_names


class ReplicaAuditCallback(Callback):
    """Compare the replicas of a training on several ranks, without a reference.

    Parameters, buffers and optimizer state that several ranks have to hold alike are compared by digest: under DDP all
    of them; of DTensors on a mesh (FSDP2, tensor parallelism) those that are replicated along a dimension, among the
    ranks of one shard. Left out, and counted in what it prints: shards that nobody else holds, running statistics of
    batch norm (each rank's are of its own batches), all buffers under DDP with ``broadcast_buffers=False``, and what
    DDP was told to ignore. It changes no bit of the training, and talks in a gloo group of its own.

    An audit takes one pass over that state at the speed of digests (on GPUs a copy to the host) and one collective,
    which gathers 8 bytes a tensor. ``DeterminismCallback(audit_replicas_every_n_steps=...)`` does the same.

    Args:
        every_n_steps: they are compared before the first step, after every n-th, and at the end of the fit.
        on_divergence: "raise" stops all ranks at the first difference, "collect" goes on and raises at the end, "warn"
            goes on and warns of each tensor once.
        ignore: fnmatch patterns over names of tensors that may differ, such as "codebook.*"; the optimizer state of a
            parameter goes with it.

    Attributes:
        replica_report: the ReplicaReport of the last audit; None before the first.

    Raises:
        SelectionError: an argument is not one of the allowed ones (at construction).
        SettingsError: there is one process only, or the strategy does not say what has to be equal.
        ReplicaError: replicas differ; ``.report`` says which tensors, on which ranks, and since when.
        NothingComparedError: no parameter has a replica, or the fit had nothing to train.
        RankError: a rank failed, is at another step, or does not come within 5 minutes.

    Example:
        >>> trainer = Trainer(strategy="ddp", devices=2, callbacks=[ReplicaAuditCallback()])  # doctest: +SKIP
    """

    def __init__(
        self, every_n_steps: int = 100, on_divergence: OnDivergence = "raise", *, ignore: Sequence[str] = ()
    ) -> None:
        super().__init__()
        check_replica_audit(every_n_steps=every_n_steps, on_divergence=on_divergence)
        self.every_n_steps = every_n_steps
        self.on_divergence = on_divergence
        self.ignore = as_names("ignore", ignore)
        self._replicas = Replicas(every_n_steps, on_divergence=on_divergence, ignore=self.ignore)
        self._has_begun = False

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy takes along: the arguments, never the group of a fit under way."""
        fresh = vars(ReplicaAuditCallback(self.every_n_steps, self.on_divergence, ignore=self.ignore))
        return {name: value if name.startswith("_") else vars(self)[name] for name, value in fresh.items()}

    @property
    def replica_report(self) -> ReplicaReport | None:
        """The report of the last audit; None before the first."""
        return self._replicas.report

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != TrainerFn.FITTING:
            return
        self._has_begun = False
        if trainer.world_size == 1:
            raise SettingsError(
                "One process has no replicas, so there is nothing to compare, which would look as if they agreed. "
                "Train with several (devices=2, strategy='ddp'), or leave the audit out."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._has_begun = True
        self._replicas.begin(trainer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        _raise(self._replicas.after_step(trainer.fit_loop.epoch_loop.total_batch_idx))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        note_ended()
        _raise(self._replicas.end())

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._replicas.is_open:
            note_ended()
        self._replicas.close()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._replicas.close()
        if stage == TrainerFn.FITTING and not self._has_begun:
            note_ended()
            raise NothingComparedError(
                "Nothing was compared: the fit had nothing to train. Audit one that has steps left, or leave the audit "
                "out."
            )


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
