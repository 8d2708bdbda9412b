"""How fast tensors of a size are digested, against a copy of the same bytes on the same device."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from device import enqueue_and_busy_seconds

from det_callbacks.digest.components import digest_tensors
from det_callbacks.digest.deferred import DigestQueue
from det_callbacks.digest.triton_digest import device_choice

SIZES_KIB = tuple(4**power for power in range(11))
"""1 KiB to 1 GiB."""

POOL_BYTES = 512 * 1024 * 1024
"""Tensors are taken in turn from memory of this size, so that no cache holds
them from the time before.
"""

MAX_CALLS = 256
"""Tensors in a row: so few that all their launches fit into a stream's queue."""

MAX_SLICES = 16 * MAX_CALLS


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Seconds for one tensor of a size, medians over the rounds.

    Attributes:
        num_bytes: of the tensor.
        num_calls: how many were copied, and digested, in a row.
        copy: ``copy_`` to other memory of the device.
        digest: of the device alone, launched by a queue; ``fetched`` where the device has no queue.
        enqueue: that the host took to queue and launch one; None where the device has no queue.
        fetched: of ``digest_tensors``, from the call to the digests on the host.
    """

    num_bytes: int
    num_calls: int
    copy: float
    digest: float
    enqueue: float | None
    fetched: float

    def figures(self) -> dict[str, Any]:
        """Return the times and what follows: a copy moves each byte twice (read, written),
        a digest reads it once.
        """
        copy_rate, digest_rate = 2 * self.num_bytes / self.copy, self.num_bytes / self.digest
        return {
            "num_bytes": self.num_bytes,
            "num_calls": self.num_calls,
            "copy_seconds": self.copy,
            "digest_seconds": self.digest,
            "enqueue_seconds": self.enqueue,
            "fetched_seconds": self.fetched,
            "copy_bytes_moved_per_second": copy_rate,
            "digest_bytes_moved_per_second": digest_rate,
            "time_ratio": self.digest / self.copy,
            "bandwidth_ratio": digest_rate / copy_rate,
        }


class Pool:
    """Tensors of one size and random content in turn, each with other memory of
    its size to be copied to.
    """

    def __init__(self, device: torch.device, num_bytes: int, pool_bytes: int) -> None:
        num_places = max(pool_bytes // num_bytes, 1)
        stride = max(num_places // MAX_SLICES, 1) * num_bytes
        generator = torch.Generator(device).manual_seed(0)
        shape = (num_places * num_bytes,)
        source = torch.randint(256, shape, dtype=torch.uint8, device=device, generator=generator)
        target = source.clone()  # written once: the first write of a page costs more than the copy
        starts = range(0, num_places * num_bytes, stride)
        self.num_calls = min(len(starts), MAX_CALLS)
        self._pairs = cycle(
            [(source[at : at + num_bytes], target[at : at + num_bytes]) for at in starts]
        )

    def copy(self) -> None:
        """Copy the next ``num_calls`` tensors."""
        for source, target in islice(self._pairs, self.num_calls):
            target.copy_(source)

    def take(self) -> list[torch.Tensor]:
        """Return the next ``num_calls`` tensors."""
        return [source for source, _ in islice(self._pairs, self.num_calls)]


def queue_all(queue: DigestQueue, tensors: Sequence[torch.Tensor]) -> None:
    """Queue contiguous tensors and launch their digests, without a wait."""
    for tensor in tensors:
        queue.add(
            tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size(), tensor.nbytes
        )
    queue.flush()


def measure_bandwidth(
    device: torch.device, num_bytes: int, *, rounds: int, pool_bytes: int = POOL_BYTES
) -> Bandwidth:
    """Return the times for tensors of a size; copies, digests and fetched digests take turns.

    Takes twice ``pool_bytes`` of the device's memory, or twice the size of one tensor. A round
    before the first one does not count: it compiles what is not compiled yet.

    Raises:
        RuntimeError: if the queue gives other digests than ``digest_tensors``.
    """
    pool = Pool(device, num_bytes, pool_bytes)
    method = device_choice(device).method
    queue = None if method is None else DigestQueue(method)
    if queue is not None:
        check_queue(queue, pool.take())
    copies, digests, enqueued, fetched = [], [], [], []
    for _ in range(rounds + 1):
        copies.append(enqueue_and_busy_seconds(device, pool.copy)[1])
        if queue is not None:
            enqueue, busy = enqueue_and_busy_seconds(device, lambda: queue_all(queue, pool.take()))
            queue.finish()
            enqueued.append(enqueue)
            digests.append(busy)
        tensors = pool.take()
        start = time.perf_counter()
        digest_tensors(tensors)  # ends when the digests are there
        fetched.append(time.perf_counter() - start)

    def median(seconds: list[float]) -> float:
        return statistics.median(seconds[1:]) / pool.num_calls

    return Bandwidth(
        num_bytes=num_bytes,
        num_calls=pool.num_calls,
        copy=median(copies),
        digest=median(digests or fetched),
        enqueue=median(enqueued) if enqueued else None,
        fetched=median(fetched),
    )


def check_queue(queue: DigestQueue, tensors: Sequence[torch.Tensor]) -> None:
    """Require that a queue gives the digests of ``digest_tensors``:
    a fast way to other bits is no figure.

    Raises:
        RuntimeError: if it does not.
    """
    queue_all(queue, tensors)
    wrong = sum(
        one != other for one, other in zip(queue.finish(), digest_tensors(tensors), strict=True)
    )
    if wrong:
        raise RuntimeError(
            f"the queue gave other digests than digest_tensors for {wrong} of {len(tensors)} "
            f"tensors of {tensors[0].nbytes} bytes, so nothing was timed; report this with the "
            "device and the versions in use"
        )
