"""Host memory that a device copies from while the host writes on: a ring of pinned buffers."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch


class Event(Protocol):
    """What tells that the device has passed a point, as ``torch.cuda.Event`` does."""

    def record(self) -> None:
        """Mark the current stream's end as the point."""

    def query(self) -> bool:
        """Return whether the device has passed it, without waiting."""


class PinnedRing:
    """Buffers that are written in turn, each only after the device has copied what was in it.

    Nothing here waits: where the device has not come as far as the oldest buffer, there is one buffer more. A device is
    behind by what its queue of launches holds, which bounds them. Memory is not pinned anew for each copy, as pinning
    may synchronise, and pageable memory is not used, as its copy does.

    Args:
        num_words: of 8 bytes that a buffer holds.
        make_buffer: returns a host tensor, pinned where the device is another one, of that many int64.
        make_event: returns an event; None where copies are done when they return.
    """

    def __init__(
        self, num_words: int, *, make_buffer: Callable[[int], torch.Tensor], make_event: Callable[[], Event] | None
    ) -> None:
        self._num_words = num_words
        self._make_buffer = make_buffer
        self._make_event = make_event
        self._buffers: deque[tuple[torch.Tensor, np.ndarray, Event | None]] = deque()

    @property
    def num_buffers(self) -> int:
        """How many buffers there are by now."""
        return len(self._buffers)

    def copy(self, words: Sequence[int], target: torch.Tensor) -> None:
        """Enqueue on the current stream that these words are written to the beginning of a device's tensor."""
        buffers = self._buffers
        if buffers and ((event := buffers[0][2]) is None or event.query()):
            buffer, view, event = buffers.popleft()
        else:
            buffer = self._make_buffer(self._num_words)
            view, event = buffer.numpy(), None if self._make_event is None else self._make_event()
        num_words = len(words)
        view[:num_words] = words
        target[:num_words].copy_(buffer[:num_words], non_blocking=True)
        if event is not None:
            event.record()
        buffers.append((buffer, view, event))
