"""Digests that wait to be launched together: what is written, freed or dropped meanwhile, budgets and failures."""

import random
import weakref
from collections.abc import Callable, Hashable, Sequence, Set

import late_device
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from det_callbacks.digest import digest_tensor
from det_callbacks.digest.device.deferred import DigestQueue
from det_callbacks.digest.device.triton_digest import Span
from det_callbacks.errors import DetCallbacksError


class LateDevice(late_device.LateDevice):
    """One with streams, whose launches may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[int, Hashable]] = []
        self.current: Hashable = None
        self.failure: Exception | None = None
        self.waits: list[tuple[Hashable, Hashable]] = []  # of one stream for another

    def stream(self) -> Hashable:
        return self.current

    def wait_for(self, stream: Hashable) -> None:
        self.waits.append((self.current, stream))

    def launch(self, spans: Sequence[Span], stream: Hashable, unheld: Set[int] = frozenset()) -> list[torch.Tensor]:
        if self.failure is not None:
            raise self.failure
        self.launches.append((len(spans), stream))
        return super().launch(spans, stream, unheld)


def add(queue: DigestQueue, value: torch.Tensor) -> int:
    return queue.add(value.untyped_storage(), value.storage_offset() * value.element_size(), value.nbytes)


def filled(value: float, length: int = 4) -> torch.Tensor:
    return torch.full((length,), float(value))


def digests(*values: float, length: int = 4) -> list[int]:
    return [digest_tensor(filled(value, length)) for value in values]


def test_memory_that_waits_is_held_and_then_let_go_and_the_tensor_never() -> None:
    queue = DigestQueue(LateDevice())
    value = filled(3)
    tensor, memory = weakref.ref(value), StorageWeakRef(value.untyped_storage())
    add(queue, value)
    del value
    assert tensor() is None
    assert not memory.expired()
    queue.flush()
    assert memory.expired()
    assert queue.finish() == digests(3)


def test_the_count_and_the_bytes_have_their_budgets() -> None:
    device = LateDevice()
    queue = DigestQueue(device, max_tensors=3, max_bytes=100)
    for value in range(4):
        add(queue, filled(value))
    assert device.launches == [(3, None)]
    add(queue, filled(4, 20))
    assert device.launches == [(3, None)]
    add(queue, filled(5, 2))
    assert device.launches == [(3, None), (2, None)]
    add(queue, filled(6, 26))
    assert device.launches[2:] == [(1, None), (1, None)]
    expected = [*digests(0, 1, 2, 3), *digests(4, length=20), *digests(5, length=2), *digests(6, length=26)]
    assert queue.finish() == expected


def test_a_write_on_another_stream_comes_after_the_reading() -> None:
    device = LateDevice()
    queue = DigestQueue(device, max_tensors=1)
    early, late, other = filled(1), filled(2), filled(3)
    device.current = "side"
    for value in (early, other, late):
        add(queue, value)
    device.current = "main"
    queue.before_write(early.untyped_storage())  # launched long ago
    assert (len(device.launches), device.waits) == (2, [("main", "side")])
    queue.before_write(late.untyped_storage())  # launched now
    assert (len(device.launches), device.waits) == (3, [("main", "side")] * 2)
    queue.before_write(late.untyped_storage())  # ordered already
    device.current = "side"
    queue.before_write(other.untyped_storage())  # in the same order anyway
    assert len(device.waits) == 2
    assert queue.finish() == digests(1, 3, 2)
    device.current = "main"
    queue.before_write(other.untyped_storage())  # it has been fetched
    assert len(device.waits) == 2


def test_a_write_that_may_go_anywhere_comes_after_all_reading() -> None:
    device = LateDevice()
    queue = DigestQueue(device)
    for stream, number in (("side", 1), ("other", 2), ("main", 3)):
        device.current = stream
        add(queue, filled(number))
    queue.before_any_write()
    assert (len(device.launches), device.waits) == (3, [("main", "side"), ("main", "other")])
    assert queue.finish() == digests(1, 2, 3)


def freed(device: LateDevice, value: torch.Tensor) -> None:
    value.untyped_storage().resize_(0)


def out_of_memory(device: LateDevice, value: torch.Tensor) -> None:
    device.failure = RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (freed, DetCallbacksError, "16 bytes was freed before its digest was taken"),
        (out_of_memory, RuntimeError, "out of memory"),
    ],
)
def test_lost_digests_are_an_error_until_the_queue_is_emptied(
    fault: Callable[..., None], error: type[Exception], message: str
) -> None:
    device = LateDevice()
    queue, value = DigestQueue(device), filled(2)
    add(queue, filled(1))
    queue.flush()
    add(queue, value)
    fault(device, value)
    with pytest.raises(error, match=message):
        queue.finish()
    device.failure = None
    for go_on in (queue.finish, queue.flush, lambda: add(queue, filled(3))):
        with pytest.raises(DetCallbacksError, match="were lost when an earlier launch failed"):
            go_on()
    vars(device).pop("collect", None)
    queue.discard()
    assert add(queue, filled(4)) == 0
    assert queue.finish() == digests(4)


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_give_the_digests_of_their_moment(seed: int) -> None:
    draw = random.Random(seed)
    device = LateDevice()
    queue = DigestQueue(device, max_tensors=draw.choice([1, 5, 1000]), max_bytes=draw.choice([0, 200, 1 << 20]))
    values = [torch.arange(12.0)]
    expected = []
    for _ in range(150):
        one = draw.choice(values)
        action = draw.randrange(6)
        if action == 0:
            values.append(one + draw.random())
        elif action == 1:
            begin = draw.randrange(one.numel() + 1)
            values.append(one[begin : begin + draw.randrange(8)])
        elif action == 2:
            queue.before_write(one.untyped_storage())
            one.mul_(draw.random())
        elif action == 3 and len(values) > 1:
            values = [value for value in values if value is not one]
        elif action == 4:
            device.current = draw.choice(["main", "side"])
        else:
            assert add(queue, one) == len(expected)
            expected.append(digest_tensor(one))
    assert queue.finish() == expected
    assert device.num_collected == 1
