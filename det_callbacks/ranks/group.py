"""A group of our own for the few bytes that the processes of a run exchange.

It runs on gloo, whatever the training uses, so that nothing of ours ever stands in the training's own groups; each
exchange has a short timeout, and an error names the rank that is missing or went wrong.
"""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._mode_utils import no_dispatch  # looked at in torch 2.13: hides what runs inside from open modes

from det_callbacks.errors import DetCallbacksError, RankError
from det_callbacks.runs.peers import END_OF_FIT

PATIENCE_SECONDS = 1800.0
"""That ranks wait for each other in: one may load, save or draw batches again for longer than another. A rank that ends
is noticed all the same, since its connections close."""

END_SECONDS = 30.0
"""That a rank which has finished its training waits for the others, which may never come: it may have got fewer
batches, and they wait for it in a collective of the training."""
"""For which the other ranks wait for what rank 0 does for all of them."""

_HEAD_BYTES = 256
"""Of the first collective of an exchange; one of at most so many bytes needs no second."""

Value = TypeVar("Value")


class RankGroup:
    """The processes of a run, as far as they talk to each other; one process alone talks to itself.

    It may be opened and closed several times, for each fit of a Trainer. A copy, or a process that is started, begins
    with a closed one: connections are not theirs.

    Args:
        timeout_seconds: after which an exchange that a process does not come to is an error.
        end_seconds: the same of the exchange at the end of a fit.

    Attributes:
        rank: of this process, from 0.
        world_size: number of processes.
        num_bytes: that this process has sent so far.

    Each exchange is one collective of 256 bytes, and another one for what is larger: 0.1 to 0.3 milliseconds on one
    machine.

    Raises:
        RankError: from every method, when a process does not take part in time.
    """

    def __init__(self, *, timeout_seconds: float = PATIENCE_SECONDS, end_seconds: float = END_SECONDS) -> None:
        self.rank, self.world_size, self.num_bytes = 0, 1, 0
        self._timeout_seconds, self._end_seconds = timeout_seconds, end_seconds
        self._group: Any = None
        self._end_group: Any = None  # a group has one timeout, and one that waits in it for ever cannot be left

    def __reduce__(self) -> tuple[type["RankGroup"], tuple[()]]:
        """Let a copy begin with a closed group."""
        return RankGroup, ()

    def open(self) -> "RankGroup":
        """Make the group of all processes that torch.distributed knows of, and return it.

        That is itself a collective of the default group (``torch.distributed.new_group``), so all ranks do it at the
        same place, before anything that can fail on one of them.
        """
        self.close()
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self._group, self._end_group = (
                dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
                for seconds in (self._timeout_seconds, self._end_seconds)
            )
        return self

    def close(self) -> None:
        """Give the group back; may be called more than once."""
        groups, self._group, self._end_group = (self._group, self._end_group), None, None
        for group in groups:
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)

    def do(self, action: Callable[[], Value], *, task: str) -> Value:
        """Do something on every rank, and return what came out on this one, or raise on every rank as ``agree`` does.

        What the action does with other ranks it does not do here: an exchange has none within it.
        """
        outcome: list[Value] = []
        self.agree(lambda: outcome.append(action()), task=task)
        return outcome[0]

    def agree(self, action: Callable[[], Any], *, task: str) -> list[Any]:
        """Do something on every rank, and return what came out by rank (as JSON holds it), or raise on every rank.

        Args:
            action: of this rank; what it returns goes through JSON.
            task: what it is, for messages: "opening the run".
        """
        if self.world_size == 1:
            return [action()]
        return [json.loads(row) for row in self.gather(lambda: json.dumps(action()).encode(), task=task)]

    def broadcast(self, action: Callable[[], Value], *, task: str) -> Value:
        """Do something on rank 0 and return what came out (as JSON holds it) on every rank, or raise on every rank."""
        if self.world_size == 1:
            return action()
        result: Value = self.agree(lambda: action() if self.rank == 0 else None, task=task)[0]
        return result

    def gather(self, action: Callable[[], bytes], *, task: str) -> list[bytes]:
        """Do something on every rank, and return the bytes that came out by rank, or raise on every rank.

        A rank whose own action failed raises that error; the others raise ``RankError`` with what it said and its exit
        code, so that all end together.

        Args:
            action: of this rank.
            task: what it is, for messages; all ranks have to be at the same one, or none goes on.
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
        self.num_bytes += len(content)
        limit = self._end_seconds if task == END_OF_FIT else self._timeout_seconds
        try:
            with no_dispatch():
                dist.all_gather(parts, mine, group=self._end_group if task == END_OF_FIT else self._group)
        except RuntimeError as error:  # what gloo raises: a timeout, or a connection that a process closed
            seconds, reason = f"{limit:.0f} seconds", str(error).splitlines()[0]
            text = (
                f"Rank {self.rank} of {self.world_size} did not hear from all others within {seconds}, or one of them "
                f"ended, in {task}: {reason}. Look at the output of the other ranks: one raised, was killed, or left "
                "the training early."
            )
            if task == END_OF_FIT:
                text = (
                    f"Rank {self.rank} of {self.world_size} has finished its training, and not all others came to the "
                    f"end of theirs within {seconds}: it got fewer batches than they, or stopped early, or one of them "
                    f"ended. Give all ranks equally many steps, and stop them together ({reason})."
                )
            raise RankError(text, -1, DetCallbacksError.exit_code) from error
        return [part.numpy().tobytes() for part in parts]
