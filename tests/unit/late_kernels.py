"""The kernels' double on the host: keeps what they leave behind by address, so that a wrong plan gives wrong bits.

``sum_blocks`` reads the spans when it is launched, as a device in stream order does; nothing else ever reads them.
"""

import ctypes
from types import SimpleNamespace

from det_callbacks.digest import digest_bytes
from det_callbacks.host_digest import LEAF_BYTES

TILE_BYTES = 32 * 1024
SUM_BYTES_PER_TILE = 2048
SPANS_PER_LAUNCH = 16


def words_at(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))


class LateLaunchers:
    """Takes what the compiled kernels take."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, int, int]] = []
        self.tiles: dict[int, bytes] = {}
        self.failures: list[Exception] = []

    def note(self, name: str, num_programs: int, stream: int) -> None:
        if self.failures:
            raise self.failures.pop()
        assert num_programs > 0
        self.launched.append((name, num_programs, stream))

    def sum_blocks(self, num_programs: int, stream: int, constants: int, sums: int, *spans: int) -> None:
        self.note("sum_blocks", num_programs, stream)
        assert len(spans) == 2 * SPANS_PER_LAUNCH
        assert words_at(constants, 1) == [17]
        program = 0
        for address, size in zip(spans[::2], spans[1::2], strict=True):
            for begin in range(0, size, TILE_BYTES):
                content = ctypes.string_at(address + begin, min(TILE_BYTES, size - begin))
                self.tiles[sums + program * SUM_BYTES_PER_TILE] = content
                program += 1
        assert program == num_programs

    def hash_leaves(self, num_programs: int, stream: int, constants: int, rows: int, num_rows: int) -> None:
        self.note("hash_leaves", num_programs, stream)
        leaf = 0
        table = [words_at(rows + 32 * number, 4) for number in range(num_rows)]
        ends = [*(row[0] for row in table[1:]), num_programs]
        for (first, sums, size, target), end in zip(table, ends, strict=True):
            assert first == leaf
            if end == first:
                continue  # what an interrupted launch was about to add has no leaf
            num_tiles = -(-size // TILE_BYTES)
            # what was never summed, as after a launch that failed, is hashed all the same
            content = b"".join(self.tiles.get(sums + SUM_BYTES_PER_TILE * tile, b"") for tile in range(num_tiles))
            content = content.ljust(size, b"?")
            for begin in range(0, size, LEAF_BYTES):
                ctypes.c_uint64.from_address(target).value = digest_bytes(content[begin : begin + LEAF_BYTES])
                target += 8
                leaf += 1
        assert leaf == num_programs


def late_kernels() -> SimpleNamespace:
    """Return what stands for the module of the kernels."""
    return SimpleNamespace(
        VERSION="0",
        TILE_BYTES=TILE_BYTES,
        SPANS_PER_LAUNCH=SPANS_PER_LAUNCH,
        CONSTANTS=(17,),
        Launchers=LateLaunchers,
    )
