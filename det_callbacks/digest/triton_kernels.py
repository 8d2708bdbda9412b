"""The digest as Triton kernels: many spans of device memory -> 64 bits each,
without synchronisation.

``det_callbacks.digest.host`` specifies the digest. The specification of XXH3-64 (seed 0, default
secret) is https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md; only its branch for
inputs above 240 bytes is used. The 16 stripes of a block of 1 KiB only add to the eight
accumulators, so ``_sum_blocks`` computes the sums of all blocks of up to 16 spans in parallel; the
spans are arguments, since a table would need a copy to the device. ``_hash_leaves`` scrambles the
accumulators between blocks, with a warp for each leaf. The host combines the
hashes of a span's leaves.

A GPU cannot load unaligned words, so the kernels read aligned words of 8 bytes, and combine two if
a span begins between them. An aligned word that contains a byte of the span is in the
same page and allocation.

Every argument is an int64 without specialisation, so that nothing compiles during a training step.
"""

import struct
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.errors import TritonError

__all__ = [
    "CONSTANTS",
    "IS_INTERPRETED",
    "SPANS_PER_LAUNCH",
    "TILE_BYTES",
    "VERSION",
    "Launchers",
    "TritonError",
]

VERSION: str = triton.__version__

SPANS_PER_LAUNCH = 16
"""Number of spans of one launch of ``_sum_blocks``."""

TILE_BYTES = 32 * 1024
"""Bytes that one program of ``_sum_blocks`` reads: 32 blocks, an eighth of a leaf."""

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff72"
    "21b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9de"
    "acd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa"
    "1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbca"
    "bb4b407e"
)

_INITIAL_LANES = (
    0xC2B2AE3D,
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x85EBCA77,
    0x27D4EB2F165667C5,
    0x9E3779B1,
)

# Stripe s of a block uses the eight words of the secret from s on, the final stripe other words;
# the scramble after a block uses the eight from 16 on.
_WORDS = [
    word
    for offset, count in ((0, 24), (121, 8), (11, 8))
    for word in struct.unpack_from(f"<{count}q", _SECRET, offset)
]

CONSTANTS = (*_WORDS, *struct.unpack("<8q", struct.pack("<8Q", *_INITIAL_LANES)))
"""The table that the kernels' argument ``constants`` points to; they index it with literals."""

_SPAN_ARGUMENTS = [
    f"{kind}{number}" for number in range(SPANS_PER_LAUNCH) for kind in ("at", "len")
]


@triton.jit
def _words_at(address):
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def _unsigned_at(words):
    return tl.load(words).to(tl.uint64, bitcast=True)


@triton.jit
def _mix(word, key):
    mixed = word ^ key
    return (mixed & 0xFFFFFFFF) * (mixed >> 32)


@triton.jit(do_not_specialize=["constants", "sums", *_SPAN_ARGUMENTS])
def _sum_blocks(
    constants: tl.int64,
    sums: tl.int64,
    at0: tl.int64,
    len0: tl.int64,
    at1: tl.int64,
    len1: tl.int64,
    at2: tl.int64,
    len2: tl.int64,
    at3: tl.int64,
    len3: tl.int64,
    at4: tl.int64,
    len4: tl.int64,
    at5: tl.int64,
    len5: tl.int64,
    at6: tl.int64,
    len6: tl.int64,
    at7: tl.int64,
    len7: tl.int64,
    at8: tl.int64,
    len8: tl.int64,
    at9: tl.int64,
    len9: tl.int64,
    at10: tl.int64,
    len10: tl.int64,
    at11: tl.int64,
    len11: tl.int64,
    at12: tl.int64,
    len12: tl.int64,
    at13: tl.int64,
    len13: tl.int64,
    at14: tl.int64,
    len14: tl.int64,
    at15: tl.int64,
    len15: tl.int64,
):
    """Write what each block of a tile adds to the eight accumulators;
    tiles are in the order of the spans.
    """
    addresses = (at1, at2, at3, at4, at5, at6, at7, at8, at9, at10, at11, at12, at13, at14, at15)
    lengths = (
        len1,
        len2,
        len3,
        len4,
        len5,
        len6,
        len7,
        len8,
        len9,
        len10,
        len11,
        len12,
        len13,
        len14,
        len15,
    )
    program = tl.program_id(0).to(tl.int64)
    address = at0
    num_bytes = len0
    first = program * 0
    following = (len0 + 32767) // 32768
    for number in tl.static_range(15):
        is_past = program >= following
        address = tl.where(is_past, addresses[number], address)
        num_bytes = tl.where(is_past, lengths[number], num_bytes)
        first = tl.where(is_past, following, first)
        following += tl.where(is_past, (lengths[number] + 32767) // 32768, 0)
    tile = program - first
    start = address + tile * 32768
    left = num_bytes - tile * 32768
    row = tl.arange(0, 32)
    lane = tl.arange(0, 8)
    block = tile * 32 + row
    is_last = ((block % 256 == 255) | (block == (num_bytes + 1023) // 1024 - 1))[:, None]
    table = _words_at(constants)
    last_key = _unsigned_at(table + 24 + lane)[None, :]
    products = tl.zeros([32, 8], tl.uint64)
    totals = tl.zeros([32, 8], tl.uint64)
    if (start % 16 == 0) & (left >= 32768):
        whole = _words_at(start)
        for stripe in tl.static_range(16):
            word = _unsigned_at(
                tl.multiple_of(whole + (row * 128 + stripe * 8)[:, None] + lane[None, :], (8, 16))
            )
            key = _unsigned_at(table + stripe + lane)[None, :]
            if stripe == 15:
                key = tl.where(is_last, last_key, key)
            products += _mix(word, key)
            totals += word
    else:
        skew = start & 7
        words = _words_at(start - skew)
        shift = (skew * 8).to(tl.uint64)
        # without a shift, no word needs the next
        end_of_next = tl.where(skew != 0, left + skew - 8, 0)
        for stripe in tl.static_range(16):
            index = (row * 128 + stripe * 8)[:, None] + lane[None, :]
            begin = index.to(tl.int64) * 8
            low = tl.load(words + index, mask=begin < left, other=0).to(tl.uint64, bitcast=True)
            high = tl.load(words + index + 1, mask=begin < end_of_next, other=0).to(
                tl.uint64, bitcast=True
            )
            # in two steps: a shift by all 64 bits is undefined
            word = (low >> shift) | ((high << 1) << (63 - shift))
            num_valid = tl.minimum(tl.maximum(left - begin, 0), 8)
            # 8 valid bytes: ~0 >> 0; none: the word is already 0
            drop = (tl.where(num_valid > 0, 8 - num_valid, 0) * 8).to(tl.uint64)
            word = tl.where(num_valid > 0, (word << drop) >> drop, 0)
            key = _unsigned_at(table + stripe + lane)[None, :]
            if stripe == 15:
                key = tl.where(is_last, last_key, key)
            products += _mix(word, key)
            totals += word
    # a word is added to its neighbour's accumulator
    even, odd = tl.split(tl.reshape(totals, [32, 4, 2]))
    added = products + tl.reshape(tl.join(odd, even), [32, 8])
    target = tl.multiple_of(_words_at(sums), 16) + program * 256 + row[:, None] * 8 + lane[None, :]
    # rows beyond the span's end write sums that nothing reads
    tl.store(target, added.to(tl.int64, bitcast=True))


@triton.jit
def _scrambled(state, scramble):
    return (state ^ (state >> 47) ^ scramble) * 0x9E3779B1


@triton.jit
def _high_product(first, second):
    first_low, first_high = first & 0xFFFFFFFF, first >> 32
    second_low, second_high = second & 0xFFFFFFFF, second >> 32
    low_high = first_low * second_high
    carried = first_high * second_low + ((first_low * second_low) >> 32)
    middle = (carried & 0xFFFFFFFF) + low_high
    return first_high * second_high + (carried >> 32) + (middle >> 32)


@triton.jit(do_not_specialize=["constants", "rows", "num_rows"])
def _hash_leaves(constants: tl.int64, rows: tl.int64, num_rows: tl.int64):
    """Write a leaf's hash; a row is a span: first leaf, address of its sums, bytes,
    address of its first hash.
    """
    program = tl.program_id(0).to(tl.int64)
    row = _words_at(rows)
    # the last row whose first leaf is at most this one
    low = program * 0
    high = low + num_rows
    while high - low > 1:
        middle = (low + high) // 2
        is_at_or_after = tl.load(row + middle * 4) <= program
        low = tl.where(is_at_or_after, middle, low)
        high = tl.where(is_at_or_after, high, middle)
    row += low * 4
    leaf = program - tl.load(row)
    num_blocks = tl.minimum((tl.load(row + 2) + 1023) // 1024 - leaf * 256, 256)
    lane = tl.arange(0, 8)
    table = _words_at(constants)
    scramble = _unsigned_at(table + 16 + lane)
    state = _unsigned_at(table + 40 + lane)
    begin = _words_at(tl.load(row + 1)) + leaf * 2048 + lane
    # 16 at a time, so that their loads overlap
    num_scrambled = num_blocks - 1
    num_together = num_scrambled // 16 * 16
    for block in range(0, num_together, 16):
        for step in tl.static_range(16):
            state = _scrambled(state + _unsigned_at(begin + (block + step) * 8), scramble)
    for block in range(num_together, num_scrambled):
        state = _scrambled(state + _unsigned_at(begin + block * 8), scramble)
    state += _unsigned_at(begin + num_scrambled * 8)
    even, odd = tl.split(tl.reshape(state ^ _unsigned_at(table + 32 + lane), [4, 2]))
    folded = (even * odd) ^ _high_product(even, odd)
    value = tl.sum(folded, 0) + (num_blocks * 1024).to(tl.uint64) * 0x9E3779B185EBCA87
    value = (value ^ (value >> 37)) * 0x165667919E3779F9
    value = value ^ (value >> 32)
    tl.store(_words_at(tl.load(row + 3) + leaf * 8), value.to(tl.int64, bitcast=True))


IS_INTERPRETED = not isinstance(_sum_blocks, triton.JITFunction)
"""Whether Triton's interpreter runs the kernels; it reads only the host's memory."""


class Launchers:
    """The kernels, compiled for the current device; each takes the grid size,
    the stream and kernel arguments.
    """

    def __init__(self) -> None:
        self.sum_blocks = _launcher(_sum_blocks, num_warps=4)
        self.hash_leaves = _launcher(_hash_leaves, num_warps=1)


def _launcher(kernel: triton.JITFunction, *, num_warps: int) -> Callable[..., None]:
    # launching a compiled kernel directly takes a few microseconds instead of 20 to 30;
    # in Triton 3.7.1 CompiledKernel.__getitem__ takes the stream, and integers for int64 arguments
    if IS_INTERPRETED:
        return lambda num_programs, _stream, *arguments: kernel[(num_programs,)](
            *arguments, num_warps=num_warps
        )
    compiled: Any = kernel.warmup(*[0] * len(kernel.arg_names), grid=(1,), num_warps=num_warps)
    return lambda num_programs, stream, *arguments: compiled[(num_programs, 1, 1)](
        *arguments, stream=stream
    )
