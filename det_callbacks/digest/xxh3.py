"""The constants of XXH3-64 with seed 0, for the implementations that run on a device.

They are those of the published specification, "XXH3" in https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md:
the default secret (192 bytes), the eight initial accumulators, the multipliers. Only the branch for inputs above 240
bytes is needed, and that for none: a digest hashes nothing, or a multiple of 1,024 bytes.
"""

import struct

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a"
    "51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8f"
    "f8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)

PRIME32_1 = 0x9E3779B1
PRIME64_1 = 0x9E3779B185EBCA87
AVALANCHE_PRIME = 0x165667919E3779F9

NUM_LANES = 8
"""Accumulators of 64 bits; a stripe is one word for each."""

STRIPES_PER_BLOCK = 16

INITIAL_LANES = (
    0xC2B2AE3D,
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x85EBCA77,
    0x27D4EB2F165667C5,
    0x9E3779B1,
)


def _words(offset: int, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}Q", SECRET, offset)


SECRET_WORDS = _words(0, 24)
"""Stripe s of a block is mixed with the eight from s on; the eight from 16 on scramble after a block."""

SCRAMBLE_WORDS = SECRET_WORDS[STRIPES_PER_BLOCK:]

LAST_WORDS = _words(192 - 64 - 7, NUM_LANES)
"""What the last stripe of all is mixed with."""

MERGE_WORDS = _words(11, NUM_LANES)

EMPTY_HASH = 0x2D06800538D394C2
"""XXH3-64 of no bytes at all."""


def signed(value: int) -> int:
    """Return 64 bits as the two's complement integer that torch's int64 holds."""
    return value - (1 << 64) if value >> 63 else value


def unsigned(value: int) -> int:
    """Return the 64 bits of an int64."""
    return value & 0xFFFFFFFFFFFFFFFF
