"""What one stream needs to digest spans of memory: the sums and hashes on their way, and when which kernel runs.

A span is read once, when it is launched, and leaves 64 bytes for each block of 1 KiB behind. The rest waits until the
sums fill their buffer or the digests are asked for, so it costs one table's copy and two short kernels for hundreds of
MiB of spans, not for each launch. On the way nothing is allocated and nothing is waited for: all buffers belong to one
stream, in whose order they are used again.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from det_callbacks.errors import DetCallbacksError
from det_callbacks.host_digest import BLOCK_BYTES, LEAF_BYTES

MAX_ROWS = 1024
"""Spans whose sums wait at most."""

TABLE_WORDS = 8192
"""Four words for each row, and three for each leaf of hashes: at most 7 * MAX_ROWS, or one span of 20 TiB."""

NUM_SLOTS = 16 * 1024
"""Digests that a buffer takes, 128 KiB, before there is another one."""

_SUM_BYTES_PER_BLOCK = 64
_ROW_WORDS = 4


class Lane:
    """The buffers of one stream, which has to be the current one whenever anything is called.

    Where anything raises, Ctrl-C included, the lane is broken: what was launched in it is lost, and it goes no further.

    Args:
        kernels: the module ``det_callbacks.digest.device.triton_kernels``.
        launchers: its kernels, for this device.
        constants: its constants, on the device.
        num_tiles: whose sums the lane holds, 2 KiB each.
        stream: of the device.

    Attributes:
        is_broken: whether something raised in it.
    """

    def __init__(
        self, kernels: Any, launchers: Any, constants: torch.Tensor, *, num_tiles: int, stream: Hashable
    ) -> None:
        self.is_broken = False
        self.stream = stream
        self._handle = stream.cuda_stream if isinstance(stream, torch.cuda.Stream) else 0
        self._launchers = launchers
        self._constants = constants.data_ptr()
        self._device = constants.device
        self._tile_bytes: int = kernels.TILE_BYTES
        self._spans_per_launch: int = kernels.SPANS_PER_LAUNCH
        self._num_tiles = num_tiles
        self._sums_per_tile = self._tile_bytes // BLOCK_BYTES * _SUM_BYTES_PER_BLOCK
        self._sums = self._empty(num_tiles * self._sums_per_tile // 8)
        # a span of several leaves has at least nine tiles for two of them
        self._hashes = self._empty(max(num_tiles // 4, 1))
        self._table = self._empty(TABLE_WORDS)
        self._sums_address, self._hashes_address = self._sums.data_ptr(), self._hashes.data_ptr()
        self._table_address = self._table.data_ptr()
        self._take_slots(NUM_SLOTS)
        self._begin()

    def launch(self, spans: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, int]:
        """Enqueue the first stage for spans, (address, number of bytes) each; empty ones have no digest.

        Returns:
            A tensor of the device and the place in it of the first one's digest, there once ``finish`` has passed.
        """
        with self._whole():
            if self._num_slots + len(spans) > len(self._slots):
                self._finish()  # its rows point to the old ones
                self._take_slots(max(NUM_SLOTS, len(spans)))
            first_slot = self._num_slots
            self._num_slots += len(spans)
            slot = self._slots.data_ptr() + 8 * first_slot
            group: list[int] = []
            for address, num_bytes in spans:
                num_tiles = -(-num_bytes // self._tile_bytes)
                if num_tiles > self._num_tiles:
                    self._sum(group)
                    self._launch_long(address, num_bytes, slot)
                elif num_bytes:
                    if num_tiles > self._num_tiles - self._num_waiting or len(self._rows) == _ROW_WORDS * MAX_ROWS:
                        self._sum(group)
                        self._finish()
                    num_leaves = -(-num_bytes // LEAF_BYTES)
                    target = slot
                    if num_leaves > 1:
                        target = self._hashes_address + 8 * self._num_hashes
                        self._num_hashes += num_leaves
                        self._levels[0] += (target, 8 * num_leaves, slot)
                    self._add_row(num_bytes, num_leaves, target)
                    group += (address, num_bytes)
                    if len(group) == 2 * self._spans_per_launch:
                        self._sum(group)
                slot += 8
            self._sum(group)
        return self._slots, first_slot

    def finish(self) -> None:
        """Enqueue the second stage for all whose sums wait."""
        with self._whole():
            self._finish()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        if self.is_broken:
            raise DetCallbacksError(
                "digests of this stream were lost when an earlier launch failed; the tensors are intact; take their "
                "digests again"
            )
        self.is_broken = True
        yield
        self.is_broken = False

    def _begin(self) -> None:
        """Start with no sums that wait."""
        self._rows: list[int] = []
        self._levels: list[list[int]] = [[]]
        self._num_leaves = self._num_waiting = self._num_summed = self._num_hashes = 0

    def _finish(self) -> None:
        if not self._rows:
            return
        words = [word for part in (self._rows, *self._levels) for word in part]
        # pinned memory that torch keeps and hands out again after the copy: pageable memory would be waited for
        table = torch.empty((len(words),), dtype=torch.int64, device="cpu", pin_memory=self._device.type == "cuda")
        table.numpy()[:] = words
        self._table[: len(words)].copy_(table, non_blocking=True)
        address, num_rows = self._table_address, len(self._rows) // _ROW_WORDS
        self._launchers.hash_leaves(self._num_leaves, self._handle, self._constants, address, num_rows)
        address += 8 * len(self._rows)
        for level in self._levels:
            if level:
                self._launchers.hash_words(len(level) // 3, self._handle, self._constants, address)
                address += 8 * len(level)
        self._begin()

    def _take_slots(self, num_words: int) -> None:
        """Take device memory for digests."""
        self._slots = self._empty(num_words)
        self._num_slots = 0

    def _empty(self, num_words: int) -> torch.Tensor:
        # made anywhere, and written where inference mode is over
        with torch.inference_mode(False):
            return torch.empty((num_words,), dtype=torch.int64, device=self._device)

    def _add_row(self, num_bytes: int, num_leaves: int, target: int) -> None:
        sums = self._sums_address + self._num_waiting * self._sums_per_tile
        self._rows += (self._num_leaves, sums, num_bytes, target)
        self._num_leaves += num_leaves
        self._num_waiting += -(-num_bytes // self._tile_bytes)

    def _sum(self, group: list[int]) -> None:
        """Launch the first stage for the spans, (address, number of bytes), that were added last, and clear them."""
        if not group:
            return
        first, self._num_summed = self._num_summed, self._num_waiting
        sums = self._sums_address + first * self._sums_per_tile
        missing = (0,) * (2 * self._spans_per_launch - len(group))
        self._launchers.sum_blocks(self._num_waiting - first, self._handle, self._constants, sums, *group, *missing)
        group.clear()

    def _launch_long(self, address: int, num_bytes: int, slot: int) -> None:
        """Enqueue both stages for a span whose sums would not fit: part by part, then its hashes level by level."""
        self._finish()
        counts = [-(-num_bytes // LEAF_BYTES)]
        while counts[-1] > 1:
            counts.append(-(-8 * counts[-1] // LEAF_BYTES))
        # freed in the stream's order, after what is enqueued here
        hashes = self._empty(sum(counts[:-1]))
        place = hashes.data_ptr()
        held = self._num_tiles * self._tile_bytes // LEAF_BYTES * LEAF_BYTES
        for begin in range(0, num_bytes, held):
            length = min(held, num_bytes - begin)
            self._add_row(length, -(-length // LEAF_BYTES), place + begin // LEAF_BYTES * 8)
            self._sum([address + begin, length])
            if begin + length == num_bytes:
                self._levels = _levels(counts, place, slot)
            self._finish()


def _levels(counts: Sequence[int], place: int, slot: int) -> list[list[int]]:
    """Return the rows of each level above a span's leaves: leaves of hashes, whose hashes are the next level."""
    levels = []
    for number, count in enumerate(counts[:-1]):
        following = place + 8 * count if number + 2 < len(counts) else slot
        level: list[int] = []
        for begin in range(0, 8 * count, LEAF_BYTES):
            level += (place + begin, min(LEAF_BYTES, 8 * count - begin), following + begin // LEAF_BYTES * 8)
        levels.append(level)
        place = following
    return levels
