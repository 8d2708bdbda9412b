"""The digest as Triton kernels: many spans of device memory -> 64 bits each, without a synchronisation.

The specification is in ``det_callbacks.digest.host``, the algorithm and its constants in ``det_callbacks.digest.xxh3``.
What makes XXH3 parallel here: the 16 stripes of a block of 1 KiB only add to the eight accumulators, so the sums of all
blocks are found at once (``_sum_blocks``, 64 bytes for each block). Between two blocks the accumulators are scrambled,
one after the other; a leaf has at most 256 blocks, and one warp takes each leaf (``_hash_leaves``). The hashes of a
span's leaves are the next level's bytes, to which the same two kernels are applied.

Bytes are read as aligned words of 8 bytes, of which two are joined where a span begins between them: a load that is
not aligned is an error on a GPU. An aligned word with one byte of a span in it lies in the same page and allocation.

This module needs Triton, which torch's CUDA builds bring, and is imported only where a tensor is on such a device.
Everything is enqueued on the current stream, on which the spans have to be ready.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from det_callbacks.digest.host import BLOCK_BYTES, LEAF_BYTES
from det_callbacks.digest.xxh3 import EMPTY_HASH, INITIAL_LANES, LAST_WORDS, MERGE_WORDS, SECRET_WORDS, signed

__all__ = ["LAUNCH_BYTES", "VERSION", "TritonError", "digest_device_spans"]

VERSION: str = triton.__version__

LAUNCH_BYTES = 256 * 1024 * 1024
"""Bytes that one launch reads at most: its block sums take a sixteenth of them, 16 MiB."""

TILE_BLOCKS = 32
"""Blocks that one program of ``_sum_blocks`` takes; a whole number of tiles makes a leaf."""

# What every launch's table begins with; the kernels know these places as numbers.
_CONSTANTS = [signed(word) for word in (*SECRET_WORDS, *LAST_WORDS, *MERGE_WORDS, *INITIAL_LANES)]

_ROW_WORDS = 6
"""A piece's row: address, bytes, first tile, first leaf, first block, address of the hash of its first leaf."""


@triton.jit
def _find_row(rows, number, column: tl.constexpr, num_rows):
    """Return the address of the last row whose entry in a column is at most a number; the column ascends."""
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        is_at_or_after = tl.load(rows + middle * 6 + column) <= number
        low = tl.where(is_at_or_after, middle, low)
        high = tl.where(is_at_or_after, high, middle)
    return rows + low * 6


@triton.jit(do_not_specialize=["num_rows"])
def _sum_blocks(table, rows, num_rows, sums, TILE: tl.constexpr):  # noqa: N803  # a constexpr is written so
    """Write what each of a tile's blocks adds to the eight accumulators."""
    program = tl.program_id(0).to(tl.int64)
    row = _find_row(rows, program, 2, num_rows)
    address = tl.load(row)
    num_bytes = tl.load(row + 1)
    block = (program - tl.load(row + 2)) * TILE + tl.arange(0, TILE)
    num_blocks = (num_bytes + 1023) // 1024
    is_last = (block % 256 == 255) | (block == num_blocks - 1)
    lane = tl.arange(0, 8)
    skew = address & 7
    words = (address - skew).to(tl.pointer_type(tl.int64))
    shift = (skew * 8).to(tl.uint64)
    products = tl.zeros([TILE, 8], tl.uint64)
    totals = tl.zeros([TILE, 8], tl.uint64)
    for stripe in tl.static_range(16):
        index = block[:, None] * 128 + (stripe * 8 + lane)[None, :]
        begin = index * 8
        low = tl.load(words + index, mask=begin < num_bytes, other=0).to(tl.uint64, bitcast=True)
        needs_next = (skew != 0) & (begin + 8 - skew < num_bytes)
        high = tl.load(words + index + 1, mask=needs_next, other=0).to(tl.uint64, bitcast=True)
        # in two steps, as a shift by all 64 bits is undefined
        word = (low >> shift) | ((high << 1) << (63 - shift))
        num_valid = tl.minimum(tl.maximum(num_bytes - begin, 0), 8)
        # 8 valid bytes: ~0 >> 0; none: the word is 0 where nothing was loaded
        drop = (tl.where(num_valid > 0, 8 - num_valid, 0) * 8).to(tl.uint64)
        word = tl.where(num_valid > 0, (word << drop) >> drop, 0)
        key = tl.load(table + stripe + lane).to(tl.uint64, bitcast=True)[None, :]
        if stripe == 15:
            last = tl.load(table + 24 + lane).to(tl.uint64, bitcast=True)[None, :]
            key = tl.where(is_last[:, None], last, key)
        mixed = word ^ key
        products += (mixed & 0xFFFFFFFF) * (mixed >> 32)
        totals += word
    # a word is added to its neighbour's accumulator
    even, odd = tl.split(tl.reshape(totals, [TILE, 4, 2]))
    added = products + tl.reshape(tl.join(odd, even), [TILE, 8])
    place = (tl.load(row + 4) + block)[:, None] * 8 + lane[None, :]
    tl.store(sums + place, added.to(tl.int64, bitcast=True), mask=(block < num_blocks)[:, None])


@triton.jit
def _high_product(first, second):
    """Return the upper 64 bits of a product of 64 bits by 64 bits."""
    first_low, first_high = first & 0xFFFFFFFF, first >> 32
    second_low, second_high = second & 0xFFFFFFFF, second >> 32
    low_high = first_low * second_high
    carried = first_high * second_low + ((first_low * second_low) >> 32)
    middle = (carried & 0xFFFFFFFF) + low_high
    return first_high * second_high + (carried >> 32) + (middle >> 32)


@triton.jit(do_not_specialize=["num_rows"])
def _hash_leaves(table, rows, num_rows, sums):
    """Write the hash of a leaf: its blocks' sums, scrambled one after the other."""
    program = tl.program_id(0).to(tl.int64)
    row = _find_row(rows, program, 3, num_rows)
    num_bytes = tl.load(row + 1)
    leaf = program - tl.load(row + 3)
    num_blocks = tl.minimum((num_bytes + 1023) // 1024 - leaf * 256, 256)
    lane = tl.arange(0, 8)
    scramble = tl.load(table + 16 + lane).to(tl.uint64, bitcast=True)
    state = tl.load(table + 40 + lane).to(tl.uint64, bitcast=True)
    begin = sums + (tl.load(row + 4) + leaf * 256) * 8 + lane
    for block in range(0, num_blocks - 1):
        state += tl.load(begin + block * 8).to(tl.uint64, bitcast=True)
        state = (state ^ (state >> 47) ^ scramble) * 0x9E3779B1
    state += tl.load(begin + (num_blocks - 1) * 8).to(tl.uint64, bitcast=True)
    state = state ^ tl.load(table + 32 + lane).to(tl.uint64, bitcast=True)
    even, odd = tl.split(tl.reshape(state, [4, 2]))
    folded = (even * odd) ^ _high_product(even, odd)
    value = tl.sum(folded, 0) + (num_blocks * 1024).to(tl.uint64) * 0x9E3779B185EBCA87
    value = (value ^ (value >> 37)) * 0x165667919E3779F9
    value = value ^ (value >> 32)
    target = (tl.load(row + 5) + leaf * 8).to(tl.pointer_type(tl.int64))
    tl.store(target, value.to(tl.int64, bitcast=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """Pieces of spans that are read by one launch of each kernel."""

    rows: list[int]
    num_tiles: int
    num_leaves: int
    num_blocks: int


def digest_device_spans(spans: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Enqueue the digests of spans of a device's memory.

    Two launches for each 256 MiB of a level, in which every span counts in whole leaves of 256 KiB: two for up to 1,024
    spans of a leaf each, four for one of 1 MiB. Takes up to 16 MiB of the device's memory, and 8 bytes for each leaf.

    Args:
        spans: (address, number of bytes) each, to be left alone until the current stream has passed.
        device: whose memory it is, and the current one of its kind.

    Returns:
        int64 of shape (number of spans,), on the device: the digests' bits, there once the stream has passed.
    """
    empty = signed(EMPTY_HASH)
    is_empty = [num_bytes == 0 for _, num_bytes in spans]
    digests = torch.full((len(spans),), empty, dtype=torch.int64, device=device)
    target = digests.data_ptr()
    level = [
        (address, num_bytes, target + 8 * index)
        for index, (address, num_bytes) in enumerate(spans)
        if not is_empty[index]
    ]
    kept = []
    while level:
        joined = [-(-num_bytes // LEAF_BYTES) for _, num_bytes, _ in level]
        hashes = torch.empty((sum(count for count in joined if count > 1),), dtype=torch.int64, device=device)
        kept.append(hashes)
        place = hashes.data_ptr()
        pieces, following = [], []
        for (address, num_bytes, digest), count in zip(level, joined, strict=True):
            pieces.append((address, num_bytes, digest if count == 1 else place))
            if count > 1:
                following.append((place, 8 * count, digest))
                place += 8 * count
        _run(list(_launches(pieces)), device)
        level = following
    return digests


def _launches(pieces: Sequence[tuple[int, int, int]]) -> Iterator[_Launch]:
    rows: list[int] = []
    tiles = leaves = blocks = held = 0
    for address, num_bytes, target in pieces:
        begin = 0
        while begin < num_bytes:
            if held == LAUNCH_BYTES:
                yield _Launch(rows=rows, num_tiles=tiles, num_leaves=leaves, num_blocks=blocks)
                rows, tiles, leaves, blocks, held = [], 0, 0, 0, 0
            # counted in whole leaves, so that a piece never ends within one
            length = min(num_bytes - begin, LAUNCH_BYTES - held)
            rows += [address + begin, length, tiles, leaves, blocks, target + begin // LEAF_BYTES * 8]
            num_blocks, num_leaves = -(-length // BLOCK_BYTES), -(-length // LEAF_BYTES)
            tiles += -(-num_blocks // TILE_BLOCKS)
            leaves += num_leaves
            blocks += num_blocks
            held += num_leaves * LEAF_BYTES
            begin += length
    if rows:
        yield _Launch(rows=rows, num_tiles=tiles, num_leaves=leaves, num_blocks=blocks)


def _run(launches: Sequence[_Launch], device: torch.device) -> None:
    words = [*_CONSTANTS, *(word for launch in launches for word in launch.rows)]
    content = torch.tensor(words, dtype=torch.int64, device="cpu")
    if device.type != "cpu":  # Triton's interpreter takes the host's memory
        content = content.pin_memory().to(device, non_blocking=True)
    sums = torch.empty((max(launch.num_blocks for launch in launches) * 8,), dtype=torch.int64, device=device)
    start = len(_CONSTANTS)
    for launch in launches:
        rows = content[start:]
        num_rows = len(launch.rows) // _ROW_WORDS
        _sum_blocks[(launch.num_tiles,)](content, rows, num_rows, sums, TILE=TILE_BLOCKS, num_warps=4)
        _hash_leaves[(launch.num_leaves,)](content, rows, num_rows, sums, num_warps=1)
        start += len(launch.rows)
