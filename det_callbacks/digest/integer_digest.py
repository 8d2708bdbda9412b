"""Digests without Triton: torch's integer ops on the device for large tensors, a copy to the host for smaller ones."""

import threading
from collections import deque
from collections.abc import Hashable, Iterator, Sequence, Set
from contextlib import contextmanager

import torch

from det_callbacks.digest.capture import require_no_capture
from det_callbacks.digest.integer_ops import digest_flat
from det_callbacks.digest.queue import Span
from det_callbacks.digest.xxh3 import unsigned
from det_callbacks.host_digest import digest_memory

INTEGER_BYTES = 64 * 1024 * 1024
"""From here on integer ops beat a copy to the host: the 1,700 launches of a chunk, at some 5 us each, take 9 ms, in
which a copy brings some 80 MiB. Reckoned, not measured."""

STREAMED_DEVICES = frozenset({"cuda", "xpu"})
"""Devices with streams, events, and copies into pinned memory that are not waited for; on MPS every copy is."""

MAX_COPIED_BYTES = 128 * 1024 * 1024
"""Pinned memory of the host whose digests are not taken yet; above it the oldest copy is waited for."""


class IntegerLaunch:
    """The digests of one launch, of which some are on the device and some are of bytes on their way to the host.

    Args:
        sizes: of the copied spans, None for each that is digested on the device.
        digests: of those.
        copied: the bytes of the others, one after the other.
        arrived: an event after their copy; None where they are there.
        stream: that it was enqueued on.
    """

    def __init__(
        self,
        sizes: Sequence[int | None],
        digests: Sequence[torch.Tensor],
        copied: torch.Tensor,
        arrived: torch.Event | None,
        stream: Hashable,
    ) -> None:
        self.digests = digests
        self.stream = stream
        self._sizes = sizes
        self._copied: torch.Tensor | None = copied
        self._arrived = arrived
        self._of_copied: list[int] = []

    @property
    def num_bytes(self) -> int:
        """How many bytes of the host it holds."""
        return 0 if self._copied is None else self._copied.numel()

    def digest_copied(self) -> None:
        """Wait for the copy, digest it and let go of it."""
        if self._copied is None:
            return
        if self._arrived is not None:
            self._arrived.synchronize()
        address = self._copied.untyped_storage().data_ptr()  # a tensor's data_ptr is watched in a step
        digests = []
        for size in self._sizes:
            if size is not None:
                digests.append(digest_memory(address, size))
                address += size
        self._of_copied = digests  # all or none: an interrupted call is made again
        self._copied = None

    def all_digests(self, of_device: Iterator[int]) -> list[int]:
        """Return the digests in the order of the spans, taking those of the device from what was fetched."""
        self.digest_copied()
        of_copied = iter(self._of_copied)
        return [unsigned(next(of_device)) if size is None else next(of_copied) for size in self._sizes]


class IntegerDigest:
    """torch's integer ops for large tensors; smaller ones are copied to the host, those of a launch together.

    On CUDA and XPU, work is enqueued on the stream of a launch, and copies are waited for when the digests are
    collected, or once 128 MiB of them are on the host; on other devices a copy is waited for in the launch.

    Args:
        min_bytes: of a tensor that is not copied.
        device: whose streams are used; without it, as on a device that has none, everything is on whatever is current.
    """

    name = "torch's integer ops"

    def __init__(self, *, min_bytes: int = INTEGER_BYTES, device: torch.device | None = None) -> None:
        self._min_bytes = min_bytes
        self._device = device if device is not None and device.type in STREAMED_DEVICES else None
        self._lock = threading.Lock()
        self._unread: deque[IntegerLaunch] = deque()

    def stream(self) -> Hashable:
        """Return the device's current stream; None where it has none."""
        return None if self._device is None else torch.accelerator.current_stream(self._device)

    def wait_for(self, stream: Hashable) -> None:
        """Have the device's current stream wait for what another one has been given."""
        if self._device is not None and isinstance(stream, torch.Stream):
            torch.accelerator.current_stream(self._device).wait_stream(stream)

    def launch(self, spans: Sequence[Span], stream: Hashable, unheld: Set[int] = frozenset()) -> IntegerLaunch:
        """Enqueue the ops and the copy of smaller tensors.

        Raises:
            DetCallbacksError: if the current stream is capturing a CUDA graph.
        """
        require_no_capture()
        with self._on(stream):
            contents = [bytes_of(span) for span in spans]
            if isinstance(stream, torch.Stream):
                for content in contents:
                    if content.untyped_storage()._cdata not in unheld:
                        content.record_stream(stream)
            small = [content for content in contents if content.numel() < self._min_bytes]
            copied, arrived = self._to_host(small)
            digests = [digest_flat(content) for content in contents if content.numel() >= self._min_bytes]
        sizes = [size if size < self._min_bytes else None for _, _, size in spans]
        launched = IntegerLaunch(sizes, digests, copied, arrived, stream)
        with self._lock:
            if launched.num_bytes:
                self._unread.append(launched)
            while sum(one.num_bytes for one in self._unread) > MAX_COPIED_BYTES:
                self._unread.popleft().digest_copied()
        return launched

    def collect(self, launched: Sequence[IntegerLaunch]) -> list[int]:
        """Fetch in one copy what is still on the device, and digest what has been copied."""
        current = self.stream()
        for stream in dict.fromkeys(part.stream for part in launched if part.digests):
            if stream != current:
                self.wait_for(stream)
        late = [digest for part in launched for digest in part.digests]
        fetched = iter(torch.stack(late).tolist() if late else ())
        with self._lock:
            digests = [digest for part in launched for digest in part.all_digests(fetched)]
            self._unread = deque(one for one in self._unread if one.num_bytes)
        return digests

    def _to_host(self, contents: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Event | None]:
        """Return bytes one after the other in the host's memory, and what says when they are there."""
        if not contents:
            return torch.empty((0,), dtype=torch.uint8, device="cpu"), None
        joined = torch.cat(list(contents))
        if self._device is None:
            return joined.cpu(), None
        copied = torch.empty((joined.numel(),), dtype=torch.uint8, device="cpu", pin_memory=True)
        copied.copy_(joined, non_blocking=True)
        arrived = torch.Event(self._device)
        # of this device, which need not be the current one: without a stream an event takes that of the current device
        arrived.record(torch.accelerator.current_stream(self._device))
        return copied, arrived

    @contextmanager
    def _on(self, stream: Hashable) -> Iterator[None]:
        if isinstance(stream, torch.Stream) and stream != self.stream():
            with stream:
                yield
        else:
            yield


def bytes_of(span: Span) -> torch.Tensor:
    """Return a span as a tensor of bytes that shares its memory."""
    storage, offset, size = span
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, offset, (size,), (1,))
