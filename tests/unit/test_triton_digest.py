"""What is launched for spans of a device's memory, when, and on which stream."""

import random
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import pytest
import torch
from late_kernels import LateLaunchers, late_kernels
from torch.multiprocessing.reductions import StorageWeakRef

from det_callbacks.digest import digest_tensor
from det_callbacks.digest.device import triton_digest
from det_callbacks.digest.device.triton_digest import Span, TritonDigest
from det_callbacks.errors import DetCallbacksError
from det_callbacks.host_digest import LEAF_BYTES


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
    with torch.inference_mode():  # its memory serves outside of it all the same
        return StreamedDigest()


def random_bytes(*sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]


def spans(values: list[torch.Tensor]) -> list[Span]:
    return [(value.untyped_storage(), 0, value.nbytes) for value in values]


def digests(values: list[torch.Tensor]) -> list[int]:
    return [digest_tensor(value) for value in values]


def test_a_flush_is_one_launch_and_a_step_one_more(method: StreamedDigest) -> None:
    values = random_bytes(5, 3 * LEAF_BYTES, 70_000)
    launched = [method.launch(spans(values), "main") for _ in range(40)]
    assert method.names() == ["sum_blocks"] * 40
    assert method.collect(launched) == digests(values) * 40
    assert method.names() == ["hash_leaves"]
    assert method.collect([method.launch(spans(values[:1]), "main")]) == digests(values[:1])
    assert method.names() == ["sum_blocks", "hash_leaves"]


@pytest.mark.parametrize("seed", range(3))
def test_random_launches_give_the_digests_of_their_moment(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two queues on several streams, and with room for so few sums that they are hashed now and then."""
    monkeypatch.setattr(triton_digest, "MAX_SUM_BYTES", 80 * 1024)
    method = StreamedDigest()
    draw = random.Random(seed)
    waiting: dict[int, list] = {0: [], 1: []}
    expected: dict[int, list[int]] = {0: [], 1: []}
    base = random_bytes(6 * LEAF_BYTES)[0]
    for _ in range(60):
        queue = draw.randrange(2)
        if waiting[queue] and draw.random() < 0.15:
            assert method.collect(waiting[queue]) == expected[queue]
            waiting[queue], expected[queue] = [], []
        parts = []
        for _ in range(draw.randrange(1, 30)):
            size = draw.choice([1, draw.randrange(1, 5000), draw.randrange(1, 5000), draw.randrange(1, 100_000)])
            size = draw.randrange(1, base.nbytes) if draw.random() < 0.04 else size
            begin = draw.randrange(base.nbytes - size + 1)
            parts.append((base.untyped_storage(), begin, size))
            expected[queue].append(digest_tensor(base[begin : begin + size]))
        waiting[queue].append(method.launch(parts, draw.choice(["main", "main", "a", "b"])))
        base[draw.randrange(base.nbytes)] += 1
    for queue in (0, 1):
        assert method.collect(waiting[queue]) == expected[queue]


def test_streams_have_their_own_launches_and_the_end_waits_for_those_that_are_asked_for(method: StreamedDigest) -> None:
    values = random_bytes(100, 2 * LEAF_BYTES)
    launched = [method.launch(spans(values), stream) for stream in ("main", "side", "main")]
    other = method.launch(spans(values), "other")  # of another queue
    assert method.waits() == []
    assert method.collect(launched) == digests(values) * 3
    assert method.waits() == [("main", "waits for", "side")]
    assert method.names() == ["sum_blocks"] * 4 + ["hash_leaves"] * 2
    method.notes.clear()
    # a stream of an earlier step may be gone: a library's own one is destroyed with the library's objects
    assert method.collect([method.launch(spans(values), "main")]) == digests(values)
    assert method.waits() == []
    assert method.collect([other]) == digests(values)


def test_the_allocator_is_told_of_every_storage_that_is_read(method: StreamedDigest) -> None:
    first, second = random_bytes(100, 50)
    method.launch([*spans([first]), (second.untyped_storage(), 7, 9)], "side")
    assert method.notes == [("side", "uses", first.data_ptr()), ("side", "uses", second.data_ptr())]
    memories = [StorageWeakRef(value.untyped_storage()) for value in (first, second)]
    del first, second
    assert [memory.expired() for memory in memories] == [True, True], "and the memory is let go"


def test_nothing_is_done_in_a_capture(method: StreamedDigest, monkeypatch: pytest.MonkeyPatch) -> None:
    values = random_bytes(100)
    saved = method.launch(spans(values), "main")
    plain = TritonDigest(late_kernels(), torch.device("cpu"))  # its streams are not the test's
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for attempt in (
            lambda: plain.launch(spans(values), None),
            lambda: TritonDigest.collect(method, [saved]),
            lambda: TritonDigest(late_kernels(), torch.device("cpu")),
        ):
            with pytest.raises(DetCallbacksError, match="captures a CUDA graph"):
                attempt()
    assert method.collect([saved]) == digests(values)


@pytest.mark.parametrize("kernel", ["sum_blocks", "hash_leaves"])
def test_what_raises_loses_the_digests_of_its_stream_at_most(
    kernel: str, method: StreamedDigest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C too; never with wrong bits."""
    values = random_bytes(100, 2 * LEAF_BYTES)
    before, other = (method.launch(spans(random_bytes(70)), stream) for stream in ("main", "side"))
    with monkeypatch.context() as patch:
        patch.setattr(method.late, kernel, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            method.collect([method.launch(spans(values), "main")])
    if kernel == "sum_blocks":
        assert method.collect([before]) == digests(random_bytes(70))
    else:
        with pytest.raises(DetCallbacksError, match="were lost when an earlier launch failed"):
            method.collect([before])
    assert method.collect([other, method.launch(spans(values), "main")]) == digests([*random_bytes(70), *values])
