"""A group of our own for the few bytes that the processes of a run exchange.

It runs on gloo, whatever the training uses, so that nothing of ours ever stands in the training's own groups.

A rank that fails within an exchange tells the others, which raise an error that names it (``gather_bytes``). One that
fails anywhere else has its callback close the group (``close`` sets its place to "gone"), and the others raise where
they next wait for it: at the end of a fit in ``_meet``, in any other exchange since its connections are closed.
"""

import json
import socket
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store  # looked at in torch 2.13
from torch.utils._mode_utils import no_dispatch  # likewise: hides what runs inside from open modes

from det_callbacks.errors import DetCallbacksError, RankError
from det_callbacks.runs.files import MANIFEST
from det_callbacks.runs.peers import END_OF_FIT, Peers

PATIENCE_SECONDS = 1800.0
"""How long ranks wait for each other: one may load, save or draw batches again for longer than another. A rank that
ends is noticed at once, since its connections close."""

END_SECONDS = 30.0
"""How long a rank that has finished its training waits for one that is in a training step: that one may have got more
batches, and wait in a collective of the training for the one that has finished."""

SYNC_EVERY_N_STEPS = 10
"""After how many steps the processes ask each other whether one differs, to stop together."""

_HEAD_BYTES = 256
"""Of the first collective of an exchange; one of at most so many bytes needs no second."""

Place = Literal["step", "between", "end", "gone"]
"""Where a rank is: in a training step; between two, as in a validation, a save or a hook; at the end; or it failed."""

Value = TypeVar("Value")


class RankGroup(Peers):
    """The processes of a run, as far as they talk to each other; one process alone talks to itself.

    It may be opened and closed several times, for each fit of a Trainer. A copy, or a process that is started, begins
    with a closed one: connections are not theirs. Each exchange is one collective of 256 bytes, and another one for
    what is larger: 0.1 to 0.3 milliseconds on one machine.

    Args:
        timeout_seconds: after which an exchange that a process does not come to is an error.
        end_seconds: the same at the end of a fit, for a process that is in a training step.

    Attributes:
        rank: of this process, from 0.
        world_size: number of processes.

    Raises:
        RankError: from every method, when a process does not take part in time.
    """

    def __init__(self, *, timeout_seconds: float = PATIENCE_SECONDS, end_seconds: float = END_SECONDS) -> None:
        self.rank, self.world_size = 0, 1
        self._timeout_seconds, self._end_seconds = timeout_seconds, end_seconds
        self._group: Any = None
        self._places: Any = None
        self._place: Place | None = None
        self._has_differed = False

    def __reduce__(self) -> tuple[type["RankGroup"], tuple[()]]:
        """Let a copy begin with a closed group."""
        return RankGroup, ()

    def open(self, world_size: int | None = None) -> "RankGroup":
        """Make the group, and return it.

        That is itself a collective of the default group (``torch.distributed.new_group``), so all ranks do it at the
        same place, before anything that can fail on one of them.

        Args:
            world_size: number of processes; None is as many as torch.distributed knows of.

        Raises:
            RankError: torch.distributed knows of another number.
        """
        self.close()
        known = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self.rank, self.world_size, self._has_differed = 0, world_size or known, False
        if self.world_size == 1:
            return self
        if known != self.world_size:
            raise RankError(
                f"This training has {self.world_size} processes, and torch.distributed knows of {known}: they could "
                "not tell each other what they find. Use a strategy that runs on torch.distributed, such as ddp, or "
                "devices=1."
            )
        self.rank = dist.get_rank()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_seconds))
        self._places = PrefixStore(f"det_callbacks/{self._group.group_name}", _get_default_store())
        self.set_place("between")
        return self

    def close(self) -> None:
        """Give the group back; may be called more than once."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            try:
                self.set_place("gone")  # tells those that wait for this rank not to
            except RuntimeError:  # the rank that keeps the places has ended; who waits for this one notices it too
                self._places = None
            dist.destroy_process_group(group)
        self._places = self._place = None

    def set_place(self, place: Place) -> None:
        """Tell where this rank is, for those that wait for it at the end of a fit; costs a message where it changes."""
        if self._places is not None and place != self._place:
            self._places.set(str(self.rank), place)
            self._place = place

    def run_on_all(self, action: Callable[[], Value], *, task: str) -> Value:
        """Do something on every rank, and return what came out on this one, or raise on every rank as ``gather`` does.

        The action must not talk to other ranks through this group: one exchange cannot stand within another.
        """
        outcome: list[Value] = []
        self.gather(lambda: outcome.append(action()), task=task)
        return outcome[0]

    def broadcast(self, action: Callable[[], Value], *, task: str) -> Value:
        """Do something on rank 0 and return what came out (as JSON holds it) on every rank, or raise on every rank."""
        result: Value = self.gather(lambda: action() if self.rank == 0 else None, task=task)[0]
        return result

    def gather(self, action: Callable[[], Any], *, task: str) -> list[Any]:
        """Do something on every rank, and return what came out by rank (as JSON holds it), or raise on every rank.

        Args:
            action: of this rank; what it returns goes through JSON.
            task: what it is, for messages: "opening the run".
        """
        if self.world_size == 1:
            return [action()]
        return [json.loads(row) for row in self.gather_bytes(lambda: json.dumps(action()).encode(), task=task)]

    def gather_bytes(self, action: Callable[[], bytes], *, task: str) -> list[bytes]:
        """Do something on every rank, and return the bytes that came out by rank, or raise on every rank.

        A rank whose own action failed raises that error; the others raise ``RankError`` with what it said and its exit
        code, so that all end together. All ranks have to be at the same task, or none goes on.
        """
        if self.world_size == 1:
            return [action()]
        error: Exception | None = None
        try:
            kind, content = b"+", action()
        except Exception as caught:  # whatever it is, the others have to hear of it before it goes on its way
            exit_code = caught.exit_code if isinstance(caught, DetCallbacksError) else 1
            told = {"text": f"{type(caught).__name__}: {caught}", "exit_code": exit_code}
            error, kind, content = caught, b"-", json.dumps(told).encode()
        rows = self._exchange(kind + task.encode() + b"\n" + content, task)
        if error is not None:
            raise error
        found = []
        for rank, row in enumerate(rows):
            head, _, content = row.partition(b"\n")
            if head[:1] == b"-":
                told = json.loads(content)
                raise RankError(
                    f"Rank {rank} failed in {head[1:].decode()}, so this rank ({self.rank} of {self.world_size}) stops "
                    f"too: {told['text']}",
                    rank,
                    told["exit_code"],
                )
            if head[1:] != task.encode():
                raise RankError(
                    f"Rank {self.rank} of {self.world_size} is at {task}, and rank {rank} at {head[1:].decode()}: they "
                    "no longer do the same, most likely because one has fewer batches or stopped early. Give all ranks "
                    "equally many steps, and stop them together.",
                    rank,
                )
            found.append(content)
        return found

    def require_shared(self, folder: Path) -> None:
        """Raise ``RankError`` on all ranks where one of them does not see a folder that rank 0 sees."""
        if self.world_size == 1:
            return
        # of the form of a temporary file of run.json, which readers do not look at
        marker = folder / f".{MANIFEST}.{uuid.uuid4().int}.tmp"

        def lead() -> list[str]:
            marker.touch()
            return [marker.name, socket.gethostname()]

        name, host = self.broadcast(lead, task=f"looking into {folder}")

        def look() -> None:
            if not (folder / name).exists():
                raise RankError(
                    f"Rank {self.rank} on {socket.gethostname()} does not see the folder {folder}, which rank 0 made "
                    f"on {host}, and all processes of a run write into one folder. Nothing was trained. Name a folder "
                    "on a file system that the nodes share, by the same path on each; without one, record the "
                    "processes of one node.",
                    self.rank,
                )

        self.run_on_all(look, task=f"looking into {folder}")
        if self.rank == 0:
            marker.unlink(missing_ok=True)

    def stops_after(self, step: int, *, differs: bool, may_stop: bool, asks_now: bool = False) -> bool:
        """Return whether all ranks stop now, because of a step that differed on one of them.

        Several ranks ask each other after every ``SYNC_EVERY_N_STEPS``-th step: one collective of a few bytes.

        Args:
            step: that ended.
            differs: whether it did here, and this process alone would stop.
            may_stop: whether a difference stops the ranks; the same on all of them.
            asks_now: ask also after a step between two of these, on all ranks.

        Raises:
            RankError: a rank is at another step, or does not come.
        """
        if self.world_size == 1:
            return differs
        self._has_differed |= differs
        if not may_stop or ((step + 1) % SYNC_EVERY_N_STEPS and not asks_now):
            return False
        rows = self.gather(lambda: [step, self._has_differed], task="the sync after every n-th step")
        if len({at for at, _ in rows}) > 1:
            raise RankError(
                f"The ranks are no longer at the same step: {', '.join(str(at) for at, _ in rows)}, by rank. Give "
                "all ranks equally many steps.",
            )
        return any(has_differed for _, has_differed in rows)

    def _exchange(self, message: bytes, task: str) -> list[bytes]:
        """Return the message of each rank: its length and its beginning first, and the rest where one has more."""
        room = _HEAD_BYTES - 8
        heads = self._all_gather(len(message).to_bytes(8, "little") + message[:room].ljust(room), task)
        sizes = [int.from_bytes(head[:8], "little") for head in heads]
        rests = [b""] * len(heads)
        if max(sizes) > room:
            rests = self._all_gather(message[room:].ljust(max(sizes) - room), task)
        return [(head[8:] + rest)[:size] for head, rest, size in zip(heads, rests, sizes, strict=True)]

    def _all_gather(self, content: bytes, task: str) -> list[bytes]:
        if self._group is None:
            raise RankError(f"The {self.world_size} processes have parted already, so nothing can be agreed in {task}.")
        mine = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        try:
            if task == END_OF_FIT:
                self._meet()
            with no_dispatch():
                dist.all_gather(parts, mine, group=self._group)
        except RuntimeError as error:  # what gloo raises: a timeout, or a connection that a process closed
            raise RankError(
                f"Rank {self.rank} of {self.world_size} did not hear from all others within "
                f"{self._timeout_seconds:.0f} seconds, or one of them ended, in {task}: {str(error).splitlines()[0]}. "
                "Look at the output of the other ranks: one raised, was killed, or left the training early."
            ) from error
        return [part.numpy().tobytes() for part in parts]

    def _meet(self) -> None:
        """Wait until all ranks are at the end of a fit, without a collective that could not be left any more.

        A rank that is between two steps is waited for: it may validate, or save, for longer than another.
        """
        self.set_place("end")
        keys, pause = [str(rank) for rank in range(self.world_size)], 0.005
        begun = last_without_step = monotonic()
        while True:
            places = [place.decode() for place in self._places.multi_get(keys)]
            now = monotonic()
            if set(places) == {"end"}:
                return
            if "step" not in places:
                last_without_step = now
            why = ""
            if "gone" in places:
                why = f"rank {places.index('gone')} has left"
            elif now - last_without_step > self._end_seconds:
                why = f"rank {places.index('step')} is in a training step, for {self._end_seconds:.0f} seconds"
            elif now - begun > self._timeout_seconds:
                why = f"not all others came to its end within {self._timeout_seconds:.0f} seconds"
            if why:
                raise RankError(
                    f"Rank {self.rank} of {self.world_size} has finished its training, and {why}: one got fewer "
                    "batches than the others, stopped early, or failed. Give all ranks equally many steps, and stop "
                    "them together."
                )
            sleep(pause)
            pause = min(2 * pause, 0.5)
