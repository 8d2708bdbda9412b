"""Digests by Triton kernels on a CUDA device: their streams, fetching all at once, and whether they are taken."""

import functools
import threading
from collections.abc import Hashable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from subprocess import SubprocessError
from types import ModuleType
from typing import Any

import torch

from det_callbacks.digest.device.lanes import Lane
from det_callbacks.digest.device.queue import DeviceDigest, Span, require_no_capture
from det_callbacks.host_digest import BLOCK_BYTES, LEAF_BYTES, digest_bytes

EMPTY_DIGEST = digest_bytes(b"")

FIRST_LANE_TILES = 16 * 1024
LANE_TILES = 4 * 1024
"""Tiles of 32 KiB whose sums, 2 KiB each, the lane of the first stream and those of others hold: 32 and 8 MiB."""

MAX_LANES = 3
"""Streams whose lanes are kept for the next step."""

# What an attempt to use a device's compiler or ops may end with; memory errors of the device are RuntimeErrors. Looked
# at in Triton 3.7.1: a missing libcuda.so.1 is an AssertionError; another Triton may lack a name.
_FAILURES = (AssertionError, AttributeError, ImportError, OSError, RuntimeError, SubprocessError, TypeError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """Which lane computes the digests of a launch, where in its slots they begin, and the spans' sizes in bytes.

    Empty spans have no digest there.
    """

    lane: Lane
    slots: torch.Tensor
    first: int
    sizes: tuple[int, ...]


class TritonDigest:
    """Triton kernels on a CUDA device: no copy of the tensors, no synchronisation before the digests are collected.

    A launch is one kernel for up to 16 spans, without a copy or an allocation, and every few hundred MiB of spans a
    small copy and two more. Takes 32 MiB of the device's memory, and 8 MiB for each further stream that is used.

    A launch tells the allocator of each span's storage that the stream uses it: memory that was allocated on another
    stream and is let go then is given away only once the stream has passed. Any thread may call.

    Args:
        kernels: the module ``det_callbacks.digest.device.triton_kernels``.
        device: with its index; the host where the kernels run in Triton's interpreter.

    Raises:
        RuntimeError: or another error of the device or of Triton's compiler.
    """

    def __init__(self, kernels: ModuleType, device: torch.device) -> None:
        self.name = f"Triton {kernels.VERSION}"
        self._kernels: Any = kernels
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._lock = threading.Lock()
        self._lanes: dict[Hashable, Lane] = {}
        require_no_capture()
        # what is made in inference mode cannot be written outside of it
        with torch.inference_mode(False), self._on(self.stream()):
            self._launchers: Any = kernels.Launchers()
            self._constants = torch.tensor(kernels.CONSTANTS, dtype=torch.int64, device="cpu").to(device)
            self._scratch = torch.empty((0,), dtype=torch.uint8, device=device)
            self._nothing = torch.empty((0,), dtype=torch.uint8, device=device).untyped_storage()
            self._fetched = self._host_words(4096)

    def stream(self) -> Hashable:
        """Return the device's current stream."""
        return torch.cuda.current_stream(self._device) if self._is_cuda else None

    def wait_for(self, stream: Hashable) -> None:
        """Have the device's current stream wait for what another one has been given."""
        require_no_capture()
        if isinstance(stream, torch.cuda.Stream):
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def launch(self, spans: Sequence[Span], stream: Hashable, unheld: Set[int] = frozenset()) -> Launched:
        """Enqueue the kernels that read the spans on a stream.

        Raises:
            DetCallbacksError: if the current stream is capturing a CUDA graph.
        """
        places = [(storage.data_ptr() + offset if size else 0, size) for storage, offset, size in spans]
        with self._lock, self._on(stream):
            lane = self._lane(stream)
            self._hold([span for span in spans if span[0]._cdata not in unheld] if unheld else spans, stream)
            slots, first = lane.launch(places)
        return Launched(lane=lane, slots=slots, first=first, sizes=tuple(size for _, _, size in spans))

    def collect(self, launched: Sequence[Launched]) -> list[int]:
        """Fetch the digests: one copy of each buffer that they are in, usually one, and one event that is waited for.

        Raises:
            DetCallbacksError: if the current stream is capturing a CUDA graph.
        """
        require_no_capture()
        bounds: dict[int, tuple[torch.Tensor, int, int]] = {}
        for part in launched:
            slots, first, last = bounds.get(id(part.slots), (part.slots, part.first, part.first))
            bounds[id(part.slots)] = (slots, min(first, part.first), max(last, part.first + len(part.sizes)))
        with self._lock:
            for lane in {id(part.lane): part.lane for part in launched}.values():
                with self._on(lane.stream):
                    lane.finish()
                if lane.stream != self.stream():
                    self.wait_for(lane.stream)
            found, starts = self._fetch(bounds)
            for stream in list(self._lanes)[MAX_LANES:]:
                del self._lanes[stream]
        digests = []
        for part in launched:
            start = starts[id(part.slots)] + part.first
            values = found[start : start + len(part.sizes)]
            digests += [value if size else EMPTY_DIGEST for value, size in zip(values, part.sizes, strict=True)]
        return digests

    def _fetch(self, bounds: dict[int, tuple[torch.Tensor, int, int]]) -> tuple[list[int], dict[int, int]]:
        """Return parts of buffers one after the other, and for each buffer where its beginning would be."""
        num_words = sum(last - first for _, first, last in bounds.values())
        with torch.inference_mode(False), self._on(self.stream()):
            if num_words > len(self._fetched):
                self._fetched = self._host_words(2 * num_words)
            starts = {}
            place = 0
            for key, (slots, first, last) in bounds.items():
                starts[key] = place - first
                self._fetched[place : place + last - first].copy_(slots[first:last], non_blocking=True)
                place += last - first
            if self._is_cuda:
                passed = torch.cuda.Event()
                passed.record()
                passed.synchronize()
        words: list[int] = self._fetched[:num_words].numpy().view("uint64").tolist()
        return words, starts

    def _lane(self, stream: Hashable) -> Lane:
        lane = self._lanes.get(stream)
        if lane is None or lane.is_broken:
            num_tiles = LANE_TILES if self._lanes else FIRST_LANE_TILES
            lane = Lane(self._kernels, self._launchers, self._constants, num_tiles=num_tiles, stream=stream)
            self._lanes[stream] = lane
        return lane

    def _hold(self, spans: Sequence[Span], stream: Hashable) -> None:
        """Have the allocator keep the spans' memory until the stream has passed, whenever it is let go."""
        if stream is None:
            return
        # A storage cannot be asked where it was allocated, nor told by itself; where it was on this very stream, the
        # allocator does nothing. About a microsecond each.
        for storage, _, _ in spans:
            self._scratch.set_(storage)
            self._tell_allocator(self._scratch, stream)
        self._scratch.set_(self._nothing)

    def _tell_allocator(self, tensor: torch.Tensor, stream: Hashable) -> None:
        if isinstance(stream, torch.cuda.Stream):
            tensor.record_stream(stream)

    @contextmanager
    def _on(self, stream: Hashable) -> Iterator[None]:
        """Make a stream and its device the current ones, unless they are."""
        require_no_capture()
        if not isinstance(stream, torch.cuda.Stream) or (
            torch.cuda.current_device() == stream.device_index and torch.cuda.current_stream() == stream
        ):
            yield
        else:
            with torch.cuda.stream(stream):
                require_no_capture()
                yield

    def _host_words(self, num_words: int) -> torch.Tensor:
        return torch.empty((num_words,), dtype=torch.int64, device="cpu", pin_memory=self._is_cuda)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a device's tensors are digested, and why not in a faster way.

    Attributes:
        method: of the queue; None where each tensor is copied to the host when its digest is asked for.
        reason: why there is no method; "" for devices that no method is for.
    """

    method: DeviceDigest | None
    reason: str = ""

    def __str__(self) -> str:
        return self.method.name if self.method else "; ".join(filter(None, ("a copy to the host", self.reason)))


@functools.cache
def device_choice(device: torch.device) -> Choice:
    """Return how tensors on a device are digested, found out when it is first asked for and kept.

    On CUDA by Triton's kernels, once they have given the host's bits for a few hundred KiB there. The first call
    compiles them for some seconds, unless Triton has them in its cache.

    Args:
        device: with its index.
    """
    if device.type != "cuda":
        return Choice(method=None)
    try:
        import det_callbacks.digest.device.triton_kernels as kernels
    except _FAILURES as error:
        return Choice(method=None, reason=f"no Triton: {type(error).__name__}: {error}")
    if kernels.IS_INTERPRETED:
        what = "TRITON_INTERPRET is set, and Triton's interpreter would read the device's memory on the host"
        return Choice(method=None, reason=f"no Triton: {what}")
    try:
        method = TritonDigest(kernels, device)
        reason = disagreement(method, device)
    except (*_FAILURES, kernels.TritonError) as error:
        reason = f"{type(error).__name__}: {error}"
    return Choice(method=None, reason=f"no Triton: {reason}") if reason else Choice(method=method)


def disagreement(method: DeviceDigest, device: torch.device) -> str | None:
    """Return in what a method does not give the host's bits, None where it does.

    Raises:
        RuntimeError: or another error of the device, its compiler or its ops.
    """
    length = LEAF_BYTES + BLOCK_BYTES + 5
    # the top byte of multiples of 2**32 divided by the golden ratio: no two words are alike
    content = (torch.arange(length + 3, dtype=torch.int64, device="cpu") * 2654435761 >> 24).to(torch.uint8)
    there = content.to(device)
    parts = [slice(0, length), slice(3, 3 + length), slice(1, 6), slice(8, 8 + BLOCK_BYTES), slice(0, 0)]
    spans = [(there.untyped_storage(), part.start, part.stop - part.start) for part in parts]
    given = method.collect([method.launch(spans, method.stream())])
    expected = [digest_bytes(content[part].numpy().tobytes()) for part in parts]
    for part, one, other in zip(parts, expected, given, strict=True):
        if one != other:
            return f"{method.name} gave other bits than the host for {part.stop - part.start} bytes at {part.start}"
    return None
