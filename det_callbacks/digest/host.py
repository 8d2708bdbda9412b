"""Memory of the host -> 64 bits: DIGEST_VERSION 1, on the ``xxhash`` library.

The bytes are split into leaves of 256 KiB (no bytes are one leaf of zero bytes). Each leaf is
zero-padded to a multiple of 1,024 bytes and hashed with XXH3-64, seed 0. If there are several
leaves, their little-endian hashes are the bytes of the next level, so a GPU can hash blocks in
parallel. The digest omits the number of bytes, which shape and dtype give.
"""

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

if TYPE_CHECKING:
    from typing_extensions import Buffer  # collections.abc has it from Python 3.12 on

DIGEST_VERSION = 1

BLOCK_BYTES = 1024
LEAF_BYTES = 256 * 1024
THREADED_BYTES = 16 * 1024 * 1024  # below, a second thread costs more than it saves
_PIECE_BYTES = 8 * LEAF_BYTES  # bytes that a thread takes at a time: under 1 ms
_PADDING = bytes(BLOCK_BYTES)
_COPIED_BYTES = 8 * BLOCK_BYTES  # copying a smaller buffer is faster than finding its address


@functools.cache  # at most 1,279 lengths: up to 1,024, and its multiples up to a leaf
def _reader(num_bytes: int) -> "Callable[[int], ctypes.Array[ctypes.c_char]]":
    """Return a function that makes a ctypes array at an address,
    at a fifth of the cost of string_at.
    """
    return (ctypes.c_char * num_bytes).from_address


def digest_memory(address: int, nbytes: int) -> int:
    """Return the 64-bit digest of host memory: 0.2 microseconds, or memory speed;
    in two threads from 16 MiB.

    The memory must be readable over the whole length, and must not change during the call.
    """
    if nbytes > LEAF_BYTES:
        if nbytes < THREADED_BYTES:
            return _join_leaves(_leaf_hashes((address, nbytes)))
        return digest_spans([(address, nbytes)])[0]
    tail = nbytes % BLOCK_BYTES
    if not tail:
        return xxh3_64_intdigest(_reader(nbytes)(address) if nbytes else b"")
    if nbytes < BLOCK_BYTES:
        return xxh3_64_intdigest(_reader(nbytes)(address).raw.ljust(BLOCK_BYTES, b"\0"))
    state = xxh3_64(_reader(nbytes - tail)(address))
    state.update(_reader(tail)(address + nbytes - tail))
    state.update(_PADDING[tail:])
    return state.intdigest()


def digest_rows(address: int, num_rows: int, nbytes: int) -> list[int]:
    """Return the digest of each row of contiguous host memory; 0.2 microseconds each."""
    if 0 < nbytes < BLOCK_BYTES:
        content = ctypes.string_at(address, num_rows * nbytes)
        rows = [content[start : start + nbytes] for start in range(0, len(content), nbytes)]
        return [xxh3_64_intdigest(row.ljust(BLOCK_BYTES, b"\0")) for row in rows]
    return [digest_memory(address + index * nbytes, nbytes) for index in range(num_rows)]


def digest_bytes(buffer: "Buffer") -> int:
    """Return the 64-bit digest of the bytes of a C-contiguous buffer (bytes,
    memoryview, ndarray, ...).
    """
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("digest_bytes needs a C-contiguous buffer; pass a contiguous copy of it")
    if view.nbytes <= _COPIED_BYTES:
        num_blocks = -(-view.nbytes // BLOCK_BYTES)
        return xxh3_64_intdigest(view.tobytes().ljust(num_blocks * BLOCK_BYTES, b"\0"))
    # unlike ctypes, NumPy gives the address of a read-only buffer
    array = np.frombuffer(view, dtype=np.uint8)
    return digest_memory(array.ctypes.data, array.nbytes)


def digest_file(path: Path) -> tuple[int, int]:
    """Return the size of a file in bytes, and its digest."""
    num_bytes, hashes = 0, []
    with path.open("rb") as file:
        while leaf := file.read(LEAF_BYTES):
            num_bytes += len(leaf)
            hashes.append(digest_bytes(leaf))
    return num_bytes, _join_leaves(hashes or [digest_bytes(b"")])


def digest_spans(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return the digest of each (address, number of bytes); uses two threads from 16 MiB in total.

    The second thread ends with the call, so that no pool exists at a fork or at exit.
    """
    if sum([nbytes for _, nbytes in spans]) < THREADED_BYTES:
        return [digest_memory(address, nbytes) for address, nbytes in spans]
    pieces = [
        (address + first, min(_PIECE_BYTES, nbytes - first))
        for address, nbytes in spans
        for first in range(0, max(nbytes, 1), _PIECE_BYTES)
    ]
    todo = enumerate(pieces)  # next() of an enumerate is atomic

    def hash_some() -> list[tuple[int, list[int]]]:
        return [(index, _leaf_hashes(piece)) for index, piece in todo]

    # it cannot be imported while a process ends
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="det_callbacks-digest") as pool:
        try:
            second = [pool.submit(hash_some)]
        except RuntimeError:  # the process is at its thread limit, or the interpreter is exiting
            second = []
        hashes = dict(chain(hash_some(), *(future.result() for future in second)))
    leaves = chain.from_iterable(hashes[index] for index in range(len(pieces)))
    return [
        _join_leaves([*islice(leaves, max(1, -(-nbytes // LEAF_BYTES)))]) for _, nbytes in spans
    ]


def format_digest(value: int) -> str:
    """Return a digest as 16 lowercase hexadecimal digits."""
    return f"{value:016x}"


def _leaf_hashes(piece: tuple[int, int]) -> list[int]:
    address, nbytes = piece
    return [
        digest_memory(address + start, min(LEAF_BYTES, nbytes - start))
        for start in range(0, max(nbytes, 1), LEAF_BYTES)
    ]


def _join_leaves(hashes: Sequence[int]) -> int:
    if len(hashes) == 1:
        return hashes[0]
    return digest_bytes(struct.pack(f"<{len(hashes)}Q", *hashes))
