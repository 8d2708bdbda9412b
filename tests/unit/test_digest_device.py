"""Digests that are computed where a tensor is: the bits of the host, other threads, and which way is taken."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import device_cases
import pytest
import torch
from late_kernels import late_kernels
from test_digest_queue import LateDevice
from test_digest_unobserved import CountingDispatch

from det_callbacks.digest import digest_tensor
from det_callbacks.digest.device import deferred, triton_digest
from det_callbacks.digest.device.deferred import DeferredDigests, DigestQueue
from det_callbacks.digest.device.triton_digest import Choice, device_choice, disagreement

NEEDS_TRITON = "needs Triton, which the dev extra brings on Linux"

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")  # torch's, of a dtype


def run_python(*arguments: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "num_cases",
    [pytest.param(24, marks=pytest.mark.slow), pytest.param(300, marks=pytest.mark.soak)],
    ids=lambda number: f"{number} cases",
)
def test_triton_in_its_interpreter_gives_the_bits_of_the_host(num_cases: int) -> None:
    pytest.importorskip("triton", reason=NEEDS_TRITON)
    output = run_python(str(Path(device_cases.__file__)), str(num_cases), TRITON_INTERPRET="1")
    assert f"{num_cases} cases agree" in output


COMPILE = """
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from det_callbacks.digest.device import triton_kernels as kernels


class Driver:
    # what Triton asks of a GPU's driver: this one compiles for a GPU and notes the launches
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 200_000},
        load_binary=lambda name, kernel, shared, device: (object(), name, 40, 0, 1024),
    )
    is_compiled = False

    def get_current_device(self):
        assert not self.is_compiled, "looked up in a launch"
        return 0

    get_current_stream = lambda self, device: self.get_current_device()
    get_current_target = lambda self: GPUTarget("cuda", capability, 32)
    launcher_cls = lambda self, source, metadata: lambda *args: launched.append((args[4], args[:4], args[9:]))


functions = {"sum_blocks": kernels._sum_blocks, "hash_leaves": kernels._hash_leaves}
big = 1 << 46
spans = [0, 0] * 14 + [big + 3, 7]
for capability in (80, 90):
    launched = []
    driver.set_active(Driver())
    for function in functions.values():
        function.device_caches.clear()
    launchers = kernels.Launchers()
    for function in functions.values():
        for compiled in function.device_caches[0][0].values():
            compiled._init_handles()
    driver.active.is_compiled = True
    for sums, first in ((big, 16), (big + 16, 1), (16, big)):
        launchers.sum_blocks(5, 77, big, sums, first, 1, *spans, 0, first)
        launchers.hash_leaves(6, 77, big, sums, first)
    for name, function in functions.items():
        (compiled,) = function.device_caches[0][0].values()
        assert compiled.asm["cubin"] and "ld.global" in compiled.asm["ptx"], (name, capability)
        # aligned spans are read 16 bytes at a time
        assert name != "sum_blocks" or "ld.global.v2" in compiled.asm["ptx"]
    assert [name for name, _, _ in launched] == [f"_{name}" for name in functions] * 3
    assert [grid for _, grid, _ in launched] == [(5, 1, 1, 77), (6, 1, 1, 77)] * 3
    assert [launched[index][2] for index in (0, 1, 4)] == [
        (big, big, 16, 1, *spans, 0, 16), (big, big, 16), (big, 16, big, 1, *spans, 0, big)
    ]
    print("compiled for", capability)
"""


@pytest.mark.slow
def test_the_kernels_compile_once_for_gpus_that_are_not_there(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason=NEEDS_TRITON)
    output = run_python("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path))
    assert output.splitlines() == ["compiled for 80", "compiled for 90"]


def test_a_method_gives_the_bits_of_the_host_and_one_that_does_not_is_found() -> None:
    device = LateDevice()
    device_cases.check(device, 60, largest=5 * 256 * 1024, seed=7)
    assert disagreement(device, device_cases.HOST) == ""
    device.collect = lambda launched: [1] * 4
    said = "a late device gave other bits than the host for 263173 bytes at 0"
    assert disagreement(device, device_cases.HOST) == said


@pytest.mark.parametrize("does_write", [True, False], ids=["writes", "adds"])
def test_a_thread_that_comes_into_another_one_s_launch_waits_for_it(does_write: bool) -> None:
    device, has_begun, may_go_on = LateDevice(), threading.Event(), threading.Event()
    launch = device.launch

    def held(*work: Any) -> Any:
        has_begun.set()
        assert may_go_on.wait(30)
        return launch(*work)

    device.launch = held
    queue = DigestQueue(device)
    value, other = torch.arange(8.0), torch.arange(3.0)
    expected = [digest_tensor(value)] + [digest_tensor(other)] * (not does_write)
    queue.add(value.untyped_storage(), 0, value.nbytes)

    def come() -> None:
        if does_write:
            queue.before_write(value.untyped_storage())
            value.zero_()
        else:
            queue.add(other.untyped_storage(), 0, other.nbytes)

    with ThreadPoolExecutor(2) as threads:
        launching = threads.submit(queue.flush)
        assert has_begun.wait(30)
        coming = threads.submit(come)
        with pytest.raises(TimeoutError):
            coming.result(0.2)
        may_go_on.set()
        launching.result(30)
        coming.result(30)
    assert queue.finish() == expected


@pytest.mark.parametrize(
    ("is_interpreted", "error", "reason"),
    [
        (False, AssertionError("libcuda.so cannot found!"), "AssertionError: libcuda.so cannot found!"),
        (False, AttributeError("no such name"), "AttributeError: no such name"),
        (True, None, "TRITON_INTERPRET is set"),
        (None, None, "ModuleNotFoundError"),
    ],
)
def test_without_triton_or_with_an_odd_one_each_tensor_is_copied_and_it_says_why(
    is_interpreted: bool | None, error: Exception | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "det_callbacks.digest.device.triton_kernels"
    if is_interpreted is None:
        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.delitem(sys.modules, name, raising=False)
    else:
        kernels = late_kernels()
        kernels.IS_INTERPRETED, kernels.TritonError = is_interpreted, ValueError
        kernels.Launchers = mock.Mock(side_effect=error)
        monkeypatch.setattr(triton_digest.TritonDigest, "stream", lambda _: None)
        monkeypatch.setitem(sys.modules, name, kernels)
    said = str(device_choice.__wrapped__(torch.device("cuda", 0)))
    assert said.startswith(f"a copy to the host; no Triton: {reason}")
    assert str(device_choice(torch.device("mps", 0))) == "a copy to the host"


def test_what_is_tried_on_a_device_is_none_of_the_program_s_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    def choice(_device: torch.device) -> Choice:
        torch.ones(2)
        return Choice(method=LateDevice())

    monkeypatch.setattr(deferred, "device_choice", choice)
    value = torch.arange(4.0)
    with CountingDispatch() as mode:
        assert DeferredDigests().computes_on(value.device)
    assert mode.seen == []


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
    with device_cases.as_on_a_device(LateDevice()):
        assert [digest_tensor(part) for part in parts] == expected
