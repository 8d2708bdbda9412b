"""Late digests where several threads, Ctrl-C, other patches, and memory of two devices come in between."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from late_device import LateDevice, doubles_are_late, late_device
from torch import library
from tracing import site_of, traced

from det_callbacks.digest import digest_tensor
from det_callbacks.errors import TraceError
from det_callbacks.runs.program import IN_FLIGHT
from det_callbacks.trace import named_tensors, storages
from det_callbacks.trace.hash_mode import HashMode
from det_callbacks.trace.late_sites import LateSites
from det_callbacks.trace.layouts import LayoutSlot
from det_callbacks.trace.named_tensors import NameTable
from det_callbacks.trace.storages import StorageLedger


@pytest.fixture
def device() -> Iterator[LateDevice]:
    with late_device() as device:
        yield device


class Meeting:
    """An op that runs until another thread's op has been recorded, or half a second long."""

    started, other_has_run = threading.Event(), threading.Event()


@library.custom_op("det_tests::meets", mutates_args=())
def meets(x: torch.Tensor) -> torch.Tensor:
    Meeting.started.set()
    Meeting.other_has_run.wait(0.5)
    return x + 1


def test_ops_of_two_threads_keep_their_own_digests() -> None:
    def other_thread(mode: HashMode, y: torch.Tensor) -> None:
        Meeting.started.wait()
        assert mode._interceptor is not None
        mode._interceptor.__torch_dispatch__(torch.ops.aten.exp.default, (), (y,))
        Meeting.other_has_run.set()

    x, y = torch.arange(3.0), torch.arange(4.0)
    mode = HashMode()
    with mode:
        thread = threading.Thread(target=other_thread, args=(mode, y))
        thread.start()
        out = meets(x)
        thread.join()
    trace = mode.trace
    assert trace is not None
    found = {site.op or site.role: int(digest) for site, digest in zip(trace.program.sites, trace.digests, strict=True)}
    assert found["det_tests.meets.default"] == digest_tensor(out)
    assert found["aten.exp.default"] == digest_tensor(y.exp())
    inputs = [trace.digests[place] for place in site_of(trace, "exp.default").inputs]
    assert inputs == [digest_tensor(y)]


@pytest.mark.parametrize("kind", [StorageLedger, NameTable])
def test_an_address_is_let_go_once_also_after_ctrl_c(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.ones(index + 1) for index in range(3)]
    held: Any = kind()
    if isinstance(held, StorageLedger):
        module: Any = storages
        for tensor in tensors:
            held.pin(tensor)
    else:
        module = named_tensors
        held.keep({(0, 0): "x"}, [("x", tensor) for tensor in tensors])
    freed = []

    def free(address: int) -> None:
        freed.append(address)
        original(address)
        if len(freed) == 2:
            raise KeyboardInterrupt

    original = module._free_weak_ref
    monkeypatch.setattr(module, "_free_weak_ref", free)
    with pytest.raises(KeyboardInterrupt):
        held.close()
    held.close()
    assert len(set(freed)) == len(freed) == 2


def test_memory_of_the_host_that_a_device_still_copies_into_is_not_read_for_a_copy_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)

    def body() -> None:
        source = torch.ones(3, dtype=torch.float64)
        offloaded = source.to(torch.float32, non_blocking=True)
        several = [torch.empty(2), torch.empty(2)]
        torch._foreach_copy_(several, [torch.ones(2, dtype=torch.float64)] * 2, non_blocking=True)
        for value in (offloaded, *several):
            torch.empty(value.shape, dtype=torch.float64).copy_(value, non_blocking=True)
        assert waited == []
        offloaded.exp()

    with doubles_are_late():
        trace = traced(body)
    assert waited == [torch.device("cpu")]
    for number in range(3):
        (place,) = site_of(trace, "copy_.default", number).inputs
        entry = trace.layout.entries[place]
        assert entry is not None
        assert entry.detail == IN_FLIGHT
        assert trace.digests[place] == 0
    (read,) = site_of(trace, "exp.default").inputs  # the host reads what it has waited for
    assert trace.digests[read] == digest_tensor(torch.ones(3))


def test_a_step_that_goes_on_after_recording_an_op_failed_is_refused(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = LateSites.digest

    def running_out(sites: LateSites, position: int, tensor: torch.Tensor, slot: LayoutSlot) -> int:
        if tensor.numel() == 7:
            raise torch.OutOfMemoryError("out of memory")
        return digest(sites, position, tensor, slot)

    monkeypatch.setattr(LateSites, "digest", running_out)
    mode = HashMode()
    mode.begin()
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(7)
    torch.ones(3).exp()
    with pytest.raises(TraceError, match="sites and"):
        mode.finish()
    with mode:
        torch.ones(3).exp()
