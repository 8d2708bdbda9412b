"""What is launched for spans of a device's memory, when, from which buffers, and on which stream."""

import random
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import pytest
import torch
from late_kernels import LateLaunchers, late_kernels
from torch.multiprocessing.reductions import StorageWeakRef

from det_callbacks.digest import digest_tensor
from det_callbacks.digest.device import Span, lanes, triton_digest
from det_callbacks.digest.device.triton_digest import TritonDigest
from det_callbacks.errors import DetCallbacksError
from det_callbacks.host_digest import LEAF_BYTES

TILE = 32 * 1024


class StreamedDigest(TritonDigest):
    """On the host, with streams by name, and a note of what they are told."""

    def __init__(self) -> None:
        self.current: Hashable = "main"
        self.notes: list[tuple[Hashable, ...]] = []
        super().__init__(late_kernels(), torch.device("cpu"))

    @property
    def late(self) -> LateLaunchers:
        return self._launchers

    def names(self) -> list[str]:
        """Return the kernels that were launched since the last time."""
        found = [name for name, _, _ in self.late.launched]
        self.late.launched.clear()
        return found

    def stream(self) -> Hashable:
        return self.current

    def wait_for(self, stream: Hashable) -> None:
        self.notes.append((self.current, "waits for", stream))

    def _tell_allocator(self, tensor: torch.Tensor, stream: Hashable) -> None:
        self.notes.append((stream, "uses", tensor.data_ptr()))

    def waits(self) -> list[tuple[Hashable, ...]]:
        return [note for note in self.notes if note[1] == "waits for"]

    @contextmanager
    def _on(self, stream: Hashable) -> Iterator[None]:
        former, self.current = self.current, stream
        yield
        self.current = former


@pytest.fixture
def method() -> StreamedDigest:
    return StreamedDigest()


def random_bytes(*sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]


def spans(values: list[torch.Tensor]) -> list[Span]:
    return [(value.untyped_storage(), 0, value.nbytes) for value in values]


def digests(values: list[torch.Tensor]) -> list[int]:
    return [digest_tensor(value) for value in values]


def test_a_flush_is_one_launch_and_a_step_three_more(method: StreamedDigest) -> None:
    values = random_bytes(5, 3 * LEAF_BYTES, 0, 70_000)
    launched = [method.launch(spans(values), "main") for _ in range(40)]
    assert method.names() == ["sum_blocks"] * 40
    assert method.collect(launched) == digests(values) * 40
    assert method.names() == ["hash_leaves", "hash_words"]
    assert method.collect([method.launch(spans(values[:1]), "main")]) == digests(values[:1])
    assert method.names() == ["sum_blocks", "hash_leaves"]


def test_a_flush_allocates_nothing(method: StreamedDigest, monkeypatch: pytest.MonkeyPatch) -> None:
    values = random_bytes(5, 3 * LEAF_BYTES)
    launched = [method.launch(spans(values), "main")]
    made = []
    real = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *arguments, **keywords: made.append(arguments) or real(*arguments, **keywords)
    )
    launched += [method.launch(spans(values), "main") for _ in range(100)]
    assert method.collect(launched) == digests(values) * 101
    assert len(made) == 1, "the table's pinned memory, at the end"


@pytest.mark.parametrize("seed", range(3))
def test_random_launches_give_the_digests_of_their_moment(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sums for few tiles and rows for few spans, so that everything fills up, and lanes kept of two streams."""
    monkeypatch.setattr(triton_digest, "FIRST_LANE_TILES", 40)
    monkeypatch.setattr(triton_digest, "LANE_TILES", 8)
    monkeypatch.setattr(triton_digest, "MAX_LANES", 2)
    monkeypatch.setattr(lanes, "MAX_ROWS", 12)
    monkeypatch.setattr(lanes, "NUM_SLOTS", 50)
    method = StreamedDigest()
    draw = random.Random(seed)
    waiting: dict[int, list] = {0: [], 1: []}
    expected: dict[int, list[int]] = {0: [], 1: []}
    base = random_bytes(6 * LEAF_BYTES)[0]
    for _ in range(60):
        queue = draw.randrange(2)
        if draw.random() < 0.15:
            assert method.collect(waiting[queue]) == expected[queue]
            waiting[queue], expected[queue] = [], []
        parts = []
        for _ in range(draw.randrange(1, 30)):
            size = draw.choice([0, draw.randrange(5000), draw.randrange(5000), draw.randrange(TILE * 3)])
            size = draw.randrange(base.nbytes) if draw.random() < 0.04 else size
            begin = draw.randrange(base.nbytes - size + 1)
            parts.append((base.untyped_storage(), begin, size))
            expected[queue].append(digest_tensor(base[begin : begin + size]))
        waiting[queue].append(method.launch(parts, draw.choice(["main", "main", "a", "b", "c", "d"])))
        base[draw.randrange(base.nbytes)] += 1
    for queue in (0, 1):
        assert method.collect(waiting[queue]) == expected[queue]


@pytest.mark.parametrize("num_bytes", [LEAF_BYTES + 1, 8 << 30, (8 << 30) + 1, 9 << 30], ids=lambda size: f"{size}")
def test_hashes_of_hashes_go_level_by_level(num_bytes: int) -> None:
    counts = [-(-num_bytes // LEAF_BYTES)]
    while counts[-1] > 1:
        counts.append(-(-8 * counts[-1] // LEAF_BYTES))
    levels = lanes._levels(counts, 4096, 8)
    assert len(levels) == (1 if num_bytes <= 8 << 30 else 2)
    place = 4096
    for count, level in zip(counts, levels, strict=False):
        rows = list(zip(*[iter(level)] * 3, strict=True))
        assert [row[0] for row in rows] == [place + LEAF_BYTES * number for number in range(len(rows))]
        assert sum(row[1] for row in rows) == 8 * count
        place += 8 * count
        targets = [8] if len(rows) == 1 else [place + 8 * number for number in range(len(rows))]
        assert [row[2] for row in rows] == targets


def test_streams_have_their_own_buffers_and_the_end_waits_for_all(method: StreamedDigest) -> None:
    values = random_bytes(100, 2 * LEAF_BYTES)
    launched = [method.launch(spans(values), stream) for stream in ("main", "side", "main")]
    assert method.waits() == []
    assert method.collect(launched) == digests(values) * 3
    assert method.waits() == [("main", "waits for", "side")]
    assert method.names() == ["sum_blocks"] * 3 + ["hash_leaves", "hash_words"] * 2


def test_the_allocator_is_told_of_every_storage_that_is_read(method: StreamedDigest) -> None:
    first, second = random_bytes(100, 50)
    method.launch([*spans([first]), (second.untyped_storage(), 7, 9)], "side")
    assert method.notes == [("side", "uses", first.data_ptr()), ("side", "uses", second.data_ptr())]
    memories = [StorageWeakRef(value.untyped_storage()) for value in (first, second)]
    del first, second
    assert [memory.expired() for memory in memories] == [True, True], "and the memory is let go"


def test_nothing_is_done_in_a_capture(method: StreamedDigest, monkeypatch: pytest.MonkeyPatch) -> None:
    values = random_bytes(100)
    kept = method.launch(spans(values), "main")
    plain = TritonDigest(late_kernels(), torch.device("cpu"))  # its streams are not the test's
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(DetCallbacksError, match="captures a CUDA graph"):
            plain.launch(spans(values), None)
        with pytest.raises(DetCallbacksError, match="captures a CUDA graph"):
            TritonDigest.collect(method, [kept])
        with pytest.raises(DetCallbacksError, match="captures a CUDA graph"):
            TritonDigest(late_kernels(), torch.device("cpu"))
    assert method.collect([kept]) == digests(values)


def test_streams_beyond_a_few_have_lanes_for_a_step_only(method: StreamedDigest) -> None:
    values, other = random_bytes(100), random_bytes(50)
    kept = method.launch(spans(other), "d")  # of another queue
    launched = [method.launch(spans(values), stream) for stream in "abcdea"]
    assert len(method._lanes) == 5
    assert method.collect(launched) == digests(values) * 6
    assert list(method._lanes) == ["d", "a", "b"]
    assert method.collect([kept]) == digests(other)


def test_slots_are_not_left_to_the_allocator_before_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "NUM_SLOTS", 3)
    method = StreamedDigest()
    values = random_bytes(100, 200)
    method.launch(spans(values), "main")  # a queue that is discarded drops what it was given
    launched = method.launch(spans(values), "main")
    assert method.names() == ["sum_blocks", "hash_leaves", "sum_blocks"]
    assert method.collect([launched]) == digests(values)


@pytest.mark.parametrize("kernel", ["sum_blocks", "hash_leaves", "hash_words"])
@pytest.mark.parametrize("sizes", [(100, 2 * LEAF_BYTES), (9 * LEAF_BYTES,)], ids=["short", "long"])
def test_what_raises_loses_the_digests_of_its_stream_alone(
    kernel: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C too; never with wrong bits, and the next launch has new buffers."""
    monkeypatch.setattr(triton_digest, "FIRST_LANE_TILES", 24)
    method, values = StreamedDigest(), random_bytes(*sizes)
    kept, other = (method.launch(spans(random_bytes(70)), stream) for stream in ("main", "side"))
    with monkeypatch.context() as patch:
        patch.setattr(method.late, kernel, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            method.collect([method.launch(spans(values), "main")])
    with pytest.raises(DetCallbacksError, match="were lost when an earlier launch failed"):
        method.collect([kept])
    assert method.collect([other, method.launch(spans(values), "main")]) == digests([*random_bytes(70), *values])


def test_a_stream_of_an_earlier_step_is_not_asked_for(method: StreamedDigest) -> None:
    """It may be gone: a library's own stream is destroyed with the library's objects."""
    values = random_bytes(100)
    assert method.collect([method.launch(spans(values), "gone")]) == digests(values)
    method.notes.clear()
    assert method.collect([method.launch(spans(values), "main")]) == digests(values)
    assert method.waits() == []


def test_buffers_made_in_inference_mode_serve_outside_of_it() -> None:
    values = random_bytes(100)
    with torch.inference_mode():
        method = StreamedDigest()
        assert method.collect([method.launch(spans(values), "main")]) == digests(values)
    assert method.collect([method.launch(spans(values), "main")]) == digests(values)
