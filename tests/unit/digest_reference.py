"""The digest once more, slowly, in plain Python: from the published XXH3 algorithm and the specification of leaves.

XXH3_64bits, seed 0, is written after https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, only for the
lengths that occur in a digest: nothing, or a multiple of 1,024 bytes.
"""

import struct

MASK = 0xFFFFFFFFFFFFFFFF
PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
PRIME64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a"
    "51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8f"
    "f8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def secret_words(offset: int, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}Q", SECRET, offset)


STRIPE_KEYS = [secret_words(8 * stripe, 8) for stripe in range(16)]
SCRAMBLE_KEY = secret_words(192 - 64, 8)
LAST_KEY = secret_words(192 - 64 - 7, 8)
MERGE_KEYS = secret_words(11, 8)


def xxh3_64(data: bytes) -> int:
    if not data:
        first, second = secret_words(56, 2)
        value = first ^ second
        value = (value ^ value >> 33) * PRIME64[1] & MASK
        value = (value ^ value >> 29) * PRIME64[2] & MASK
        return value ^ value >> 32
    assert len(data) % 1024 == 0
    lanes = [PRIME32[2], *PRIME64[:4], PRIME32[1], PRIME64[4], PRIME32[0]]
    num_stripes = len(data) // 64
    for number, words in enumerate(struct.iter_unpack("<8Q", data)):
        key = LAST_KEY if number == num_stripes - 1 else STRIPE_KEYS[number % 16]
        for lane in range(8):
            word = words[lane]
            mixed = word ^ key[lane]
            lanes[lane ^ 1] += word
            lanes[lane] += (mixed & 0xFFFFFFFF) * (mixed >> 32)
        if number % 16 == 15 and number != num_stripes - 1:
            for lane in range(8):
                value = lanes[lane] & MASK
                lanes[lane] = (value ^ value >> 47 ^ SCRAMBLE_KEY[lane]) * PRIME32[0] & MASK
    result = len(data) * PRIME64[0]
    for pair in range(4):
        product = ((lanes[2 * pair] & MASK) ^ MERGE_KEYS[2 * pair]) * (
            (lanes[2 * pair + 1] & MASK) ^ MERGE_KEYS[2 * pair + 1]
        )
        result += (product & MASK) ^ (product >> 64)
    result &= MASK
    result = (result ^ result >> 37) * 0x165667919E3779F9 & MASK
    return result ^ result >> 32


def digest(data: bytes) -> int:
    leaves = [data[start : start + 262144] for start in range(0, len(data), 262144)] or [b""]
    hashes = [xxh3_64(leaf + bytes(-len(leaf) % 1024)) for leaf in leaves]
    return hashes[0] if len(hashes) == 1 else digest(struct.pack(f"<{len(hashes)}Q", *hashes))
