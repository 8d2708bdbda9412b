"""What one stream needs to digest spans of memory: the sums and hashes on their way, and when which kernel runs.

A span is read once, when it is launched, and leaves 64 bytes for each block of 1 KiB behind. The rest waits until the
sums fill their buffer or the digests are asked for, so it costs one table's copy and two short kernels for hundreds of
MiB of spans, not for each launch. On the way nothing is allocated and nothing is waited for: all buffers belong to one
stream, in whose order they are used again.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from det_callbacks.host_digest import BLOCK_BYTES, LEAF_BYTES

MAX_ROWS = 1024
"""Spans whose sums wait at most."""

TABLE_WORDS = 8192
"""Four words for each row, and three for each leaf of hashes: at most 7 * MAX_ROWS, or one span of 20 TiB."""

NUM_SLOTS = 16 * 1024
"""Digests that a buffer takes, 128 KiB, before there is another one."""

_SUM_BYTES_PER_BLOCK = 64
_ROW_WORDS = 4


class _Waiting:
    """Whose sums wait. A finished one is replaced as a whole, so that an interrupt leaves no half of it.

    Each of its parts may be a row behind the ones before it: what an interrupted launch was about to add has then no
    leaf, or sums and hashes that nothing asks for.
    """

    __slots__ = ("levels", "num_hashes", "num_leaves", "num_summed", "num_tiles", "rows")

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.levels: list[list[int]] = [[]]
        self.num_leaves = 0
        self.num_tiles = 0
        self.num_summed = 0
        self.num_hashes = 0

    @property
    def num_rows(self) -> int:
        return len(self.rows) // _ROW_WORDS


class _Slots:
    """Device memory for digests, and how much of it is taken."""

    __slots__ = ("address", "num_used", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self.num_used = 0


class Lane:
    """The buffers of one stream, which has to be the current one whenever anything is called.

    Args:
        kernels: the module ``det_callbacks.digest.triton_kernels``.
        launchers: its kernels, for this device.
        constants: its constants, on the device.
        num_tiles: whose sums the lane holds, 2 KiB each.
        stream: of the device.
    """

    def __init__(
        self, kernels: Any, launchers: Any, constants: torch.Tensor, *, num_tiles: int, stream: Hashable
    ) -> None:
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
        self._slots = _Slots(self._empty(NUM_SLOTS))
        self._waiting = _Waiting()

    def launch(self, spans: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, int]:
        """Enqueue the first stage for spans, (address, number of bytes) each; empty ones have no digest.

        Returns:
            A tensor of the device and the place in it of the first one's digest, there once ``finish`` has passed.
        """
        slots = self._slots
        if slots.num_used + len(spans) > len(slots.tensor):
            self.finish()  # its rows point to the old one
            self._slots = slots = _Slots(self._empty(max(NUM_SLOTS, len(spans))))
        waiting = self._waiting
        # an interrupted launch may have left rows without sums; nothing asks for their digests
        waiting.num_summed = waiting.num_tiles
        first_slot = slots.num_used
        slots.num_used += len(spans)
        slot = slots.address + 8 * first_slot
        group: list[int] = []
        for address, num_bytes in spans:
            num_tiles = -(-num_bytes // self._tile_bytes)
            if num_tiles > self._num_tiles:
                self._sum(group)
                self._launch_long(address, num_bytes, slot)
                waiting = self._waiting
            elif num_bytes:
                if num_tiles > self._num_tiles - waiting.num_tiles or waiting.num_rows == MAX_ROWS:
                    self._sum(group)
                    self.finish()
                    waiting = self._waiting
                num_leaves = -(-num_bytes // LEAF_BYTES)
                target = slot
                if num_leaves > 1:
                    target = self._hashes_address + 8 * waiting.num_hashes
                    waiting.num_hashes += num_leaves
                    waiting.levels[0] += (target, 8 * num_leaves, slot)
                self._add_row(num_bytes, num_leaves, target)
                group += (address, num_bytes)
                if len(group) == 2 * self._spans_per_launch:
                    self._sum(group)
            slot += 8
        self._sum(group)
        return slots.tensor, first_slot

    def finish(self) -> None:
        """Enqueue the second stage for all whose sums wait; where this fails it can be done again."""
        waiting = self._waiting
        if not waiting.rows:
            return
        words = waiting.rows
        for level in waiting.levels:
            words = words + level
        # pinned memory that torch keeps and hands out again after the copy: pageable memory would be waited for
        table = torch.empty((len(words),), dtype=torch.int64, device="cpu", pin_memory=self._device.type == "cuda")
        table.numpy()[:] = words
        self._table[: len(words)].copy_(table, non_blocking=True)
        address = self._table_address
        if waiting.num_leaves:
            self._launchers.hash_leaves(waiting.num_leaves, self._handle, self._constants, address, waiting.num_rows)
        address += 8 * len(waiting.rows)
        for level in waiting.levels:
            if level:
                self._launchers.hash_words(len(level) // 3, self._handle, self._constants, address)
                address += 8 * len(level)
        self._waiting = _Waiting()

    def _empty(self, num_words: int) -> torch.Tensor:
        # made anywhere, and written where inference mode is over
        with torch.inference_mode(False):
            return torch.empty((num_words,), dtype=torch.int64, device=self._device)

    def _add_row(self, num_bytes: int, num_leaves: int, target: int) -> None:
        waiting = self._waiting
        sums = self._sums_address + waiting.num_tiles * self._sums_per_tile
        waiting.rows += (waiting.num_leaves, sums, num_bytes, target)
        waiting.num_leaves += num_leaves
        waiting.num_tiles += -(-num_bytes // self._tile_bytes)

    def _sum(self, group: list[int]) -> None:
        """Launch the first stage for the spans, (address, number of bytes), that were added last, and clear them."""
        if not group:
            return
        waiting = self._waiting
        first, waiting.num_summed = waiting.num_summed, waiting.num_tiles
        sums = self._sums_address + first * self._sums_per_tile
        missing = (0,) * (2 * self._spans_per_launch - len(group))
        self._launchers.sum_blocks(waiting.num_tiles - first, self._handle, self._constants, sums, *group, *missing)
        group.clear()

    def _launch_long(self, address: int, num_bytes: int, slot: int) -> None:
        """Enqueue both stages for a span whose sums would not fit: part by part, then its hashes level by level."""
        self.finish()
        counts = [-(-num_bytes // LEAF_BYTES)]
        while counts[-1] > 1:
            counts.append(-(-8 * counts[-1] // LEAF_BYTES))
        # freed in the stream's order, after what is enqueued here
        hashes = self._empty(sum(counts[:-1]))
        place = hashes.data_ptr()
        held = self._num_tiles * self._tile_bytes // LEAF_BYTES * LEAF_BYTES
        try:
            for begin in range(0, num_bytes, held):
                length = min(held, num_bytes - begin)
                self._add_row(length, -(-length // LEAF_BYTES), place + begin // LEAF_BYTES * 8)
                self._sum([address + begin, length])
                if begin + length == num_bytes:
                    self._waiting.levels = _levels(counts, place, slot)
                self.finish()
        except BaseException:  # Ctrl-C too: half a row would stay
            self._waiting = _Waiting()  # rows that point to memory which is let go here
            raise


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
