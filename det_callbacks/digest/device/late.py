"""Digests that are asked for in the order of a device's work, and known when the device is waited for at the end."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from det_callbacks.digest.device.queue import DigestQueue
from det_callbacks.digest.device.triton_digest import device_choice
from det_callbacks.digest.unobserved import unobserved
from det_callbacks.host_digest import digest_bytes


class LateBits:
    """64 bits that are known once ``LateDigests.finish`` has been called."""

    __slots__ = ()

    def value(self, known: "Known") -> int:
        """Return them."""
        raise NotImplementedError


Bits = int | LateBits
Known = dict[torch.device, list[int]]
"""What ``LateDigests.finish`` found, for ``value_of``."""


class _Queued(LateBits):
    """A digest that a device computes."""

    __slots__ = ("_device", "_place")

    def __init__(self, device: torch.device, place: int) -> None:
        self._device = device
        self._place = place

    def value(self, known: Known) -> int:
        return known[self._device][self._place]


class Derived(LateBits):
    """Bits that are computed on the host from others, some of which are late.

    Args:
        parts: the others.
        combine: takes them as numbers, in their order.
    """

    __slots__ = ("_combine", "_parts")

    def __init__(self, parts: Sequence[Bits], combine: Callable[[list[int]], int]) -> None:
        self._parts = tuple(parts)
        self._combine = combine

    def value(self, known: Known) -> int:
        """Return them."""
        return self._combine([value_of(part, known) for part in self._parts])


def value_of(bits: Bits, known: Known) -> int:
    """Return bits as a number."""
    return bits.value(known) if isinstance(bits, LateBits) else bits


class Transfers:
    """Copies under way: what was fetched may be read after ``wait``, which alone waits for the devices.

    From and to CUDA devices they go through pinned memory, which torch allocates once and keeps for the next step;
    elsewhere they are made at once. Must run inside ``digest.unobserved``.
    """

    def __init__(self) -> None:
        self._ends: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        self._sources: list[torch.Tensor] = []

    def fetch(self, source: torch.Tensor) -> torch.Tensor:
        """Return a copy of a contiguous tensor on the host."""
        is_pinned = source.device.type == "cuda"
        copy = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=is_pinned)
        copy.copy_(source, non_blocking=is_pinned)
        if is_pinned:
            self._note_end(source.device)
        return copy

    def send(self, values: torch.Tensor, target: torch.Tensor) -> None:
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


class LateDigests:
    """A queue for each device that computes digests; devices are waited for in ``finish`` alone."""

    def __init__(self) -> None:
        self._queues: dict[torch.device, DigestQueue[Any] | None] = {}
        self._transfers = Transfers()

    def computes_on(self, device: torch.device) -> bool:
        """Return whether a device computes digests; the first time it finds that out, see ``device_choice``."""
        return self._queue_of(device) is not None

    def add(self, storage: torch.UntypedStorage, offset: int, num_bytes: int) -> Bits | None:
        """Ask for the digest of a span of memory as it is now in the order of its device's work.

        Args:
            storage: of a device that is not the host.
            offset: of the first byte.
            num_bytes: how many.

        Returns:
            None where that device's tensors have to be copied to the host.

        Raises:
            DetCallbacksError: a launch failed before.
        """
        if not num_bytes:
            return digest_bytes(b"")
        device = storage.device
        queue = self._queue_of(device)
        return None if queue is None else _Queued(device, queue.add(storage, offset, num_bytes))

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of a tensor on the host, to be read after ``finish``.

        From CUDA it is made in the order of the device's work, into pinned memory; elsewhere at once.
        """
        with unobserved(), torch.no_grad():
            return self._transfers.fetch(tensor.detach().resolve_conj().resolve_neg().contiguous())

    def send(self, values: torch.Tensor, target: torch.Tensor) -> None:
        """Write the elements of a host tensor into one of the same shape and dtype, whatever its strides.

        To CUDA this is done in the order of the device's work, from pinned memory; elsewhere at once. What waits for
        its digest has to be launched before, see ``before_write``.
        """
        with unobserved(), torch.no_grad():
            self._transfers.send(values, target)

    def before_write(self, storage: torch.UntypedStorage) -> None:
        """Launch what waits, if any of it lies in a storage that is about to change or to lose its memory."""
        for queue in self._used():
            queue.before_write(storage)

    def before_any_write(self) -> None:
        """Launch what waits, and have what the devices' current streams are given next come after all reading."""
        for queue in self._used():
            queue.before_any_write()

    def unhold(self, storage: torch.UntypedStorage) -> None:
        """Do not tell the allocator that a storage is read, until the step has ended."""
        if (queue := self._queue_of(storage.device)) is not None:
            queue.unhold(storage)

    def flush(self) -> None:
        """Launch what waits."""
        for queue in self._used():
            queue.flush()

    def finish(self) -> Known:
        """Wait for the devices and return what ``value_of`` needs; begin anew.

        Raises:
            DetCallbacksError: a launch failed, or memory was freed before it was digested.
        """
        known = {device: queue.finish() for device, queue in self._queues.items() if queue is not None}
        self._transfers.wait()
        return known

    def discard(self) -> None:
        """Begin anew without the digests."""
        self._transfers.discard()
        for queue in self._used():
            queue.discard()

    def _used(self) -> list[DigestQueue[Any]]:
        return [queue for queue in self._queues.values() if queue is not None]

    def _queue_of(self, device: torch.device) -> DigestQueue[Any] | None:
        if device in self._queues:
            return self._queues[device]
        with unobserved():  # what is tried there is none of the program's ops
            method = device_choice(device).method
        queue = self._queues[device] = None if method is None else DigestQueue(method)
        return queue
