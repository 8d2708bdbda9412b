"""Digests that are computed where a tensor is: what waits for a launch, the bits of the
host, which way is taken.
"""

import os
import random
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import device_cases
import pytest
import torch
from beta_tensors import BETA_DTYPES
from late_device import LateDevice, late_device
from test_digest import CountingDispatch
from test_triton_digest import StreamedDigest, late_kernels
from torch.multiprocessing.reductions import StorageWeakRef

from det_callbacks.digest import deferred, triton_digest
from det_callbacks.digest.components import digest_tensor
from det_callbacks.digest.deferred import DeferredDigests, DigestQueue
from det_callbacks.digest.triton_digest import Choice, device_choice, disagreement
from det_callbacks.errors import DetCallbacksError

pytestmark = BETA_DTYPES


def add(queue: DigestQueue, value: torch.Tensor) -> int:
    return queue.add(
        value.untyped_storage(), value.storage_offset() * value.element_size(), value.nbytes
    )


def filled(value: float, length: int = 4) -> torch.Tensor:
    return torch.full((length,), float(value))


def digests(*values: float, length: int = 4) -> list[int]:
    return [digest_tensor(filled(value, length)) for value in values]


def test_memory_that_waits_is_held_and_then_let_go_and_the_tensor_never():
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


def test_the_count_and_the_bytes_have_their_budgets():
    device, expected = LateDevice(), []
    queue = DigestQueue(device, max_tensors=3, max_bytes=100)
    for length, launched in (
        (4, []),
        (4, []),
        (4, []),
        (4, [3]),
        (20, [3]),
        (2, [3, 2]),
        (26, [3, 2, 1, 1]),
    ):
        expected += digests(length, length=length)
        add(queue, filled(length, length))
        assert device.num_launched == launched
    assert queue.finish() == expected


def test_a_write_on_another_stream_comes_after_the_reading():
    device = LateDevice()
    queue = DigestQueue(device, max_tensors=1)
    early, late, other = filled(1), filled(2), filled(3)
    device.current = "side"
    for value in (early, other, late):
        add(queue, value)
    device.current = "main"
    queue.before_write(early.untyped_storage())  # launched long ago
    assert (len(device.num_launched), device.orders) == (2, [("main", "side")])
    queue.before_write(late.untyped_storage())  # launched now
    assert (len(device.num_launched), device.orders) == (3, [("main", "side")] * 2)
    queue.before_write(late.untyped_storage())  # ordered already
    device.current = "side"
    queue.before_write(other.untyped_storage())  # in the same order anyway
    assert len(device.orders) == 2
    assert queue.finish() == digests(1, 3, 2)
    device.current = "main"
    queue.before_write(other.untyped_storage())  # it has been fetched
    assert len(device.orders) == 2


def test_a_write_that_may_go_anywhere_comes_after_all_reading():
    device = LateDevice()
    queue = DigestQueue(device)
    for stream, number in (("side", 1), ("other", 2), ("main", 3)):
        device.current = stream
        add(queue, filled(number))
    queue.before_any_write()
    assert (len(device.num_launched), device.orders) == (3, [("main", "side"), ("main", "other")])
    assert queue.finish() == digests(1, 2, 3)


def test_lost_digests_are_an_error_until_the_queue_is_emptied():
    queue, value = DigestQueue(LateDevice()), filled(2)
    add(queue, filled(1))
    queue.flush()
    add(queue, value)
    value.untyped_storage().resize_(0)
    with pytest.raises(DetCallbacksError, match="16 bytes was freed before its digest was taken"):
        queue.finish()
    for go_on in (queue.finish, queue.flush, lambda: add(queue, filled(3))):
        with pytest.raises(DetCallbacksError, match="an earlier launch failed, so digests"):
            go_on()
    queue.discard()
    assert add(queue, filled(4)) == 0
    assert queue.finish() == digests(4)


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_give_the_digests_of_their_moment(seed, monkeypatch):
    """Of two queues of one device, with room for so few sums that they are hashed now and then."""
    monkeypatch.setattr(triton_digest, "MAX_SUM_BYTES", 80 * 1024)
    draw, method = random.Random(seed), StreamedDigest()
    limits = {
        "max_tensors": draw.choice([1, 40, 1000]),
        "max_bytes": draw.choice([0, 200_000, 1 << 24]),
    }
    queues = [DigestQueue(method, **limits) for _ in range(2)]
    expected: tuple[list[int], list[int]] = ([], [])
    values, num_collected = [torch.arange(200_000.0)], 2
    for _ in range(600):
        one, number, action = draw.choice(values), draw.randrange(2), draw.randrange(60)
        if action == 0:
            values.append(one + draw.random())
        elif action < 3:
            begin = draw.randrange(one.numel())
            values.append(one[begin : begin + draw.choice([1, 2000, 100_000])])
        elif action < 5:
            for queue in queues:
                queue.before_write(one.untyped_storage())
            one.mul_(draw.random())
        elif action == 5 and len(values) > 1:
            values = [value for value in values if value is not one]
        elif action == 6:
            method.current = draw.choice(["main", "side"])
        elif action == 7:
            assert queues[number].finish() == expected[number]
            expected[number].clear()
            num_collected += 1
        else:
            assert add(queues[number], one) == len(expected[number])
            expected[number].append(digest_tensor(one))
    assert [queue.finish() for queue in queues] == [*expected]
    assert method.names().count("hash_leaves") > 2 * num_collected, (
        "where there is room for no more sums, too"
    )


NEEDS_TRITON = "needs Triton, which the dev extra brings on Linux"


def run_python(*arguments: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "num_cases",
    [pytest.param(24, marks=pytest.mark.slow), pytest.param(300, marks=pytest.mark.soak)],
)
def test_triton_in_its_interpreter_gives_the_bits_of_the_host(num_cases):
    pytest.importorskip("triton", reason=NEEDS_TRITON)
    folder = str(Path(__file__).parents[1])
    output = run_python(
        str(Path(device_cases.__file__)), str(num_cases), TRITON_INTERPRET="1", PYTHONPATH=folder
    )
    assert f"{num_cases} cases agree" in output


COMPILE = """
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from det_callbacks.digest import triton_kernels as kernels


class Driver:
    # what Triton asks of a GPU's driver: this one compiles for a GPU and notes the launches
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 200_000},
        load_binary=lambda name, kernel, shared, device: (object(), name, 40, 0, 1024),
    )
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0
    get_current_target = lambda self: GPUTarget("cuda", capability, 32)
    launcher_cls = lambda self, source, metadata: lambda *args: launched.append((args[4], args[:4], args[9:]))


big, spans = 1 << 46, [0, 0] * 15 + [(1 << 46) + 3, 7]
for capability in (80, 90):
    launched = []
    driver.set_active(Driver())
    functions = (kernels._sum_blocks, kernels._hash_leaves)
    for function in functions:
        function.device_caches.clear()
    launchers = kernels.Launchers()
    for first in (1, 16, big):  # of which Triton would make three variants
        launchers.sum_blocks(5, 77, big, first, *spans)
        launchers.hash_leaves(6, 77, big, first, 9)
    for function in functions:
        (compiled,) = function.device_caches[0][0].values()
        assert compiled.asm["cubin"] and "ld.global" in compiled.asm["ptx"], capability
    assert "ld.global.v2" in next(iter(functions[0].device_caches[0][0].values())).asm["ptx"]  # of aligned spans
    for first, pair in zip((1, 16, big), zip(launched[::2], launched[1::2], strict=True), strict=True):
        assert pair == (
            ("_sum_blocks", (5, 1, 1, 77), (big, first, *spans)), ("_hash_leaves", (6, 1, 1, 77), (big, first, 9))
        )
    print("compiled for", capability)
"""  # noqa: E501  # a text


@pytest.mark.slow
def test_the_kernels_compile_once_for_gpus_that_are_not_there(tmp_path):
    pytest.importorskip("triton", reason=NEEDS_TRITON)
    output = run_python("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path))
    assert output.splitlines() == ["compiled for 80", "compiled for 90"]


def test_a_method_gives_the_bits_of_the_host_and_one_that_does_not_is_found():
    device = LateDevice()
    device_cases.check(device, 60, largest=5 * 256 * 1024, seed=7)
    assert disagreement(device, device_cases.HOST) == ""
    device.collect = lambda launched: [1] * 4
    said = "a late device gave different bits from the host for 263173 bytes at 0"
    assert disagreement(device, device_cases.HOST) == said


def test_a_thread_that_comes_into_another_one_s_launch_waits_for_it():
    device, has_begun, may_go_on = LateDevice(), threading.Event(), threading.Event()
    launch = device.launch

    def held(*work: Any) -> Any:
        has_begun.set()
        assert may_go_on.wait(30)
        return launch(*work)

    device.launch = held
    queue, value = DigestQueue(device), filled(1)
    add(queue, value)

    def write() -> None:
        queue.before_write(value.untyped_storage())
        value.zero_()

    with ThreadPoolExecutor(2) as threads:
        launching = threads.submit(queue.flush)
        assert has_begun.wait(30)
        writing = threads.submit(write)
        with pytest.raises(TimeoutError):
            writing.result(0.2)
        may_go_on.set()
        launching.result(30)
        writing.result(30)
    assert queue.finish() == digests(1)


@pytest.mark.parametrize(
    ("is_interpreted", "error", "reason"),
    [
        (
            False,
            AssertionError("libcuda.so cannot found!"),
            "AssertionError: libcuda.so cannot found!",
        ),
        (False, AttributeError("no such name"), "AttributeError: no such name"),
        (True, None, "TRITON_INTERPRET is set"),
        (None, None, "ModuleNotFoundError"),
    ],
)
def test_without_triton_or_with_an_odd_one_each_tensor_is_copied_and_it_says_why(
    is_interpreted, error, reason, monkeypatch
):
    name = "det_callbacks.digest.triton_kernels"
    if is_interpreted is None:
        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.delitem(sys.modules, name, raising=False)
    else:
        launchers = mock.Mock(side_effect=error)
        kernels = late_kernels(
            IS_INTERPRETED=is_interpreted, TritonError=ValueError, Launchers=launchers
        )
        monkeypatch.setattr(triton_digest.TritonDigest, "stream", lambda _: None)
        monkeypatch.setitem(sys.modules, name, kernels)
    said = str(device_choice.__wrapped__(torch.device("cuda", 0)))
    assert said.startswith(f"a copy to the host; no Triton: {reason}")
    assert str(device_choice(torch.device("mps", 0))) == "a copy to the host"


def test_what_is_tried_on_a_device_is_none_of_the_program_s_ops(monkeypatch):
    def choice(_device: torch.device) -> Choice:
        torch.ones(2)
        return Choice(method=LateDevice())

    monkeypatch.setattr(deferred, "device_choice", choice)
    value = torch.arange(4.0)
    with CountingDispatch() as mode:
        assert DeferredDigests().computes_on(value.device)
    assert mode.seen == []


def test_a_device_is_given_no_dtype_to_copy_that_it_has_no_op_for(monkeypatch):
    """CUDA copies a tensor of whole memory as bytes, and others by an op of
    the dtype (torch 2.13).
    """
    value = torch.arange(24, dtype=torch.uint8).view(torch.uint3).view(4, 6)
    parts = [value, value.t(), value[:, ::2], value[:1].expand(3, 6)]
    expected, copied, real = [digest_tensor(part) for part in parts], [], torch.Tensor.cpu
    monkeypatch.setattr(
        torch.Tensor, "cpu", lambda tensor: copied.append(tensor.dtype) or real(tensor)
    )
    with late_device():
        assert [digest_tensor(part) for part in parts] == expected
    assert copied == [torch.uint8] * 4
