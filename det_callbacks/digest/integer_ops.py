"""The digest from torch's integer ops alone: for devices that have a torch and no Triton.

The specification is in ``det_callbacks.host_digest``, the algorithm and its constants in ``det_callbacks.digest.xxh3``.
All leaves of a chunk are taken together: sixteen steps add up their blocks, and at most 255 scramble them, so a chunk
costs some 1,700 small launches however many leaves it holds. int64 wraps around as uint64 does, and the logical shift
that torch has not is an arithmetic one and a mask. Ops run where the tensor is, nothing is fetched.
"""

import functools

import torch

from det_callbacks.digest.xxh3 import (
    AVALANCHE_PRIME,
    EMPTY_HASH,
    INITIAL_LANES,
    LAST_WORDS,
    MERGE_WORDS,
    NUM_LANES,
    PRIME32_1,
    PRIME64_1,
    SCRAMBLE_WORDS,
    SECRET_WORDS,
    STRIPES_PER_BLOCK,
    signed,
)
from det_callbacks.host_digest import BLOCK_BYTES, LEAF_BYTES

CHUNK_BYTES = 128 * 1024 * 1024
"""Bytes looked at together, a multiple of a leaf: with what they are turned into, at most twice as many are held."""

_LOW = 0xFFFFFFFF


def digest_flat(flat: torch.Tensor) -> torch.Tensor:
    """Return the digest of the bytes of a tensor, computed on its device.

    Takes at most 256 MiB of the device's memory beside the tensor, and does not synchronise with the host.

    Args:
        flat: of one dimension, contiguous, of any dtype whose elements are whole bytes.

    Returns:
        int64 without dimensions, on the tensor's device: the digest's bits.
    """
    content = flat if flat.dtype is torch.uint8 else flat.view(torch.uint8)
    while True:
        hashes = [_hash_leaves(chunk) for chunk in content.split(CHUNK_BYTES)]
        level = hashes[0] if len(hashes) == 1 else torch.cat(hashes)
        if level.numel() == 1:
            return level[0]
        content = level.view(torch.uint8)


def _hash_leaves(content: torch.Tensor) -> torch.Tensor:
    """Return the hashes of the leaves of a chunk: those that are whole together, and the rest by itself."""
    num_bytes = content.numel()
    if not num_bytes:
        return _constants((EMPTY_HASH,), content.device).clone()
    num_whole = num_bytes // LEAF_BYTES
    parts = []
    if num_whole:
        parts.append(_hash_equal(_words(content[: num_whole * LEAF_BYTES]).view(num_whole, -1)))
    if num_bytes % LEAF_BYTES:
        parts.append(_hash_equal(_words(content[num_whole * LEAF_BYTES :]).view(1, -1)))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _words(content: torch.Tensor) -> torch.Tensor:
    """Return bytes as words of 64 bits, zero-padded to whole blocks; those that do not lie so are copied."""
    num_bytes = content.numel()
    missing = -num_bytes % BLOCK_BYTES
    if missing or content.storage_offset() % 8 or content.data_ptr() % 8:
        padded = torch.zeros(num_bytes + missing, dtype=torch.uint8, device=content.device)
        padded[:num_bytes] = content
        content = padded
    return content.view(torch.int64)


@functools.cache
def _constants(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # kept: bringing numbers of the host to a device waits for it
    with torch.inference_mode(False):
        return torch.tensor([signed(value) for value in values], dtype=torch.int64, device=device)


def _hash_equal(words: torch.Tensor) -> torch.Tensor:
    """Return the hash of each row of words; a row is a leaf of whole blocks."""
    num_leaves, num_words = words.shape
    num_blocks = num_words * 8 // BLOCK_BYTES
    blocks = words.view(num_leaves, num_blocks, STRIPES_PER_BLOCK, NUM_LANES)

    def constants(values: tuple[int, ...]) -> torch.Tensor:
        return _constants(values, words.device)

    sums = torch.zeros(num_leaves, num_blocks, NUM_LANES, dtype=torch.int64, device=words.device)
    totals = torch.zeros_like(sums)
    for stripe in range(STRIPES_PER_BLOCK):
        word = blocks[:, :, stripe]
        key = constants(SECRET_WORDS[stripe : stripe + NUM_LANES])
        if stripe == STRIPES_PER_BLOCK - 1:
            key = key.repeat(num_blocks, 1)
            key[-1] = constants(LAST_WORDS)
        mixed = word ^ key
        sums += (mixed & _LOW) * _shifted(mixed, 32)
        totals += word
    # a word is added to its neighbour's accumulator
    sums.view(num_leaves, num_blocks, NUM_LANES // 2, 2).add_(
        totals.view(num_leaves, num_blocks, NUM_LANES // 2, 2).flip(-1)
    )
    state = constants(INITIAL_LANES).repeat(num_leaves, 1)
    scramble = constants(SCRAMBLE_WORDS)
    for block in range(num_blocks - 1):
        state += sums[:, block]
        state ^= _shifted(state, 47)
        state ^= scramble
        state *= PRIME32_1
    state = (state + sums[:, -1]) ^ constants(MERGE_WORDS)
    even, odd = state[:, 0::2], state[:, 1::2]
    value = ((even * odd) ^ _high_product(even, odd)).sum(1) + signed(num_words * 8 * PRIME64_1 & (1 << 64) - 1)
    value = (value ^ _shifted(value, 37)) * AVALANCHE_PRIME
    return value ^ _shifted(value, 32)


def _shifted(value: torch.Tensor, places: int) -> torch.Tensor:
    """Return 64 bits moved down, zeros coming in from above."""
    return (value >> places) & ((1 << (64 - places)) - 1)


def _high_product(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the upper 64 bits of a product of 64 bits by 64 bits."""
    first_low, first_high = first & _LOW, _shifted(first, 32)
    second_low, second_high = second & _LOW, _shifted(second, 32)
    carried = first_high * second_low + _shifted(first_low * second_low, 32)
    middle = (carried & _LOW) + first_low * second_high
    return first_high * second_high + _shifted(carried, 32) + _shifted(middle, 32)
