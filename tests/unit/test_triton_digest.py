"""What is launched for spans of a device's memory, when, and on which stream."""

import ctypes
from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from det_callbacks.digest.components import digest_tensor
from det_callbacks.digest.host import LEAF_BYTES, digest_bytes
from det_callbacks.digest.triton_digest import TritonDigest
from det_callbacks.errors import DetCallbacksError

TILE_BYTES = 32 * 1024
SUM_BYTES_PER_TILE = 2048
SPANS_PER_LAUNCH = 16


def words_at(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))


class LateLaunchers:
    """Takes what the compiled kernels take, and keeps what they leave behind by address: a wrong
    plan gives wrong bits.

    ``sum_blocks`` reads the spans when it is launched, as a device in stream order does; nothing
    else ever reads them.
    """

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.leaves: dict[int, list[int]] = {}
        """By the address of a span's sums."""

    def sum_blocks(
        self, num_programs: int, stream: int, constants: int, sums: int, *spans: int
    ) -> None:
        self.launched.append("sum_blocks")
        assert len(spans) == 2 * SPANS_PER_LAUNCH
        assert words_at(constants, 1) == [17]
        end = sums + num_programs * SUM_BYTES_PER_TILE
        for address, size in (
            (address, size) for address, size in zip(spans[::2], spans[1::2], strict=True) if size
        ):
            content = ctypes.string_at(address, size)
            self.leaves[sums] = [
                digest_bytes(content[at : at + LEAF_BYTES]) for at in range(0, size, LEAF_BYTES)
            ]
            sums += -(-size // TILE_BYTES) * SUM_BYTES_PER_TILE
        assert sums == end

    def hash_leaves(
        self, num_programs: int, stream: int, constants: int, rows: int, num_rows: int
    ) -> None:
        self.launched.append("hash_leaves")
        leaf = 0
        for number in range(num_rows):
            first, sums, size, target = words_at(rows + 32 * number, 4)
            assert first == leaf
            num_leaves = -(-size // LEAF_BYTES)
            # what was never summed, as after a launch that failed, is hashed all the same
            hashes = self.leaves.get(sums, [0] * num_leaves)
            (ctypes.c_uint64 * num_leaves).from_address(target)[:] = hashes[:num_leaves]
            leaf += num_leaves
        assert 0 < leaf == num_programs


def late_kernels(**others: Any) -> SimpleNamespace:
    names = {
        "VERSION": "0",
        "TILE_BYTES": TILE_BYTES,
        "SPANS_PER_LAUNCH": SPANS_PER_LAUNCH,
        "CONSTANTS": (17,),
    }
    return SimpleNamespace(**{**names, "Launchers": LateLaunchers, **others})


class StreamedDigest(TritonDigest):
    """On the host, with streams by name, and a note of what they are told."""

    def __init__(self) -> None:
        self.current: Hashable = "main"
        self.waits: list[tuple[Hashable, Hashable]] = []  # of one stream for another
        self.uses: list[tuple[Hashable, int]] = []
        with torch.inference_mode():  # its memory serves outside of it all the same
            super().__init__(late_kernels(), torch.device("cpu"))

    def names(self) -> list[str]:
        found, self._launchers.launched = self._launchers.launched, []
        return found

    def stream(self) -> Hashable:
        return self.current

    def wait_for(self, stream: Hashable) -> None:
        self.waits.append((self.current, stream))

    def _record_stream(self, tensor: torch.Tensor, stream: Hashable) -> None:
        self.uses.append((stream, tensor.data_ptr()))

    def _on(self, stream: Hashable) -> Any:
        return mock.patch.object(self, "current", stream)

    def start(self, values: list[torch.Tensor], stream: Hashable = "main") -> Any:
        return self.launch([(value.untyped_storage(), 0, value.nbytes) for value in values], stream)


@pytest.fixture
def method() -> StreamedDigest:
    return StreamedDigest()


def random_bytes(*sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    return [
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes
    ]


def digests(values: list[torch.Tensor]) -> list[int]:
    return [digest_tensor(value) for value in values]


def test_a_flush_is_one_launch_and_a_step_one_more(method):
    values = random_bytes(5, 3 * LEAF_BYTES, 70_000)
    launched = [method.start(values) for _ in range(40)]
    assert method.names() == ["sum_blocks"] * 40
    assert method.collect(launched) == digests(values) * 40
    assert method.names() == ["hash_leaves"]
    assert method.collect([method.start(values[:1])]) == digests(values[:1])
    assert method.names() == ["sum_blocks", "hash_leaves"]


def test_streams_have_their_own_launches_and_the_end_waits_for_those_that_are_asked_for(method):
    values = random_bytes(100, 2 * LEAF_BYTES)
    launched = [method.start(values, stream) for stream in ("main", "side", "main")]
    other = method.start(values, "other")  # of another queue
    assert method.waits == []
    assert method.collect(launched) == digests(values) * 3
    assert method.names() == ["sum_blocks"] * 4 + ["hash_leaves"] * 2
    # a stream of an earlier step may be gone: a library's own one is destroyed
    # with the library's objects
    assert method.collect([method.start(values)]) == digests(values)
    assert method.waits == [("main", "side")]
    assert method.collect([other]) == digests(values)


def test_the_allocator_is_told_of_every_storage_that_is_read(method):
    first, second = random_bytes(100, 50)
    method.launch([(first.untyped_storage(), 0, 100), (second.untyped_storage(), 7, 9)], "side")
    assert method.uses == [("side", first.data_ptr()), ("side", second.data_ptr())]
    memories = [StorageWeakRef(value.untyped_storage()) for value in (first, second)]
    del first, second
    assert [memory.expired() for memory in memories] == [True, True], "and the memory is let go"


def test_nothing_is_done_in_a_capture(method, monkeypatch):
    (value,) = random_bytes(100)
    saved = method.start([value])
    plain = TritonDigest(late_kernels(), torch.device("cpu"))  # its streams are not the test's
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for attempt in (
            lambda: plain.launch([(value.untyped_storage(), 0, 100)], None),
            lambda: TritonDigest.collect(method, [saved]),
            lambda: TritonDigest(late_kernels(), torch.device("cpu")),
        ):
            with pytest.raises(DetCallbacksError, match="captures a CUDA graph"):
                attempt()
    assert method.collect([saved]) == digests([value])


@pytest.mark.parametrize("kernel", ["sum_blocks", "hash_leaves"])
def test_what_raises_loses_the_digests_of_its_stream_at_most(kernel, method, monkeypatch):
    """Ctrl-C too; never with wrong bits."""
    values, earlier = random_bytes(100, 2 * LEAF_BYTES), random_bytes(70)
    before, other = (method.start(earlier, stream) for stream in ("main", "side"))
    with monkeypatch.context() as patch:
        patch.setattr(
            method._launchers, kernel, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            method.collect([method.start(values)])
    if kernel == "sum_blocks":
        assert method.collect([before]) == digests(earlier)
    else:
        with pytest.raises(DetCallbacksError, match="an earlier launch failed, so digests"):
            method.collect([before])
    assert method.collect([other, method.start(values)]) == digests([*earlier, *values])
