"""ReplicaAuditCallback: compares the replicas of a Trainer, without a reference."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from det_callbacks.errors import NothingComparedError, SettingsError
from det_callbacks.integrations.lightning.trainer import LightningTraining
from det_callbacks.internals.lightning import join_twins
from det_callbacks.runs.selection import as_names
from det_callbacks.training.arguments import OnDivergence, require_integer, require_one_of
from det_callbacks.training.auditing import Replicas
from det_callbacks.training.recording import note_fit


@join_twins
class ReplicaAuditCallback(Replicas, Callback):
    """Compare the replicas of a run on several ranks with each other; needs no reference.

    It compares digests of replicated state: under DDP all parameters, buffers and optimizer state;
    for DTensors (FSDP2, tensor parallelism) the parts replicated along a dimension of the mesh. It
    skips, and counts in its output, shards of one rank, running statistics of batch norm, and
    tensors that DDP ignores; it compares buffers whether or not DDP broadcasts them. An audit costs
    a pass over the state, and exchanges a few bytes in a separate gloo group.
    ``DeterminismCallback(audit_replicas_every_n_steps=...)`` does the same.

    Args:
        every_n_steps: compare before the first step, after every n-th, and at the end of the fit.
        on_divergence: "raise" stops at the first difference, "collect" raises at the end, "warn"
            warns.
        ignore: fnmatch patterns for names of tensors that may differ, with their optimizer state,
            such as "codebook.*".

    Attributes:
        replica_report: the ReplicaReport of the last audit, or None.

    Raises:
        SelectionError: an argument is not allowed (at construction).
        SettingsError: there is only one process, or the strategy does not define which state is
            replicated.
        ReplicaError: replicas differ; ``.report`` has the tensors, the ranks, and the first step.
        NothingComparedError: no parameter has a replica, or the fit had nothing to train.
        RankError: a rank failed, is at a different step, or does not respond.

    Examples:
        >>> callback = ReplicaAuditCallback(every_n_steps=1)
        >>> trainer = Trainer(
        ...     strategy="ddp_fork", devices=2, max_steps=2, callbacks=[callback], **quiet
        ... )
        >>> trainer.fit(BoringModel())
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        on_divergence: OnDivergence = "raise",
        *,
        ignore: Sequence[str] = (),
    ) -> None:
        require_one_of("on_divergence", on_divergence, OnDivergence)
        require_integer("every_n_steps", every_n_steps, 1)
        join_twins(ReplicaAuditCallback)  # pytorch_lightning may be imported later than this module
        super().__init__(every_n_steps, on_divergence, ignore=as_names("ignore", ignore))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == TrainerFn.FITTING and trainer.world_size == 1:
            raise SettingsError(
                "One process has no replicas, so there is nothing to compare. Train with several "
                "processes (devices=2, strategy='ddp'), or omit the audit."
            )
        self._num_audits = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        note_fit()
        self.begin(LightningTraining(trainer, self))

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if (error := self.after_step()) is not None:
            raise error

    @override
    def on_train_end(self, *_: Any, **__: Any) -> None:
        if (error := self.end()) is not None:
            raise error

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.close()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.close()
        if stage == TrainerFn.FITTING and not self._num_audits:
            raise NothingComparedError(
                "The fit had no step to train, so no replicas were compared. Audit a fit with "
                "steps, or omit the audit."
            )
