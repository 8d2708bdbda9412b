"""Digests that are queued in the order of a device's work, and known after the
host waits for the device.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch

from det_callbacks.digest.host import digest_bytes
from det_callbacks.digest.triton_digest import Span, TritonDigest, device_choice
from det_callbacks.digest.unobserved import unobserved
from det_callbacks.errors import DetCallbacksError
from det_callbacks.internals.torch import storage_address

MAX_TENSORS = 1024
MAX_BYTES = 64 * 1024 * 1024
"""Limit on the memory held by tensors that wait for their digest."""

Known = dict[torch.device, list[int]]
"""The digests that ``DeferredDigests.finish`` returns, for ``value_of``."""


@dataclass(frozen=True, slots=True, eq=False)
class DeferredBits:
    """A digest that ``value_of`` computes from the digests of devices, once these are known."""

    value: Callable[[Known], int]


Bits = int | DeferredBits


def derived(parts: Sequence[Bits], combine: Callable[[list[int]], int]) -> DeferredBits:
    """Return bits that the host computes from others, some of which are deferred."""
    return DeferredBits(lambda known: combine([value_of(part, known) for part in parts]))


def value_of(bits: Bits, known: Known) -> int:
    return bits.value(known) if isinstance(bits, DeferredBits) else bits


class DigestQueue:
    """A queue of spans of a device's memory, whose digests are launched and fetched together.

    The queue holds the storage of a waiting span, whose bytes must not change before the launch. It
    launches in ``before_write``, when too much waits, when the stream changes, and in ``finish``,
    which alone waits for the device. Any thread may call: autograd has a thread for each device.
    """

    def __init__(
        self, method: TritonDigest, *, max_tensors: int = MAX_TENSORS, max_bytes: int = MAX_BYTES
    ) -> None:
        self._method = method
        self._max_tensors, self._max_bytes = max_tensors, max_bytes
        self._stream: Hashable = None
        # storage -> streams that may still be reading it
        self._readers: dict[int, dict[Hashable, None]] = {}
        self._lock = RLock()
        self.discard()

    def add(self, storage: torch.UntypedStorage, offset: int, num_bytes: int) -> int:
        """Add a span whose bytes are ready on the device's current stream;
        return the index of its digest.
        """
        stream = self._method.stream()
        with self._lock:
            self._require_whole()
            if self._pending and (
                stream != self._stream
                or len(self._pending) == self._max_tensors
                or self._num_bytes + num_bytes > self._max_bytes
            ):
                self.flush()
            self._stream = stream
            self._pending.append((storage, offset, num_bytes))
            self._pending_addresses.add(storage_address(storage))
            self._num_bytes += num_bytes
            self._num_added += 1
            if self._num_bytes > self._max_bytes:
                self.flush()
            return self._num_added - 1

    def before_write(self, storage: torch.UntypedStorage) -> None:
        """Launch what waits if a waiting span is in this storage,
        which is about to change or be freed.
        """
        address = storage_address(storage)
        with self._lock:  # another thread may be launching
            if address in self._pending_addresses:
                self.flush()
            if address in self._readers:
                self._wait_for(self._readers.pop(address))

    def before_any_write(self) -> None:
        """Launch what waits, and have the current stream wait until all spans are read."""
        with self._lock:
            self.flush()
            # a dict keeps their order
            self._wait_for(
                dict.fromkeys(stream for streams in self._readers.values() for stream in streams)
            )

    def skip_record_stream_for(self, storage: torch.UntypedStorage) -> None:
        """Do not report reads of a storage to the allocator until ``discard``."""
        self._skip_record_stream.add(storage_address(storage))

    def flush(self) -> None:
        """Launch the digests of all waiting spans."""
        with self._lock:
            self._require_whole()
            if not self._pending:
                return
            pending, stream = self._pending, self._stream
            self._forget_pending()
            self._is_broken = True
            for storage, offset, num_bytes in pending:
                if storage.nbytes() < offset + num_bytes:
                    raise DetCallbacksError(
                        f"the memory of a tensor of {num_bytes} bytes was freed before its digest "
                        "was taken; call before_write with a storage before it is freed or resized"
                    )
            with unobserved():
                self._launched.append(
                    self._method.launch(pending, stream, frozenset(self._skip_record_stream))
                )
            if stream is not None:
                for storage, _, _ in pending:
                    self._readers.setdefault(storage_address(storage), {})[stream] = None
            self._is_broken = False

    def finish(self) -> list[int]:
        """Return the digests of all spans in order, and start over; raise if a digest is lost."""
        with self._lock:
            self.flush()
            with unobserved():
                digests = self._method.collect(self._launched) if self._launched else []
            assert len(digests) == self._num_added, "one for each span"
            if digests:
                self._readers = {}  # the device has finished reading
            self.discard()
            return digests

    def discard(self) -> None:
        """Start over without the digests, after an exception."""
        with self._lock:
            self._forget_pending()
            self._skip_record_stream: set[int] = set()
            self._launched: list[Any] = []
            self._num_added = 0
            self._is_broken = False

    def _wait_for(self, streams: Iterable[Hashable]) -> None:
        current = self._method.stream()
        for stream in streams:
            if stream != current:
                self._method.wait_for(stream)

    def _forget_pending(self) -> None:
        self._pending: list[Span] = []
        self._pending_addresses: set[int] = set()
        self._num_bytes = 0
        self._stream = None

    def _require_whole(self) -> None:
        if self._is_broken:
            raise DetCallbacksError(
                "an earlier launch failed, so digests of this queue are lost; the tensors are "
                "intact; discard the queue and take the digests again"
            )


class DeferredDigests:
    """A queue for each device that computes digests, and pending copies;
    ``finish`` alone waits for the devices.

    Copies from CUDA devices use pinned memory, which torch reuses only when they are done; copies
    from other devices are synchronous.
    """

    def __init__(self) -> None:
        self.is_used = False  # whether any device computes digests
        self._queues: dict[torch.device, DigestQueue | None] = {}
        self._used: list[DigestQueue] = []
        self._forget_copies()

    def computes_on(self, device: torch.device) -> bool:
        """Return whether a device computes its digests; the host does otherwise."""
        return self._queue_of(device) is not None

    def add(self, storage: torch.UntypedStorage, offset: int, num_bytes: int) -> Bits | None:
        """Queue the digest of a span of a device's memory as it is now;
        return None if the host computes it.
        """
        if not num_bytes:
            return digest_bytes(b"")
        device = storage.device
        queue = self._queue_of(device)
        if queue is None:
            return None
        index = queue.add(storage, offset, num_bytes)
        return DeferredBits(lambda known: known[device][index])

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of a tensor on the host, which is valid after ``finish``."""
        with unobserved(), torch.no_grad():
            source = tensor.detach().resolve_conj().resolve_neg().contiguous()
            is_pinned = source.device.type == "cuda"
            copy = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=is_pinned)
            copy.copy_(source, non_blocking=is_pinned)
            self._note_copy(source.device)
            return copy

    def send(self, values: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a host tensor into a tensor of the same shape and dtype, after ``before_write``."""
        with unobserved(), torch.no_grad():
            if target.device.type != "cuda":
                target.copy_(values)
                return
            pinned = torch.empty(
                values.shape, dtype=values.dtype, device="cpu", pin_memory=True
            ).copy_(values)
            target.copy_(pinned, non_blocking=True)
            self._sources.append(pinned)
            self._note_copy(target.device)

    def before_write(self, storage: torch.UntypedStorage) -> None:
        for queue in self._used:
            queue.before_write(storage)

    def before_any_write(self) -> None:
        for queue in self._used:
            queue.before_any_write()

    def skip_record_stream_for(self, storage: torch.UntypedStorage) -> None:
        if (queue := self._queue_of(storage.device)) is not None:
            queue.skip_record_stream_for(storage)

    def flush(self) -> None:
        for queue in self._used:
            queue.flush()

    def finish(self) -> Known:
        """Wait for the devices, return what ``value_of`` needs, and start over."""
        known = {
            device: queue.finish() for device, queue in self._queues.items() if queue is not None
        }
        for end in self._copies.values():
            end.synchronize()
        self._forget_copies()
        return known

    def discard(self) -> None:
        self._forget_copies()
        for queue in self._used:
            queue.discard()

    def _note_copy(self, device: torch.device) -> None:
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            self._copies.setdefault(stream, torch.cuda.Event()).record(stream)

    def _forget_copies(self) -> None:
        self._copies: dict[torch.cuda.Stream, torch.cuda.Event] = {}  # the last on each stream
        self._sources: list[torch.Tensor] = []

    def _queue_of(self, device: torch.device) -> DigestQueue | None:
        if device in self._queues:
            return self._queues[device]
        with unobserved():
            method = device_choice(device).method
        queue = self._queues[device] = None if method is None else DigestQueue(method)
        if queue is not None:
            self._used.append(queue)
            self.is_used = True
        return queue
