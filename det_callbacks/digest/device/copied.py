"""Digests without Triton: tensors are copied to the host in the order of the device's work, and digested there."""

import threading
from collections import deque
from collections.abc import Hashable, Iterator, Sequence, Set
from contextlib import contextmanager

import torch

from det_callbacks.digest.device.queue import Span, require_no_capture
from det_callbacks.host_digest import digest_memory

STREAMED_DEVICES = frozenset({"cuda", "xpu"})
"""Devices with streams, events, and copies into pinned memory that are not waited for; on MPS every copy is."""

MAX_COPIED_BYTES = 128 * 1024 * 1024
"""Pinned memory of the host whose digests are not taken yet; above it the oldest copy is waited for, and a larger copy
is made at once, without pinned memory."""


class CopiedLaunch:
    """The bytes of one launch on their way to the host.

    Args:
        sizes: of the spans.
        copied: their bytes, one after the other.
        arrived: an event after their copy; None where they are there.
    """

    def __init__(self, sizes: Sequence[int], copied: torch.Tensor, arrived: torch.Event | None) -> None:
        self._sizes = sizes
        self._copied: torch.Tensor | None = copied
        self._arrived = arrived
        self._digests: list[int] = []

    @property
    def num_bytes(self) -> int:
        """How many bytes of the host it holds."""
        return 0 if self._copied is None else self._copied.numel()

    def digests(self) -> list[int]:
        """Wait for the copy, digest it and let go of it."""
        if self._copied is not None:
            if self._arrived is not None:
                self._arrived.synchronize()
            address = self._copied.data_ptr()
            digests = []
            for size in self._sizes:
                digests.append(digest_memory(address, size))
                address += size
            self._digests, self._copied = digests, None  # all or none: an interrupted call is made again
        return self._digests


class CopiedDigest:
    """Copies the spans of a launch to the host together.

    On CUDA and XPU copies are enqueued on the stream of a launch, and waited for when the digests are collected, or
    once 128 MiB of them are on the host; on other devices a copy is waited for in the launch.

    Args:
        device: whose streams are used; without it, as on a device that has none, everything is on whatever is current.
    """

    name = "copies to the host"

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device if device is not None and device.type in STREAMED_DEVICES else None
        self._lock = threading.Lock()
        self._unread: deque[CopiedLaunch] = deque()

    def stream(self) -> Hashable:
        """Return the device's current stream; None where it has none."""
        return None if self._device is None else torch.accelerator.current_stream(self._device)

    def wait_for(self, stream: Hashable) -> None:
        """Have the device's current stream wait for what another one has been given."""
        if self._device is not None and isinstance(stream, torch.Stream):
            torch.accelerator.current_stream(self._device).wait_stream(stream)

    def launch(self, spans: Sequence[Span], stream: Hashable, unheld: Set[int] = frozenset()) -> CopiedLaunch:
        """Enqueue the copy.

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
            copied, arrived = self._to_host(contents[0] if len(contents) == 1 else torch.cat(contents))
        launched = CopiedLaunch([size for _, _, size in spans], copied, arrived)
        with self._lock:
            self._unread.append(launched)
            while sum(one.num_bytes for one in self._unread) > MAX_COPIED_BYTES:
                self._unread.popleft().digests()
        return launched

    def collect(self, launched: Sequence[CopiedLaunch]) -> list[int]:
        """Return the digests of what has been copied."""
        with self._lock:
            digests = [digest for part in launched for digest in part.digests()]
            self._unread = deque(one for one in self._unread if one.num_bytes)
        return digests

    def _to_host(self, content: torch.Tensor) -> tuple[torch.Tensor, torch.Event | None]:
        """Return a copy of bytes in the host's memory, and what says when they are there."""
        if self._device is None or content.numel() > MAX_COPIED_BYTES:
            return content.to("cpu", copy=True), None
        copied = torch.empty(content.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
        copied.copy_(content, non_blocking=True)
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
