"""The processes that write one run together, and who of them writes what they share.

Each process writes its own stream. ``run.json`` is written by one process of each folder, the leader: rank 0, and where
a node does not see rank 0's folder, the first rank of that node.
"""

import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from det_callbacks.errors import RankError
from det_callbacks.trace.run_files import MANIFEST, make_room

Value = TypeVar("Value")

END_OF_FIT = "the end of the fit"
"""The task in which processes meet when they have finished their training."""


class Peers(Protocol):
    """The processes of a run, as far as they tell each other something."""

    rank: int
    world_size: int

    def agree(self, action: Callable[[], Any], *, task: str) -> list[Any]:
        """Do something on every rank and return what came out, by rank, or raise on every rank."""

    def do(self, action: Callable[[], Value], *, task: str) -> Value:
        """Do something on every rank and return what came out on this one, or raise on every rank."""


class _Alone:
    """A process without others."""

    rank = 0
    world_size = 1

    def agree(self, action: Callable[[], Any], *, task: str) -> list[Any]:
        return [action()]

    def do(self, action: Callable[[], Value], *, task: str) -> Value:
        return action()


ALONE: Peers = _Alone()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What a process is to the folder that it writes into.

    Attributes:
        run_id: of the run, chosen by rank 0.
        is_leader: it writes what the processes of this folder share.
        ranks: whose streams are in this folder; None for all of the run.
        marker: file by which the ranks saw that they share the folder; None where there is one process.
    """

    run_id: str
    is_leader: bool
    ranks: tuple[int, ...] | None
    marker: Path | None

    def leave_marker(self) -> None:
        """Remove the marker, when run.json is there."""
        if self.is_leader and self.marker is not None:
            self.marker.unlink(missing_ok=True)


def take_seats(path: Path, peers: Peers, *, overwrite: bool = False, is_new: bool = True) -> Seat:
    """Find out which ranks share a folder, and who leads there; make it, and room in it, where the run is new.

    Args:
        path: the folder, by the same path on every node.
        peers: all of them call this.
        overwrite: delete a run that is there.
        is_new: False where the run is there and is gone on with.

    Raises:
        RunExistsError: there is a run, or something else under our names, or a file.
        RankError: a rank sees neither the folder of rank 0 nor that of its own node.
    """
    run_id = uuid.uuid4().hex
    if peers.world_size == 1:
        if is_new:
            make_room(path, overwrite=overwrite)
        return Seat(run_id=run_id, is_leader=True, ranks=None, marker=None)
    # of the form of a temporary file of run.json, which an overwriting run removes and readers do not look at
    marker = path / f".{MANIFEST}.{uuid.uuid4().int}.tmp"

    def lead() -> list[str]:
        if is_new:
            make_room(path, overwrite=overwrite)
        marker.touch()
        return [run_id, marker.name]

    told = peers.agree(lambda: lead() if peers.rank == 0 else None, task=f"making room in {path}")
    run_id, name = told[0]
    marker = path / name
    seen = peers.agree(lambda: [marker.exists(), socket.gethostname()], task=f"looking into {path}")
    leaders = [0 if sees else _first_blind(seen, host) for sees, host in seen]
    if any(leaders):
        peers.do(lambda: lead() if leaders[peers.rank] == peers.rank != 0 else None, task=f"making room in {path}")
        peers.do(lambda: _require_marker(marker, peers.rank, leaders[peers.rank]), task=f"looking into {path}")
    mine = leaders[peers.rank]
    ranks = tuple(rank for rank, leader in enumerate(leaders) if leader == mine)
    return Seat(
        run_id=run_id,
        is_leader=mine == peers.rank,
        ranks=None if len(ranks) == peers.world_size else ranks,
        marker=marker,
    )


def count_processes(world_size: int) -> str:
    """Return "1 process", "4 processes"."""
    return "1 process" if world_size == 1 else f"{world_size} processes"


def _first_blind(seen: list[Any], host: str) -> int:
    return next(rank for rank, (sees, other) in enumerate(seen) if not sees and other == host)


def _require_marker(marker: Path, rank: int, leader: int) -> None:
    if not marker.exists():
        raise RankError(
            f"Rank {rank} does not see the folder {marker.parent} that rank {leader} of the same node made: each sees "
            "another folder under this path. Nothing was recorded. Name a folder that the processes of a node share.",
            rank,
        )
