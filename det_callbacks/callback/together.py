"""What the processes of a Trainer do together for one callback."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from det_callbacks.digest.state import digest_state
from det_callbacks.errors import RankError
from det_callbacks.ranks import RankGroup, require_same, start_facts

SYNC_EVERY_N_STEPS = 10
"""After how many steps the processes ask each other whether one differs, to stop together."""


class Together(RankGroup):
    """The processes of one Trainer, from a fit's ``setup`` to its end; it stays the same over the fits of a Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self._has_differed = False

    def __reduce__(self) -> tuple[type["Together"], tuple[()]]:
        """Let a copy begin with a closed group."""
        return Together, ()

    def begin(self, trainer: pl.Trainer) -> None:
        """Make the group; all processes come here at the same place, before anything that can fail on one of them."""
        self._has_differed = False
        self.close()
        self.rank, self.world_size = trainer.global_rank, trainer.world_size
        if trainer.world_size > 1 and self.open().world_size != trainer.world_size:
            raise RankError(
                f"This Trainer has {trainer.world_size} processes, and torch.distributed knows of {self.world_size}: "
                "they could not tell each other what they find. Use a strategy that runs on torch.distributed, such "
                "as ddp, or devices=1."
            )

    def check_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        manifest: Mapping[str, Any],
        *,
        with_weights: bool = True,
    ) -> None:
        """Raise ``SettingsError`` on all ranks when they do not start alike; one exchange, and a pass over the weights.

        Weights are compared where each rank has all of them (DDP, after its broadcast); of sharded ones none has, and
        what is no fit broadcasts none.
        """
        if self.world_size == 1:
            return
        weights = _replicated(trainer, pl_module) if with_weights else None
        state = None if weights is None else digest_state(weights)
        facts = start_facts(manifest, weights=None if state is None else state.digest)
        told = self.agree(lambda: facts, task="comparing how the ranks start")
        if len({facts.get("weights") for facts in told}) > 1:
            # which of them is only sent where they differ
            tensors = {} if state is None else {f"weights of {name}": value for name, value in state.tensors.items()}
            told = self.agree(lambda: {**facts, **tensors}, task="comparing the initial weights")
            for row in told:
                row.pop("weights", None)
        require_same(told)

    def stops_after(self, step: int, *, differs: bool, may_stop: bool, is_last: bool = False) -> bool:
        """Return whether all ranks stop now, because of a step that differed on one of them.

        Several ranks ask each other after every ``SYNC_EVERY_N_STEPS``-th step: one collective of a few bytes.

        Args:
            step: that ended.
            differs: whether it did here.
            may_stop: whether a difference stops anything; the same on all ranks.
            is_last: all ranks stop after this step anyway, and want to know whether for this reason.

        Raises:
            RankError: a rank is at another step, or does not come.
        """
        if self.world_size == 1:
            return differs
        self._has_differed |= differs
        if not may_stop or ((step + 1) % SYNC_EVERY_N_STEPS and not is_last):
            return False
        rows = self.agree(lambda: [step, self._has_differed], task="the sync after every n-th step")
        if len({at for at, _ in rows}) > 1:
            raise RankError(
                f"The ranks are no longer at the same step: {', '.join(str(at) for at, _ in rows)}, by rank. Give "
                "all ranks equally many steps.",
            )
        return any(has_differed for _, has_differed in rows)


def _replicated(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Tensor] | None:
    """Return the parameters and buffers that are to be equal on all ranks; None where the strategy does not say so."""
    if not isinstance(trainer.strategy, DDPStrategy):
        return None
    ignored = set(getattr(pl_module, "_ddp_params_and_buffers_to_ignore", ()))  # as DDP calls it, torch 2.13
    tensors = {**dict(pl_module.named_parameters()), **dict(pl_module.named_buffers())}
    return {name: tensor for name, tensor in tensors.items() if name not in ignored}
