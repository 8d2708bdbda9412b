"""A group of our own for the few bytes that the processes of a run exchange.

It runs on gloo, whatever the training uses, so that nothing of ours ever stands in the training's own groups; each
exchange has a short timeout, and an error names the rank that is missing or went wrong.
"""

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._mode_utils import no_dispatch  # looked at in torch 2.13: hides what runs inside from open modes

from det_callbacks.errors import DetCallbacksError, RankError

TIMEOUT_SECONDS = 30.0

Value = TypeVar("Value")


class RankGroup:
    """The processes of a run, as far as they talk to each other; one process alone talks to itself.

    Args:
        timeout_seconds: after which an exchange that a process does not come to is an error.

    Attributes:
        rank: of this process, from 0.
        world_size: number of processes.
        num_exchanges: collectives so far.
        num_bytes: that this process has sent in them so far.

    Making one is itself a collective of the default group (``torch.distributed.new_group``), so all ranks make it at
    the same place. Each exchange is one or two collectives of a few bytes: 0.1 to 0.3 milliseconds on one machine.

    Raises:
        RankError: from every method, when a process does not take part in time.
    """

    def __init__(self, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.num_exchanges = self.num_bytes = 0
        self._timeout_seconds = timeout_seconds
        self._group: Any = None
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))

    def gather(self, content: bytes) -> list[bytes]:
        """Return what each rank gave, by rank; two collectives: the lengths, then the content."""
        if self._group is None:
            return [content]
        lengths = self._exchange(torch.tensor([len(content)], dtype=torch.int64))
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(max(1, longest), dtype=torch.uint8)
        if content:
            padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        parts = self._exchange(padded)
        return [bytes(part.numpy()[: int(length)]) for part, length in zip(parts, lengths, strict=True)]

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers (64 bits, equally many) that each rank gave, by rank; one collective."""
        signed = [number - (1 << 64) if number >= 1 << 63 else number for number in numbers]
        if self._group is None:
            return [list(numbers)]
        parts = self._exchange(torch.tensor(signed, dtype=torch.int64))
        return [[int(number) % (1 << 64) for number in part.tolist()] for part in parts]

    def agree(self, action: Callable[[], Value], *, task: str) -> list[Any]:
        """Do something on every rank, and return what came out by rank (as JSON holds it), or raise on every rank.

        A rank whose own action failed raises that error; the others raise ``RankError`` with what it said and its exit
        code, so that all end together.

        Args:
            action: of this rank; what it returns goes through JSON.
            task: what it is, for messages: "opening the run".
        """
        error: DetCallbacksError | None = None
        value: Any = None
        try:
            value = action()
        except DetCallbacksError as caught:
            error = caught
        told: dict[str, Any] = {"value": value}
        if error is not None:
            told = {"error": str(error), "kind": type(error).__name__, "exit_code": error.exit_code}
        answers = [json.loads(answer) for answer in self.gather(json.dumps(told).encode())]
        if error is not None:
            raise error
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise RankError(
                    f"Rank {rank} failed in {task}, so this rank ({self.rank} of {self.world_size}) stops too: "
                    f"{answer['kind']}: {answer['error']}",
                    rank,
                    answer["exit_code"],
                )
        return [answer["value"] for answer in answers]

    def close(self) -> None:
        """Give the group back; may be called more than once."""
        group, self._group = self._group, None
        self.rank, self.world_size = (self.rank, 1) if group is not None else (self.rank, self.world_size)
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _exchange(self, mine: torch.Tensor) -> list[torch.Tensor]:
        self.num_exchanges += 1
        self.num_bytes += mine.nbytes
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        try:
            with no_dispatch():
                dist.all_gather(parts, mine, group=self._group)
        except RuntimeError as error:  # what gloo raises: a timeout, or a connection that a process closed
            raise RankError(
                f"Rank {self.rank} of {self.world_size} did not hear from all others within "
                f"{self._timeout_seconds:.0f} seconds, or one of them ended: {str(error).splitlines()[0]}. Look at the "
                "output of the other ranks: one raised, was killed, or left the training early.",
                -1,
                DetCallbacksError.exit_code,
            ) from error
        return parts
