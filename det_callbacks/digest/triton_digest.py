"""Digests by Triton kernels on a CUDA device: launches them, fetches digests together,
and decides about their use.

All memory comes from torch's caching allocator, on the stream where it is used.
"""

import functools
import threading
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from subprocess import SubprocessError
from types import ModuleType
from typing import Any

import torch

from det_callbacks.digest.host import BLOCK_BYTES, LEAF_BYTES, digest_bytes
from det_callbacks.errors import DetCallbacksError
from det_callbacks.internals.torch import storage_address

MAX_SUM_BYTES = 32 * 1024 * 1024
"""Limit on the waiting sums of a stream."""

_SUM_WORDS = 8  # words of a block, 8 bytes each

Span = tuple[torch.UntypedStorage, int, int]
"""Storage, first byte in it, number of bytes."""

# Errors of a device's compiler; in Triton 3.7.1 a missing libcuda.so.1 is an AssertionError.
_FAILURES = (
    AssertionError,
    AttributeError,
    ImportError,
    OSError,
    RuntimeError,
    SubprocessError,
    TypeError,
    ValueError,
)


@dataclass(slots=True, kw_only=True, eq=False)
class Launched:
    """The digests of spans that a stream computes, in the order of the spans."""

    stream: Hashable
    sizes: tuple[int, ...]
    sums: torch.UntypedStorage | None  # sums of the spans' blocks; None once they are hashed
    hashes: torch.UntypedStorage  # hashes of the spans' leaves, on the device


class TritonDigest:
    """Digests tensors on a CUDA device with Triton kernels,
    without a copy or a synchronisation before ``collect``.

    One kernel reads up to 16 spans and writes 64 bytes of sums for each block of 1 KiB. After every
    half GiB of spans, and at the end, another kernel hashes the sums. Any thread may call.

    ``kernels`` is the module ``triton_kernels``; ``device`` has an index, or is the host if Triton
    interprets.
    """

    def __init__(self, kernels: ModuleType, device: torch.device) -> None:
        self.name = f"Triton {kernels.VERSION}"
        self._tile_bytes: int = kernels.TILE_BYTES
        self._tile_words = self._tile_bytes // BLOCK_BYTES * _SUM_WORDS
        self._spans_per_launch: int = kernels.SPANS_PER_LAUNCH
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._lock = threading.Lock()
        # stream -> launches whose sums wait
        self._waiting: dict[Hashable, list[Launched]] = defaultdict(list)
        self._num_sum_bytes: Counter[Hashable] = Counter()
        _require_no_capture()
        # tensors made in inference mode cannot be written outside it
        with torch.inference_mode(False), self._on(self.stream()):
            self._launchers: Any = kernels.Launchers()
            self._constants = torch.tensor(kernels.CONSTANTS, dtype=torch.int64, device="cpu").to(
                device
            )
            self._scratch = torch.empty((0,), dtype=torch.uint8, device=device)
            self._nothing = torch.empty((0,), dtype=torch.uint8, device=device).untyped_storage()

    def stream(self) -> Hashable:
        return torch.cuda.current_stream(self._device) if self._is_cuda else None

    def wait_for(self, stream: Hashable) -> None:
        _require_no_capture()
        if isinstance(stream, torch.cuda.Stream):
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def launch(
        self, spans: Sequence[Span], stream: Hashable, skip_record_stream: Set[int] = frozenset()
    ) -> Launched:
        """Enqueue the kernel that reads the spans; do not report storages at ``skip_record_stream``
        addresses to the allocator.
        """
        places = [(storage.data_ptr() + offset, size) for storage, offset, size in spans]
        with self._lock, self._on(stream):
            self._keep_until_read(
                [span for span in spans if storage_address(span[0]) not in skip_record_stream]
                if skip_record_stream
                else spans,
                stream,
            )
            num_tiles = sum(-(-size // self._tile_bytes) for _, size in places)
            sizes = tuple(size for _, size in places)
            sums, hashes = (
                self._memory(num_tiles * self._tile_words),
                self._memory(sum(map(_num_leaves, sizes))),
            )
            address = sums.data_ptr()
            for first in range(0, len(places), self._spans_per_launch):
                group = places[first : first + self._spans_per_launch]
                group_tiles = sum(-(-size // self._tile_bytes) for _, size in group)
                arguments = [word for place in group for word in place]
                arguments += [0] * (2 * self._spans_per_launch - len(arguments))
                handle = getattr(stream, "cuda_stream", 0)
                self._launchers.sum_blocks(
                    group_tiles, handle, self._constants.data_ptr(), address, *arguments
                )
                address += 8 * self._tile_words * group_tiles
            launched = Launched(stream=stream, sizes=sizes, sums=sums, hashes=hashes)
            self._waiting[stream].append(launched)
            self._num_sum_bytes[stream] += sums.nbytes()
            if self._num_sum_bytes[stream] > MAX_SUM_BYTES:
                self._finish(stream)
        return launched

    def collect(self, launched: Sequence[Launched]) -> list[int]:
        """Return the digests of all launches in order; only this waits for the device."""
        _require_no_capture()
        with self._lock:
            for stream in dict.fromkeys(part.stream for part in launched):
                with self._on(stream):
                    self._finish(stream)
                if stream != self.stream():
                    self.wait_for(stream)
            if any(part.sums is not None for part in launched):
                raise DetCallbacksError(
                    "an earlier launch failed, so digests of this stream are lost; the tensors are "
                    "intact; take their digests again"
                )
            with torch.inference_mode(False), self._on(self.stream()):
                words = self._host_words(sum(part.hashes.nbytes() // 8 for part in launched))
                words.copy_(
                    torch.cat([self._words(part.hashes) for part in launched]), non_blocking=True
                )
                if self._is_cuda:
                    passed = torch.cuda.Event()
                    passed.record()
                    passed.synchronize()
        hashes, digests, first = words.numpy().view("uint64"), [], 0
        for size in (size for part in launched for size in part.sizes):
            leaves = hashes[first : first + _num_leaves(size)]
            digests.append(int(leaves[0]) if len(leaves) == 1 else digest_bytes(leaves.data))
            first += len(leaves)
        return digests

    def _finish(self, stream: Hashable) -> None:
        """Enqueue the kernel that hashes the waiting sums of a stream; after a failure,
        launches keep their sums.
        """
        launches = self._waiting.pop(stream, [])
        self._num_sum_bytes.pop(stream, None)
        if not launches:
            return
        rows: list[int] = []
        num_leaves = 0
        for launched in launches:
            assert launched.sums is not None
            sums, target = launched.sums.data_ptr(), launched.hashes.data_ptr()
            for size in launched.sizes:
                rows += (num_leaves, sums, size, target)
                num_leaves += _num_leaves(size)
                sums += -(-size // self._tile_bytes) * self._tile_words * 8
                target += 8 * _num_leaves(size)
        with torch.inference_mode(False):
            host = self._host_words(len(rows))
            host.numpy().view("int64")[:] = rows
            table = self._memory(len(rows))
            self._words(table).copy_(host, non_blocking=True)
        handle, constants = getattr(stream, "cuda_stream", 0), self._constants.data_ptr()
        self._launchers.hash_leaves(num_leaves, handle, constants, table.data_ptr(), len(rows) // 4)
        for launched in launches:
            launched.sums = None

    def _keep_until_read(self, spans: Sequence[Span], stream: Hashable) -> None:
        """Have the allocator keep the spans' memory until the stream has read it."""
        if stream is None:
            return
        # A microsecond each. The allocator does nothing if a storage was allocated on this stream.
        for storage, _, _ in spans:
            self._scratch.set_(storage)
            self._record_stream(self._scratch, stream)
        self._scratch.set_(self._nothing)

    def _record_stream(self, tensor: torch.Tensor, stream: Hashable) -> None:
        if isinstance(stream, torch.cuda.Stream):
            tensor.record_stream(stream)

    def _memory(self, num_words: int) -> torch.UntypedStorage:
        # torch.empty would fill its memory under deterministic algorithms
        return torch.UntypedStorage(8 * num_words, device=self._device)

    def _words(self, memory: torch.UntypedStorage) -> torch.Tensor:
        words = torch.empty((0,), dtype=torch.int64, device=self._device)
        return words.set_(memory, 0, (memory.nbytes() // 8,), (1,))

    def _host_words(self, num_words: int) -> torch.Tensor:
        # a copy to pageable memory would wait
        return torch.empty((num_words,), dtype=torch.int64, device="cpu", pin_memory=self._is_cuda)

    @contextmanager
    def _on(self, stream: Hashable) -> Iterator[None]:
        _require_no_capture()
        if not isinstance(stream, torch.cuda.Stream) or (
            torch.cuda.current_device() == stream.device_index
            and torch.cuda.current_stream() == stream
        ):
            yield
        else:
            with torch.cuda.stream(stream):
                _require_no_capture()
                yield


def _require_no_capture() -> None:
    """Raise if the current stream captures a CUDA graph: each replay would run the kernel."""
    # builds without CUDA raise at the second call
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise DetCallbacksError(
            "cannot take a digest while the current stream captures a CUDA graph; the capture and "
            "all tensors are intact; take digests before or after the capture"
        )


def _num_leaves(size: int) -> int:
    return -(-size // LEAF_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    method: TritonDigest | None
    reason: str = ""  # why a CUDA device does not use Triton's kernels

    def __str__(self) -> str:
        if self.method is not None:
            return self.method.name
        return (
            f"a copy to the host; no Triton: {self.reason}" if self.reason else "a copy to the host"
        )


@functools.cache
def device_choice(device: torch.device) -> Choice:
    """Return how to digest tensors on a device (with an index):
    by Triton's kernels if they give the host's bits.

    The first call takes seconds to compile the kernels, unless Triton's cache has them.
    """
    if device.type != "cuda":
        return Choice(method=None)
    try:
        import det_callbacks.digest.triton_kernels as kernels  # noqa: PLC0415  # needs Triton
    except _FAILURES as error:
        return Choice(method=None, reason=f"{type(error).__name__}: {error}")
    if kernels.IS_INTERPRETED:
        what = "TRITON_INTERPRET is set, and Triton's interpreter cannot read the device's memory"
        return Choice(method=None, reason=what)
    try:
        method = TritonDigest(kernels, device)
        reason = disagreement(method, device)
    except (*_FAILURES, kernels.TritonError) as error:
        reason = f"{type(error).__name__}: {error}"
    return Choice(method=None, reason=reason) if reason else Choice(method=method)


def disagreement(method: TritonDigest, device: torch.device) -> str:
    """Return how a method's bits differ from the host's, "" if they match;
    raise errors of the device.
    """
    length = LEAF_BYTES + BLOCK_BYTES + 5
    # the top byte of multiples of 2**32 divided by the golden ratio: all words differ
    content = (torch.arange(length + 3, dtype=torch.int64, device="cpu") * 2654435761 >> 24).to(
        torch.uint8
    )
    on_device = content.to(device)
    parts = [slice(0, length), slice(3, 3 + length), slice(1, 6), slice(8, 8 + BLOCK_BYTES)]
    spans = [(on_device.untyped_storage(), part.start, part.stop - part.start) for part in parts]
    of_device = method.collect([method.launch(spans, method.stream())])
    of_host = [digest_bytes(content[part].numpy().tobytes()) for part in parts]
    for part, expected, computed in zip(parts, of_host, of_device, strict=True):
        if computed != expected:
            return (
                f"{method.name} gave different bits from the host for {part.stop - part.start} "
                f"bytes at {part.start}"
            )
    return ""
