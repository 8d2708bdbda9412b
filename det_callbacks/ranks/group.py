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
from det_callbacks.runs.peers import END_OF_FIT

TIMEOUT_SECONDS = 30.0

_MAX_NUMBERS = 6
_NAME_BYTES = 64

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

    def gather(self, content: bytes, *, task: str = "an exchange") -> list[bytes]:
        """Return what each rank gave, by rank; two collectives: what the ranks are at with the lengths, the content."""
        if self._group is None:
            return [content]
        lengths = [length for (length,) in self._meet(task, [len(content)])]
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        if content:
            padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        parts = self._exchange(padded, task)
        return [bytes(part.numpy()[:length]) for part, length in zip(parts, lengths, strict=True)]

    def gather_numbers(self, numbers: Sequence[int], *, task: str = "an exchange") -> list[list[int]]:
        """Return the numbers (64 bits each, equally many, at most 6) that each rank gave, by rank; one collective."""
        return [list(numbers)] if self._group is None else self._meet(task, numbers)

    def do(self, action: Callable[[], Value], *, task: str) -> Value:
        """Do something on every rank, and return what came out on this one, or raise on every rank as ``agree`` does.

        What the action does with other ranks it does not do here: an exchange has none within it.
        """
        outcome: list[Value] = []
        self.agree(lambda: outcome.append(action()), task=task)
        return outcome[0]

    def agree(self, action: Callable[[], Any], *, task: str) -> list[Any]:
        """Do something on every rank, and return what came out by rank (as JSON holds it), or raise on every rank.

        A rank whose own action failed raises that error; the others raise ``RankError`` with what it said and its exit
        code, so that all end together.

        Args:
            action: of this rank; what it returns goes through JSON.
            task: what it is, for messages: "opening the run".
        """
        if self._group is None:
            return [action()]
        error: Exception | None = None
        told: dict[str, Any] = {}
        try:
            told["value"] = action()
        except Exception as caught:  # whatever it is, the others have to hear of it before it goes on its way
            error = caught
            exit_code = caught.exit_code if isinstance(caught, DetCallbacksError) else 1
            told = {"error": str(caught), "kind": type(caught).__name__, "exit_code": exit_code}
        answers = [json.loads(answer) for answer in self.gather(json.dumps(told).encode(), task=task)]
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

    def _meet(self, task: str, numbers: Sequence[int]) -> list[list[int]]:
        """Exchange a few numbers with the name of the task: all ranks have to be at the same one, or none goes on.

        Always of one size, so that ranks that are at different exchanges still understand each other.
        """
        if len(numbers) > _MAX_NUMBERS:
            raise ValueError(f"at most {_MAX_NUMBERS} numbers are exchanged; got {len(numbers)}")
        name = task.encode()[:_NAME_BYTES].ljust(_NAME_BYTES)
        words = [int.from_bytes(name[at : at + 8], "little") for at in range(0, _NAME_BYTES, 8)]
        values = [len(numbers), *numbers, *[0] * (_MAX_NUMBERS - len(numbers)), *words]
        rows = self._gather_words(values, task)
        for rank, row in enumerate(rows):
            if row[1 + _MAX_NUMBERS :] != words:
                theirs = b"".join(word.to_bytes(8, "little") for word in row[1 + _MAX_NUMBERS :])
                raise RankError(
                    f"Rank {self.rank} of {self.world_size} is at {name.decode(errors='replace').strip()}, and rank "
                    f"{rank} at {theirs.decode(errors='replace').strip()}: they no longer do the same, most likely "
                    "because one has fewer batches or stopped early. Give all ranks equally many steps, and stop them "
                    "together.",
                    rank,
                )
        return [row[1 : 1 + row[0]] for row in rows]

    def close(self) -> None:
        """Give the group back; may be called more than once."""
        group, self._group = self._group, None
        self.rank, self.world_size = (self.rank, 1) if group is not None else (self.rank, self.world_size)
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _gather_words(self, words: Sequence[int], task: str) -> list[list[int]]:
        signed = [value - (1 << 64) if value >= 1 << 63 else value for value in words]
        parts = self._exchange(torch.tensor(signed, dtype=torch.int64), task)
        return [[int(value) % (1 << 64) for value in part.tolist()] for part in parts]

    def _exchange(self, mine: torch.Tensor, task: str) -> list[torch.Tensor]:
        self.num_exchanges += 1
        self.num_bytes += mine.nbytes
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        try:
            with no_dispatch():
                dist.all_gather(parts, mine, group=self._group)
        except RuntimeError as error:  # what gloo raises: a timeout, or a connection that a process closed
            if task == END_OF_FIT:
                raise RankError(
                    f"Rank {self.rank} of {self.world_size} has finished its training, and not all others came to the "
                    f"end of theirs within {self._timeout_seconds:.0f} seconds: it got fewer batches than they, or "
                    "stopped early, or one of them ended. Give all ranks equally many steps, and stop them together "
                    f"({str(error).splitlines()[0]}).",
                    -1,
                    DetCallbacksError.exit_code,
                ) from error
            raise RankError(
                f"Rank {self.rank} of {self.world_size} did not hear from all others within "
                f"{self._timeout_seconds:.0f} seconds, or one of them ended, in {task}: {str(error).splitlines()[0]}. "
                "Look at the output of the other ranks: one raised, was killed, or left the training early.",
                -1,
                DetCallbacksError.exit_code,
            ) from error
        return parts
