"""Digests that are asked for one by one and computed together, known only at the end."""

from collections.abc import Hashable, Sequence, Set
from threading import RLock
from typing import Any, Protocol

import torch

from det_callbacks.digest.unobserved import unobserved
from det_callbacks.errors import DetCallbacksError

MAX_TENSORS = 1024
MAX_BYTES = 64 * 1024 * 1024
"""Memory that tensors waiting for their digest may hold: what the program would have freed by then."""

Span = tuple[torch.UntypedStorage, int, int]
"""Storage, first byte in it, number of bytes."""


class DeviceDigest(Protocol):
    """How the digests of tensors on one device are computed; ``name`` is for people."""

    name: str

    def stream(self) -> Hashable:
        """Return what the device's work is ordered by now; equal for one order."""

    def wait_for(self, stream: Hashable) -> None:
        """Have what is enqueued from now on come after what another stream has been given; asked only of streams."""

    def launch(self, spans: Sequence[Span], stream: Hashable, unheld: Set[int] = frozenset()) -> Any:
        """Enqueue the digests of spans of memory, behind what that stream has been given.

        ``unheld``: addresses of the storages of which the allocator is not to be told that the stream reads them.
        """

    def collect(self, launched: Sequence[Any]) -> list[int]:
        """Return the digests of all launches, one after the other; the one place that waits for the device."""


class DigestQueue:
    """Spans of a device's memory in the order of their digests, launched together and fetched together.

    The storage of a span that waits is held, so the program may drop its tensors (not the tensors: they would keep
    autograd's graph alive). Its bytes must not change until it is launched: say ``before_write`` of whatever is about
    to be written, resized or freed. Launches happen then, when the budget is full, when the stream is another one, and
    at ``finish``, which alone waits for the device. A write on another stream than the one that a storage is read on
    comes after the reading, also where the launch is long past: whatever orders the program's own work on the two may
    have been said before it.

    After a launch failed its spans' digests are lost, and the queue refuses to go on until ``discard``.

    Any thread may call: autograd has one for each device, and what one of them writes may have to be read first by
    another device's queue.

    Args:
        method: of the device.
        max_tensors: spans that wait at most.
        max_bytes: that they hold at most; one that is larger by itself is launched at once.
    """

    def __init__(self, method: DeviceDigest, *, max_tensors: int = MAX_TENSORS, max_bytes: int = MAX_BYTES) -> None:
        self._method = method
        self._max_tensors = max_tensors
        self._max_bytes = max_bytes
        self._pending: list[Span] = []
        self._places: set[int] = set()
        self._num_bytes = 0
        self._stream: Hashable = None
        self._launched: list[Any] = []
        self._unheld: set[int] = set()
        # by storage: the streams that may still be reading it
        self._readers: dict[int, tuple[Hashable, ...]] = {}
        self._num_added = 0
        self._is_broken = False
        self._lock = RLock()

    def add(self, storage: torch.UntypedStorage, offset: int, num_bytes: int) -> int:
        """Take a span whose bytes are ready on the device's current stream; return the place of its digest.

        Raises:
            DetCallbacksError: if a launch failed before.
        """
        stream = self._method.stream()
        with self._lock:
            if self._is_broken:
                self._require_whole()
            pending = self._pending
            if pending and (
                stream != self._stream
                or len(pending) == self._max_tensors
                or self._num_bytes + num_bytes > self._max_bytes
            ):
                self.flush()
                pending = self._pending
            self._stream = stream
            pending.append((storage, offset, num_bytes))
            self._places.add(storage._cdata)
            self._num_bytes += num_bytes
            place = self._num_added
            self._num_added += 1
            if self._num_bytes > self._max_bytes:
                self.flush()
            return place

    def before_write(self, storage: torch.UntypedStorage) -> None:
        """Launch what waits, if any of it lies in a storage that is about to change or to lose its memory."""
        place = storage._cdata
        with self._lock:  # also where nothing waits: another thread may be launching it
            if place in self._places:
                self.flush()
            if place in self._readers:
                current = self._method.stream()
                for stream in self._readers.pop(place):
                    if stream != current:
                        self._method.wait_for(stream)

    def before_any_write(self) -> None:
        """Launch what waits, and have the current stream come after all that is read: it may write any storage."""
        with self._lock:
            self.flush()
            current = self._method.stream()
            # in the order in which they came: a set's is another one in each process
            for stream in dict.fromkeys(stream for streams in self._readers.values() for stream in streams):
                if stream != current:
                    self._method.wait_for(stream)

    def unhold(self, storage: torch.UntypedStorage) -> None:
        """Do not tell the allocator, until ``discard``, that a storage is read: somebody else sees to its reuse."""
        self._unheld.add(storage._cdata)

    def flush(self) -> None:
        """Launch what waits, on the stream it was made on.

        Raises:
            DetCallbacksError: if a launch failed before, or the memory of a span that waits was freed.
        """
        with self._lock:
            self._require_whole()
            if self._pending:
                self._launch()

    def _launch(self) -> None:
        pending, stream = self._pending, self._stream
        self._forget_pending()
        self._is_broken = True
        for storage, offset, num_bytes in pending:
            if storage.nbytes() < offset + num_bytes:
                raise DetCallbacksError(
                    f"the memory of a tensor of {num_bytes} bytes was freed before its digest was taken; the tensors "
                    "before it are intact; say before_write of a storage that is about to be freed or resized"
                )
        with unobserved():
            self._launched.append(self._method.launch(pending, stream, frozenset(self._unheld)))
        if stream is not None:
            readers = self._readers
            for storage, _, _ in pending:
                known = readers.setdefault(storage._cdata, (stream,))
                if stream not in known:
                    readers[storage._cdata] = (*known, stream)
        self._is_broken = False

    def finish(self) -> list[int]:
        """Return the digests of all spans in the order in which they came, and begin anew.

        Raises:
            DetCallbacksError: as ``flush`` does; also if the device gave another number of digests.
        """
        with self._lock:
            self.flush()
            with unobserved():
                digests = self._method.collect(self._launched) if self._launched else []
            if len(digests) != self._num_added:
                self._is_broken = True
                raise DetCallbacksError(
                    f"{self._num_added} spans were queued and {self._method.name} gave {len(digests)} digests, so none "
                    "can be told from another; the tensors are intact; report this with the device and the versions "
                    "in use"
                )
            if digests:
                self._readers = {}  # the device is done with all of them
            self.discard()
            return digests

    def discard(self) -> None:
        """Begin anew without the digests, after an exception of the program or of a launch."""
        with self._lock:
            self._forget_pending()
            self._unheld.clear()
            self._launched = []
            self._num_added = 0
            self._is_broken = False

    def _forget_pending(self) -> None:
        self._pending = []
        self._places = set()
        self._num_bytes = 0
        self._stream = None

    def _require_whole(self) -> None:
        if self._is_broken:
            raise DetCallbacksError(
                "digests of this queue were lost when an earlier launch failed; the tensors are intact; discard the "
                "queue's content and take the digests again"
            )
