"""The processes that write one run together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")

END_OF_FIT = "the end of the fit"  # where processes meet


class Peers:
    """A run's processes, of which each does the same: here only this one, in a subclass all ranks.

    An action must not use the same peers.
    """

    rank: int = 0
    world_size: int = 1

    def gather(self, action: Callable[[], Any], *, task: str) -> list[Any]:
        """Run an action on every rank; return all results by rank, or raise on every rank."""
        return [action()]

    def run_on_all(self, action: Callable[[], Value], *, task: str) -> Value:
        """Run an action on every rank; return this rank's result, or raise on every rank."""
        outcome: list[Value] = []
        self.gather(lambda: outcome.append(action()), task=task)
        return outcome[0]

    def broadcast(self, action: Callable[[], Value], *, task: str) -> Value:
        """Run an action on rank 0; return its result on every rank, or raise on every rank."""
        result: Value = self.gather(lambda: action() if self.rank == 0 else None, task=task)[0]
        return result

    def require_shared(self, folder: Path) -> None:
        """Raise ``RankError`` on all ranks if one does not see a folder that rank 0 sees."""


ALONE = Peers()
