"""Copies between the host and devices that are made in the order of the devices' work, without waiting for it."""

import torch
from torch import Tensor


class Transfers:
    """Copies under way: what was fetched may be read after ``wait``, which alone waits for the devices.

    From and to CUDA devices they go through pinned memory, which torch allocates once and keeps for the next step;
    elsewhere they are made at once. Must run inside ``digest.unobserved``.

    Example:
        >>> import torch
        >>> transfers = Transfers()
        >>> copy = transfers.fetch(torch.arange(3))
        >>> transfers.wait()
        >>> copy.tolist()
        [0, 1, 2]
    """

    def __init__(self) -> None:
        self._ends: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        self._sources: list[Tensor] = []

    def fetch(self, source: Tensor) -> Tensor:
        """Return a copy of a contiguous tensor on the host."""
        is_pinned = source.device.type == "cuda"
        copy = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=is_pinned)
        copy.copy_(source, non_blocking=is_pinned)
        if is_pinned:
            self._note_end(source.device)
        return copy

    def send(self, values: Tensor, target: Tensor) -> None:
        """Write the elements of a host tensor into one of the same shape and dtype, with any strides."""
        if target.device.type != "cuda":
            target.copy_(values)
            return
        pinned = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True).copy_(values)
        target.copy_(pinned, non_blocking=True)
        self._sources.append(pinned)
        self._note_end(target.device)

    def wait(self) -> None:
        """Wait until all copies are made."""
        for end in self._ends.values():
            end.synchronize()
        self.discard()

    def discard(self) -> None:
        """Forget the copies, which may still be under way: torch hands their pinned memory out again after them.

        ``copy_`` with ``non_blocking`` tells the pinned memory's allocator of its stream (torch 2.13).
        """
        self._ends = {}
        self._sources = []

    def _note_end(self, device: torch.device) -> None:
        stream = torch.cuda.current_stream(device)
        self._ends.setdefault(stream, torch.cuda.Event()).record(stream)
