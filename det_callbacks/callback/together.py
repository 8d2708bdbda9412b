"""What the processes of a Trainer do together for one callback."""

from collections.abc import Callable
from typing import Any, TypeVar

import lightning.pytorch as pl

from det_callbacks.errors import RankError
from det_callbacks.ranks import RankGroup

Value = TypeVar("Value")


class Together:
    """The processes of one Trainer, from a fit's ``setup`` to its end; one process alone is together with itself.

    It stays the same over the fits of a Trainer, each of which has a group of its own.

    Attributes:
        rank: of this process.
        world_size: number of processes.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self._group: RankGroup | None = None
        self._sync_every_n_steps = 1
        self._differs_since: int | None = None

    def begin(self, trainer: pl.Trainer, *, sync_every_n_steps: int) -> None:
        """Make the group; all processes come here at the same place, before anything that can fail on one of them."""
        self.end()
        self.rank, self.world_size = trainer.global_rank, trainer.world_size
        self._sync_every_n_steps = sync_every_n_steps
        self._differs_since = None
        if self.world_size > 1:
            self._group = RankGroup()

    def agree(self, action: Callable[[], Any], *, task: str) -> list[Any]:
        """Do something on every rank and return what came out, by rank, or raise on every rank: see ``RankGroup``."""
        return [action()] if self.world_size == 1 else self._talking(task).agree(action, task=task)

    def do(self, action: Callable[[], Value], *, task: str) -> Value:
        """Do something on every rank and return what came out on this one, or raise on every rank."""
        return action() if self.world_size == 1 else self._talking(task).do(action, task=task)

    def stops_after(self, step: int, *, differs: bool, may_stop: bool) -> bool:
        """Return whether all ranks stop now, because of a step that differed on one of them.

        Several ranks ask each other after every n-th step: one collective of a few bytes.

        Args:
            step: that ended.
            differs: whether it did here.
            may_stop: whether a difference stops anything; the same on all ranks.

        Raises:
            RankError: a rank is at another step, or does not come.
        """
        if self.world_size == 1:
            return differs
        if differs and self._differs_since is None:
            self._differs_since = step
        if not may_stop or (step + 1) % self._sync_every_n_steps:
            return False
        since = 0 if self._differs_since is None else self._differs_since + 1
        rows = self._talking("a sync").gather_numbers([step, since], task="the sync after every n-th step")
        others = {row[0] for row in rows}
        if len(others) > 1:
            raise RankError(
                f"The ranks are no longer at the same step: {', '.join(str(row[0]) for row in rows)}, by rank. Give "
                "all ranks equally many steps.",
            )
        return any(row[1] for row in rows)

    def end(self) -> None:
        """Give the group back; may be called more than once."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _talking(self, task: str) -> RankGroup:
        if self._group is None:
            raise RankError(f"The {self.world_size} processes have parted already, so nothing can be agreed in {task}.")
        return self._group
