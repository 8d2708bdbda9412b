"""The replicas of a Trainer, compared while it trains: at the start of a fit, after every n-th step, and at its end."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.nn.parallel import DistributedDataParallel

from det_callbacks.callback.bars import say_beside
from det_callbacks.errors import DivergenceWarning, NothingComparedError, ReplicaError, SettingsError
from det_callbacks.ranks import RankGroup, ReplicaAudit, ReplicaDifference, ReplicaReport, ReplicatedState
from det_callbacks.ranks.replicas import TIMEOUT_SECONDS
from det_callbacks.ranks.replicated import replicated_state
from det_callbacks.report.replicas import no_replicas_line, replicas_line, replicas_text

OnDivergence = Literal["raise", "collect", "warn"]


class Replicas:
    """The audits of the replicas of one fit; all ranks call its methods at the same places.

    An error that a method returns is the same on all ranks, and raised by the caller, who may have more to say first.

    Args:
        every_n_steps: after which they are compared; 0 never compares anything.
        on_divergence: "raise" returns the error of the first audit that finds a difference, "collect" one of all
            differences at the end, "warn" warns of each tensor once and returns none.
        ignore: fnmatch patterns over names of tensors that are not compared.

    Attributes:
        report: of the last audit; None before the first.
    """

    def __init__(self, every_n_steps: int, *, on_divergence: OnDivergence, ignore: Sequence[str] = ()) -> None:
        self.report: ReplicaReport | None = None
        self._every_n_steps = every_n_steps
        self._on_divergence = on_divergence
        self._ignore = tuple(ignore)
        self._trainer: pl.Trainer | None = None
        self._group: RankGroup | None = None
        self._audit: ReplicaAudit | None = None
        self._num_audits = self._num_bytes = 0
        self._first: ReplicaReport | None = None  # that found a difference
        self._found: dict[str, tuple[ReplicaDifference, ...]] = {}

    @property
    def is_open(self) -> bool:
        """Whether a fit is under way whose replicas are compared."""
        return self._audit is not None

    def begin(self, trainer: pl.Trainer) -> None:
        """Compare the replicas that a fit starts with; one process has none, which a line says.

        Raises:
            ReplicaError: they differ already.
            NothingComparedError: no parameter has a replica.
            SettingsError: nobody says what has to be equal under this strategy.
            RankError: a rank does not come, or failed.
        """
        self.close()
        if not self._every_n_steps:
            return
        if trainer.world_size == 1:
            say_beside(trainer, no_replicas_line())
            return
        self._trainer = trainer
        self._group = RankGroup(timeout_seconds=TIMEOUT_SECONDS).open()
        told = self._group.agree(lambda: self._state().num_parameters, task="looking for replicas")
        if not any(told):
            raise NothingComparedError(
                f"Nothing can be compared: no parameter has a replica on another of the {trainer.world_size} ranks: "
                "all are sharded, or left out. Audit a strategy with replicas (ddp, or a mesh with a replicated "
                "dimension), or compare runs with DeterminismCallback."
            )
        self._audit = ReplicaAudit(self._group)
        self._num_audits, self._num_bytes, self._first, self._found = 0, 0, None, {}
        if (error := self._compare()) is not None:
            raise error

    def after_step(self, step: int) -> ReplicaError | None:
        """Compare the replicas when it is their turn."""
        if self._audit is None or (step + 1) % self._every_n_steps:
            return None
        return self._compare()

    def end(self) -> ReplicaError | None:
        """Compare the replicas at the end of a fit, and print the closing line."""
        if self._audit is None:
            return None
        error = self._compare()
        report = self.report
        assert report is not None
        if error is None:
            self._say(report)
        if self._on_divergence == "collect" and self._first is not None:
            differences = tuple(found for one in self._found.values() for found in one)
            self.report = replace(self._first, differences=differences)
            error = ReplicaError(replicas_text(self.report), self.report)
        self.close()
        return error

    def close(self) -> None:
        """Give the group back; may be called more than once."""
        group, self._group, self._audit, self._trainer = self._group, None, None, None
        if group is not None:
            group.close()

    def _compare(self) -> ReplicaError | None:
        assert self._audit is not None
        assert self._trainer is not None
        report = self._audit.compare(self._state(), step=self._trainer.fit_loop.epoch_loop.total_batch_idx)
        self.report = report
        self._num_audits += 1
        self._num_bytes += report.num_bytes
        if not report.equal:
            self._first = self._first or report
        new: dict[str, tuple[ReplicaDifference, ...]] = {}
        for found in report.differences:
            if found.name not in self._found:
                new[found.name] = (*new.get(found.name, ()), found)
        self._found.update(new)
        if report.equal or self._on_divergence == "collect":
            return None
        if self._on_divergence == "raise":
            self._say(report)
            return ReplicaError(replicas_text(report), report)
        if new:
            named = replace(report, differences=tuple(found for one in new.values() for found in one))
            pl.utilities.rank_zero_warn(replicas_text(named), category=DivergenceWarning)
        return None

    def _say(self, report: ReplicaReport) -> None:
        """Print the closing line, on one rank."""
        if self._group is not None and self._group.rank == 0:
            line = replicas_line(
                report, num_audits=self._num_audits, num_bytes=self._num_bytes, has_differed=self._first is not None
            )
            assert self._trainer is not None
            say_beside(self._trainer, line)

    def _state(self) -> ReplicatedState:
        """Return what has to be equal, as the strategy has it."""
        trainer = self._trainer
        assert trainer is not None
        strategy, module = trainer.strategy, trainer.lightning_module
        model = strategy.model
        if isinstance(model, DistributedDataParallel):
            # post-local SGD, read at Lightning 2.6.6: its replicas are only equal every now and then
            if getattr(strategy, "_model_averager", None) is not None:
                raise SettingsError(
                    "The replicas differ by design between two averagings of DDPStrategy(model_averaging_period=...), "
                    "so an audit of them would say nothing. Leave the audit out, or the averaging."
                )
            return replicated_state(
                module,
                trainer.optimizers,
                everybody=dist.get_process_group_ranks(model.process_group),
                ddp_ignores=model.parameters_to_ignore,
                has_own_buffers=not model.broadcast_buffers,
                ignore=self._ignore,
            )
        if isinstance(strategy, ModelParallelStrategy):
            everybody = range(trainer.world_size)
            return replicated_state(module, trainer.optimizers, everybody=everybody, ignore=self._ignore)
        raise SettingsError(
            f"{type(strategy).__name__} does not say which ranks hold the same parameters, so its replicas cannot be "
            "compared. Those of DDP and of ModelParallelStrategy (FSDP2, tensor parallelism, meshes) can; compare runs "
            "with DeterminismCallback for others."
        )
