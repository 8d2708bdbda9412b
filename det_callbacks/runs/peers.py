"""The processes that write one run together, and who of them writes what they share.

Each process writes its own stream into the one folder that all of them see; ``run.json`` is written by rank 0.
"""

import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from det_callbacks.errors import RankError
from det_callbacks.runs.files import MANIFEST, make_room

Value = TypeVar("Value")

END_OF_FIT = "the end of the fit"
"""The task in which processes meet when they have finished their training."""


class Peers(Protocol):
    """The processes of a run, as far as they tell each other something."""

    rank: int
    world_size: int

    def gather(self, action: Callable[[], Any], *, task: str) -> list[Any]:
        """Do something on every rank and return what came out, by rank, or raise on every rank."""

    def run_on_all(self, action: Callable[[], Value], *, task: str) -> Value:
        """Do something on every rank and return what came out on this one, or raise on every rank."""

    def broadcast(self, action: Callable[[], Value], *, task: str) -> Value:
        """Do something on rank 0 and return what came out (as JSON holds it) on every rank, or raise on every rank.

        However long it takes: the others wait for up to ten minutes.
        """


class _Alone:
    """A process without others."""

    rank = 0
    world_size = 1

    def gather(self, action: Callable[[], Any], *, task: str) -> list[Any]:
        return [action()]

    def run_on_all(self, action: Callable[[], Value], *, task: str) -> Value:
        return action()

    broadcast = run_on_all


ALONE: Peers = _Alone()


def agree_on_folder(path: Path, peers: Peers, *, overwrite: bool = False, is_new: bool = True) -> str:
    """Make a folder that all processes see, and room in it where the run is new; return the identity of the run.

    Args:
        path: the folder, by the same path on every node.
        peers: all of them call this; rank 0 makes the folder, and writes what the processes share.
        overwrite: delete a run that is there.
        is_new: False where the run is there and is gone on with.

    Raises:
        RunExistsError: there is a run, or something else under our names, or a file.
        RankError: a rank does not see the folder that rank 0 made.
    """
    run_id = uuid.uuid4().hex
    # of the form of a temporary file of run.json, which an overwriting run removes and readers do not look at
    marker = path / f".{MANIFEST}.{uuid.uuid4().int}.tmp"

    def lead() -> list[str]:
        if is_new:
            make_room(path, overwrite=overwrite)
        if peers.world_size > 1:
            marker.touch()
        return [run_id, marker.name, socket.gethostname()]

    run_id, name, host = peers.gather(lambda: lead() if peers.rank == 0 else None, task=f"making room in {path}")[0]
    if peers.world_size > 1:
        peers.run_on_all(lambda: _require_shared(path / name, peers.rank, host), task=f"looking into {path}")
        if peers.rank == 0:
            marker.unlink(missing_ok=True)
    return str(run_id)


def count_processes(world_size: int) -> str:
    """Return "1 process", "4 processes"."""
    return "1 process" if world_size == 1 else f"{world_size} processes"


def _require_shared(marker: Path, rank: int, host: str) -> None:
    if not marker.exists():
        raise RankError(
            f"Rank {rank} on {socket.gethostname()} does not see the folder {marker.parent}, which rank 0 made on "
            f"{host}, and all processes of a run write into one folder. Nothing was trained. Name a folder on a file "
            "system that the nodes share, by the same path on each; without one, record the processes of one node.",
            rank,
        )
