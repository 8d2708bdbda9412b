"""The processes that write one run together, and who of them writes what they share.

Each process writes its own stream into the one folder that all of them see; ``run.json`` is written by rank 0.
"""

import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from det_callbacks.errors import RankError
from det_callbacks.runs.files import MANIFEST

Value = TypeVar("Value")

END_OF_FIT = "the end of the fit"
"""The task in which processes meet when they have finished their training."""


class Peers(Protocol):
    """The processes of a run, as far as they tell each other something; by default there is only this one."""

    rank: int = 0
    world_size: int = 1

    def gather(self, action: Callable[[], Any], *, task: str) -> list[Any]:
        """Do something on every rank and return what came out, by rank, or raise on every rank."""
        return [action()]

    def run_on_all(self, action: Callable[[], Value], *, task: str) -> Value:
        """Do something on every rank and return what came out on this one, or raise on every rank."""
        return action()

    def broadcast(self, action: Callable[[], Value], *, task: str) -> Value:
        """Do something on rank 0 and return what came out (as JSON holds it) on every rank, or raise on every rank.

        However long it takes: the others wait for up to ten minutes.
        """
        return action()


class _Alone(Peers):
    """A process without others."""


ALONE = _Alone()


def require_shared(path: Path, peers: Peers) -> None:
    """Raise ``RankError`` on all ranks where one of them does not see the folder that rank 0 sees."""
    if peers.world_size == 1:
        return
    # of the form of a temporary file of run.json, which readers do not look at
    marker = path / f".{MANIFEST}.{uuid.uuid4().int}.tmp"

    def lead() -> list[str]:
        marker.touch()
        return [marker.name, socket.gethostname()]

    name, host = peers.broadcast(lead, task=f"looking into {path}")

    def look() -> None:
        if not (path / name).exists():
            raise RankError(
                f"Rank {peers.rank} on {socket.gethostname()} does not see the folder {path}, which rank 0 made on "
                f"{host}, and all processes of a run write into one folder. Nothing was trained. Name a folder on a "
                "file system that the nodes share, by the same path on each; without one, record the processes of one "
                "node.",
                peers.rank,
            )

    peers.run_on_all(look, task=f"looking into {path}")
    if peers.rank == 0:
        marker.unlink(missing_ok=True)


def count_processes(world_size: int) -> str:
    """Return "1 process", "4 processes"."""
    return "1 process" if world_size == 1 else f"{world_size} processes"
