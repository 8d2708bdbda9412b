"""Digests of a device where things go wrong: Ctrl-C at any line, no memory left, other threads, odd Tritons."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

import device_cases
import pytest
import torch
from late_kernels import late_kernels
from test_digest_queue import LateDevice
from test_lanes import StreamedDigest, digests, random_bytes, spans

from det_callbacks.digest import digest_memory, digest_tensor
from det_callbacks.digest.device import (
    Choice,
    DigestQueue,
    LateDigests,
    Span,
    copied,
    device_choice,
    lanes,
    late,
    triton_digest,
)
from det_callbacks.digest.device.copied import CopiedDigest
from det_callbacks.errors import DetCallbacksError
from det_callbacks.host_digest import LEAF_BYTES

FILES = (lanes.__file__, triton_digest.__file__)


@contextmanager
def interrupt_at(line: int) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt before the so manieth line that runs in the lanes' modules; yield how many have run."""
    num_lines = [0]

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            num_lines[0] += 1
            if num_lines[0] == line:
                raise KeyboardInterrupt
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        yield num_lines
    finally:
        sys.settrace(former)


@pytest.mark.slow
def test_an_interrupt_at_any_line_leaves_right_digests_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of launches that wait already, and of later ones; three streams, sums that fill up, a long span."""
    monkeypatch.setattr(triton_digest, "FIRST_LANE_TILES", 24)
    monkeypatch.setattr(triton_digest, "LANE_TILES", 10)
    monkeypatch.setattr(triton_digest, "MAX_LANES", 2)
    monkeypatch.setattr(lanes, "NUM_SLOTS", 7)
    values = random_bytes(100, LEAF_BYTES + 9)
    long = random_bytes(3 * LEAF_BYTES + 5)
    expected, expected_long = digests(values), digests(long)
    line, is_through, num_lost = 0, False, 0
    while not is_through:
        line += 1
        method = StreamedDigest()
        kept = [method.launch(spans(values), stream) for stream in ("main", "a")]
        try:
            with interrupt_at(line):
                method.launch(spans(values), "main")
                method.launch(spans(long), "main")
                method.launch(spans(values), "b")
                method.collect([method.launch(spans(values), "main")])
            is_through = True
        except KeyboardInterrupt:
            method.current = "main"
            method._lock = threading.Lock()  # a trace, unlike a signal, may raise where a with block is left
        try:
            assert method.collect(kept) == expected * 2, line
        except DetCallbacksError:
            num_lost += 1
        after = [method.launch(spans([*values, *long]), stream) for stream in ("main", "b", "main")]
        assert method.collect(after) == (expected + expected_long) * 3, line
    assert line > 200
    assert num_lost < line / 20


def test_a_stream_of_an_earlier_step_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be gone: a library's own stream is destroyed with the library's objects."""
    monkeypatch.setattr(triton_digest, "FIRST_LANE_TILES", 16)
    method, values = StreamedDigest(), random_bytes(100)
    assert method.collect([method.launch(spans(values), "gone")]) == digests(values)
    method.notes.clear()
    assert method.collect([method.launch(spans(values), "main")]) == digests(values)
    assert method.waits() == []


# other threads


class Held(LateDevice):
    """Its launches begin, and go on when they are let."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def launch(self, spans: Sequence[Span], stream: object) -> list[torch.Tensor]:
        self.has_begun.set()
        assert self.may_go_on.wait(30)
        return super().launch(spans, stream)


@pytest.mark.parametrize("does_write", [True, False], ids=["writes", "adds"])
def test_a_thread_that_comes_into_another_one_s_launch_waits_for_it(does_write: bool) -> None:
    device = Held()
    queue = DigestQueue(device)
    value, other = torch.arange(8.0), torch.arange(3.0)
    expected = [digest_tensor(value)] + [digest_tensor(other)] * (not does_write)
    queue.add(value.untyped_storage(), 0, value.nbytes)
    errors: list[BaseException] = []

    def coming() -> None:
        try:
            if does_write:
                queue.before_write(value.untyped_storage())
                value.zero_()
            else:
                queue.add(other.untyped_storage(), 0, other.nbytes)
        except BaseException as error:  # told to the thread that waits
            errors.append(error)

    launching, second = threading.Thread(target=queue.flush), threading.Thread(target=coming)
    launching.start()
    assert device.has_begun.wait(30)
    second.start()
    second.join(0.2)
    assert second.is_alive(), "it waits"
    device.may_go_on.set()
    launching.join(30)
    second.join(30)
    assert errors == []
    assert queue.finish() == expected


# without Triton's kernels


def test_an_interrupted_digest_of_a_copy_is_made_again_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    method, values = CopiedDigest(), random_bytes(100, 200, 300)
    launched = method.launch(spans(values), None)
    numbers = iter(range(9))

    def interrupted(address: int, size: int) -> int:
        if next(numbers) == 2:
            raise KeyboardInterrupt
        return digest_memory(address, size)

    monkeypatch.setattr(copied, "digest_memory", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launched.digests()
    assert method.collect([launched]) == digests(values)


def test_a_copy_s_event_is_of_the_device_of_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device may be the current one."""
    device = torch.device("cuda", 1)
    recorded: list[object] = []
    event = SimpleNamespace(record=lambda stream=None: recorded.append(stream), synchronize=lambda: None)
    monkeypatch.setattr(torch, "Event", lambda _device: event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda of: f"the current stream of {of}")
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: real(*shape, **options))
    values = random_bytes(100)
    method = CopiedDigest(device)
    assert method.collect([method.launch(spans(values), method.stream())]) == digests(values)
    assert recorded == ["the current stream of cuda:1"]


# what is chosen


def reason_with(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "det_callbacks.digest.device.triton_kernels", kernels)
    return str(device_choice.__wrapped__(torch.device("cuda", 0)))


def raising(error: Exception) -> Callable[[], None]:
    def launchers() -> None:
        raise error

    return launchers


@pytest.mark.parametrize("error", [AssertionError("libcuda.so cannot found!"), AttributeError("no such name")])
def test_an_odd_triton_is_not_taken_and_says_why(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = late_kernels()
    kernels.IS_INTERPRETED, kernels.TritonError, kernels.Launchers = False, ValueError, raising(error)
    monkeypatch.setattr(triton_digest.TritonDigest, "stream", lambda _: None)
    said = reason_with(kernels, monkeypatch)
    assert f"no Triton: {type(error).__name__}: {error}" in said


def test_triton_s_interpreter_is_kept_from_the_memory_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = late_kernels()
    kernels.IS_INTERPRETED, kernels.TritonError = True, ValueError
    assert "no Triton: TRITON_INTERPRET is set" in reason_with(kernels, monkeypatch)


def test_what_is_tried_on_a_device_is_none_of_the_program_s_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def choice(_device: torch.device) -> Choice:
        torch.ones(2)
        return Choice(method=LateDevice(), reasons=())

    monkeypatch.setattr(late, "device_choice", choice)
    value = torch.arange(4.0)
    with Mode():
        assert LateDigests().computes_on(value.device)
    assert seen == []


def test_a_device_is_given_no_dtype_to_copy_that_it_has_no_op_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA copies a tensor of whole memory as bytes, and others by an op of the dtype (torch 2.13)."""
    value = torch.arange(24, dtype=torch.uint8).view(torch.uint3).view(4, 6)
    parts = [value, value.t(), value[:, ::2], value[:1].expand(3, 6)]
    expected = [digest_tensor(part) for part in parts]
    real = torch.Tensor.cpu

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is torch.uint3 and not tensor.is_contiguous():
            raise NotImplementedError('"copy_" not implemented for UInt3')
        return real(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    with device_cases.as_on_a_device(LateDevice(), alone_bytes=1000):
        assert [digest_tensor(part) for part in parts] == expected
