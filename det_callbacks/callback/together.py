"""What the processes of a Trainer do together for one callback: they start alike, stop together, and end together.

Data shards, generator states and seeds may differ by design; settings, versions, code, selection and, where they are
replicated, the initial weights may not.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from det_callbacks.digest.state import digest_state
from det_callbacks.errors import RankError, SettingsError
from det_callbacks.ranks import RankGroup
from det_callbacks.report.console import ranks_text

SYNC_EVERY_N_STEPS = 10
"""After how many steps the processes ask each other whether one differs, to stop together."""


MAX_NAMED = 5
"""Entries that a message names; the others are counted."""

_PREFIXES = ("settings.", "python.", "numpy.", "lightning.", "det_callbacks.", "triton.", "trainer.", "torch.")
_NAMES = frozenset({"code.git_commit"})
_BY_DESIGN = frozenset({"settings.seed", "torch.cpu_capability", "torch.num_interop_threads"})
"""What may differ between the ranks: seeds, and what the nodes of a cluster are."""


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

    def end_batch(self, trainer: pl.Trainer) -> None:
        """Note that a training batch has ended; after the last one there may be long validations, saves and hooks."""
        if trainer.fit_loop.epoch_loop._is_training_done or trainer.should_stop:  # read at Lightning 2.6.6
            self.tell("between")

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


def start_facts(manifest: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """Return what a process tells the others at the start of a fit: name -> value, as JSON holds it.

    Args:
        manifest: of run.json: selection and environment.
        others: further entries by name; None is left out.
    """
    environment = {
        name: entry["value"]
        for name, entry in manifest["environment"].items()
        if (name.startswith(_PREFIXES) or name in _NAMES) and name not in _BY_DESIGN
    }
    selection = {f"selection.{name}": value for name, value in manifest["selection"].items()}
    known = {name: value for name, value in others.items() if value is not None}
    saved = {name: list(manifest.get(name, ())) for name in ("replay", "keep_tensors")}
    return {**environment, **selection, **saved, **known}


def require_same(told: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``SettingsError`` that names what differs between ranks, and who is in the minority.

    Args:
        told: what each rank told, by rank.
    """
    names = sorted({name for facts in told for name in facts})
    problems = [text for name in names if (text := _difference(name, [facts.get(name) for facts in told])) is not None]
    if not problems:
        return
    more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
    raise SettingsError(
        f"The {len(told)} processes of this run do not start alike: {'; '.join(problems[:MAX_NAMED])}{more}. Nothing "
        f"was trained; {len(names) - len(problems)} other entries agree. Give all processes the same code, packages, "
        "settings and weights; only seeds and data may differ."
    )


def _difference(name: str, values: Sequence[Any]) -> str | None:
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(json.dumps(value, sort_keys=True), []).append(rank)
    if len(by_value) == 1:
        return None
    # the larger group is taken for the right one, of equal ones that of the lowest rank
    majority, *minorities = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[1][0]))
    shown = ", ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in minorities[:MAX_NAMED])
    return f"{name} is {shown}, and {majority[0]} on {ranks_text(majority[1])}"
