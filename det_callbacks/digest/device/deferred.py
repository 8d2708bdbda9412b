"""Digests that are asked for in the order of a device's work, and known when the device is waited for at the end."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from det_callbacks.digest.device.queue import DigestQueue
from det_callbacks.digest.device.triton_digest import device_choice
from det_callbacks.digest.unobserved import unobserved
from det_callbacks.host_digest import digest_bytes

Known = dict[torch.device, list[int]]
"""What ``DeferredDigests.finish`` found, for ``value_of``."""


@dataclass(frozen=True, slots=True, eq=False)
class DeferredBits:
    """64 bits that are computed from what ``DeferredDigests.finish`` found."""

    value: Callable[[Known], int]


Bits = int | DeferredBits


def derived(parts: Sequence[Bits], combine: Callable[[list[int]], int]) -> DeferredBits:
    """Return bits that are computed on the host from others, some of which are deferred, in their order."""
    return DeferredBits(lambda known: combine([value_of(part, known) for part in parts]))


def value_of(bits: Bits, known: Known) -> int:
    """Return bits as a number."""
    return bits.value(known) if isinstance(bits, DeferredBits) else bits


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
        """Forget the copies, which may be under way: torch hands their pinned memory out again after them (2.13)."""
        self._ends = {}
        self._sources = []

    def _note_end(self, device: torch.device) -> None:
        stream = torch.cuda.current_stream(device)
        self._ends.setdefault(stream, torch.cuda.Event()).record(stream)


class DeferredDigests:
    """A queue for each device that computes digests; devices are waited for in ``finish`` alone.

    Attributes:
        is_used: whether any device computes digests, as far as asked; until then nothing has to be said before a write.
    """

    def __init__(self) -> None:
        self.is_used = False
        self._queues: dict[torch.device, DigestQueue | None] = {}
        self._transfers = Transfers()

    def computes_on(self, device: torch.device) -> bool:
        """Return whether a device computes digests; the first time it finds that out, see ``device_choice``."""
        return self._queue_of(device) is not None

    def add(self, storage: torch.UntypedStorage, offset: int, num_bytes: int) -> Bits | None:
        """Ask for the digest of a span of memory of a device as it is now in the order of the device's work.

        None where that device's tensors have to be copied to the host; raises where a launch failed before.
        """
        if not num_bytes:
            return digest_bytes(b"")
        device = storage.device
        queue = self._queue_of(device)
        if queue is None:
            return None
        place = queue.add(storage, offset, num_bytes)
        return DeferredBits(lambda known: known[device][place])

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of a tensor on the host, to be read after ``finish``; see ``Transfers``."""
        with unobserved(), torch.no_grad():
            return self._transfers.fetch(tensor.detach().resolve_conj().resolve_neg().contiguous())

    def send(self, values: torch.Tensor, target: torch.Tensor) -> None:
        """Write the elements of a host tensor into one of the same shape and dtype; say ``before_write`` first."""
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

    def _used(self) -> Iterable[DigestQueue]:
        return [queue for queue in self._queues.values() if queue is not None] if self.is_used else ()

    def _queue_of(self, device: torch.device) -> DigestQueue | None:
        if device in self._queues:
            return self._queues[device]
        with unobserved():  # what is tried there is none of the program's ops
            method = device_choice(device).method
        queue = self._queues[device] = None if method is None else DigestQueue(method)
        self.is_used |= queue is not None
        return queue
