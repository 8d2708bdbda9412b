"""The processes that write one run together, and who of them writes what they share.

Each process writes its own stream into the one folder that all of them see; ``run.json`` is written by rank 0.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")

END_OF_FIT = "the end of the fit"
"""The task in which processes meet when they have finished their training."""


class Peers:
    """The processes of a run, as far as they tell each other something: here only this one."""

    rank: int = 0
    world_size: int = 1

    def gather(self, action: Callable[[], Any], *, task: str) -> list[Any]:
        """Do something on every rank and return what came out, by rank, or raise on every rank."""
        return [action()]

    def run_on_all(self, action: Callable[[], Value], *, task: str) -> Value:
        """Do something on every rank and return what came out on this one, or raise on every rank."""
        return action()

    def broadcast(self, action: Callable[[], Value], *, task: str) -> Value:
        """Do something on rank 0 and return what came out (as JSON holds it) on every rank, or raise on every rank."""
        return action()

    def require_shared(self, folder: Path) -> None:
        """Raise ``RankError`` on all ranks where one of them does not see a folder that rank 0 sees."""


ALONE = Peers()
