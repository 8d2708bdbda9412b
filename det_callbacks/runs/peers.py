"""The processes that write one run together: each its own stream, and rank 0 run.json."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")

END_OF_FIT = "the end of the fit"  # the task in which processes meet when they have finished their training


class Peers:
    """The processes of a run, here only this one; no action may talk to other ranks through the same peers."""

    rank: int = 0
    world_size: int = 1

    def gather(self, action: Callable[[], Any], *, task: str) -> list[Any]:
        """Do something on every rank and return what came out, by rank, or raise on every rank."""
        return [action()]

    def run_on_all(self, action: Callable[[], Value], *, task: str) -> Value:
        """Do something on every rank and return what came out on this one, or raise on every rank."""
        outcome: list[Value] = []
        self.gather(lambda: outcome.append(action()), task=task)
        return outcome[0]

    def broadcast(self, action: Callable[[], Value], *, task: str) -> Value:
        """Do something on rank 0 and return what came out on every rank, or raise on every rank."""
        result: Value = self.gather(lambda: action() if self.rank == 0 else None, task=task)[0]
        return result

    def require_shared(self, folder: Path) -> None:
        """Raise ``RankError`` on all ranks where one of them does not see a folder that rank 0 sees."""


ALONE = Peers()
