"""Saving tensors and putting them back on a device that yields at the step's end: nothing waits, nothing is lost."""

import gc
import weakref
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from late_device import LateDevice, LateTransfers, as_in_a_step, in_every_step, late_device
from replay_cases import LAYOUTS, OF_ANY_KIND, OTHERS, of_bytes, of_kind, reader, saver
from torch import Tensor

from det_callbacks import HashMode
from det_callbacks.digest import digest_tensor
from det_callbacks.errors import ReplayError, TraceError
from det_callbacks.replay import OpReplayer, OpSaver, ReplayCounts, replay, replay_apart
from det_callbacks.runs.steps import StepTrace
from det_callbacks.trace.late_sites import LateSites
from det_callbacks.trace.ledger import Ledger

NO_DIGESTS = array("Q")


def sites() -> LateSites:
    return LateSites()


def settle(late: LateSites, device: LateDevice) -> None:
    """End the step."""
    assert device.waits == []
    late.settle(NO_DIGESTS)


@pytest.fixture
def device() -> Iterator[LateDevice]:
    with late_device() as device:
        yield device


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")  # torch's, of a dtype in the draw
@settings(max_examples=80, deadline=None)
@OF_ANY_KIND
def test_any_bits_come_back_without_a_wait(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    layout: str,
    lazy: str,
    seed: int,
) -> None:
    folder, late, counts = tmp_path_factory.mktemp("late"), sites(), ReplayCounts()
    original, live, other = (of_kind(dtype, shape, layout, lazy, seed + more) for more in (0, 1, 2))
    wanted, differed = digest_tensor(original), digest_tensor(original) != digest_tensor(live)
    stride, version, address = live.stride(), live._version, live.data_ptr()
    with late_device() as device:
        kept = saver(folder)
        with as_in_a_step(device):
            memory = bytes(original.untyped_storage())
            kept.keep("key", original, late=late)
            assert bytes(original.untyped_storage()) == memory
            original.untyped_storage().fill_(0x5A)  # later in the step
        settle(late, device)
        kept.write(12)
        saved = reader(folder).take("key", like=live)
        with as_in_a_step(device):
            replay(saved, live, late=late, counts=counts, op="op")
            new = replay_apart(saved, other, late=late, counts=ReplayCounts(), op="op", has_history=False)
        assert counts.to_dict() == {}, "it is not known yet"
        settle(late, device)
    assert saved.digest == wanted
    assert digest_tensor(live) == wanted
    assert new is not None
    assert digest_tensor(new) == wanted
    assert (live.stride(), live._version, live.data_ptr()) == (stride, version, address)
    assert counts.to_dict()["op"]["differing"] == differed


@pytest.mark.filterwarnings("ignore:Sparse")  # torch calls sparse layouts beta
@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")  # torch calls nested tensors a prototype
@pytest.mark.filterwarnings("ignore:.*[Qq]uantiz.*")  # torch deprecates quantised tensors, and has them
@pytest.mark.parametrize("kind", sorted(OTHERS))
def test_other_layouts_come_back_without_a_wait(tmp_path: Path, device: LateDevice, kind: str) -> None:
    original, live = OTHERS[kind](), OTHERS[kind]()
    wanted, late, counts = digest_tensor(original), sites(), ReplayCounts()
    device.waits.clear()
    kept = saver(tmp_path)
    with as_in_a_step(device):
        kept.keep("key", original, late=late)
    settle(late, device)
    kept.write(12)
    saved = reader(tmp_path).take("key", like=live)
    assert saved.digest == wanted
    with as_in_a_step(device):
        replay(saved, live, late=late, counts=counts, op="op")
    settle(late, device)
    assert digest_tensor(live) == wanted


def test_elements_that_share_memory_are_told_apart_on_the_host(tmp_path: Path, device: LateDevice) -> None:
    late, counts = sites(), ReplayCounts()
    kept = saver(tmp_path)
    kept.keep("differ", torch.arange(6.0).reshape(2, 3), late=late)
    kept.keep("windows differ", torch.arange(4.0).reshape(2, 2), late=late)
    kept.keep("windows", torch.tensor([[1.0, 2.0], [2.0, 3.0]]), late=late)
    settle(late, device)
    kept.write(12)
    step, expanded, base = reader(tmp_path), torch.zeros(3).expand(2, 3), torch.zeros(9)
    windows, apart = base[:3].as_strided((2, 2), (1, 1)), base[4:].as_strided((2, 2), (2, 2))
    with as_in_a_step(device):
        for key, live in (("differ", expanded), ("windows differ", windows)):
            with pytest.raises(ReplayError, match="share memory"):
                replay(step.take(key, like=live), live, late=late, counts=counts, op="op")
        saved = step.take("windows", like=windows)
        for live in (windows, apart):
            replay(saved, live, late=late, counts=counts, op="op")
    settle(late, device)
    assert base.tolist() == [1.0, 2.0, 3.0, 0.0, 1.0, 0.0, 2.0, 0.0, 3.0], "what lies between is not written"
    assert expanded.tolist() == [[0.0] * 3] * 2
    assert counts.to_dict()["op"]["count"] == 2


def test_without_the_end_of_a_step_nothing_is_written_counted_or_held(tmp_path: Path, device: LateDevice) -> None:
    late, counts, tensor = sites(), ReplayCounts(), torch.ones(3)
    kept = saver(tmp_path)
    kept.keep("key", tensor, late=late, counts=counts)
    with pytest.raises(TraceError, match="before its step came to its end"):
        kept.write(12)
    kept.keep("more", tensor, late=late, counts=counts)
    gone = weakref.ref(tensor.untyped_storage())
    late.discard()
    with pytest.raises(TraceError, match="before its step"):
        kept.write(12)
    assert not kept.folder.exists()
    kept.clear()
    transfers = late._digests._transfers
    assert isinstance(transfers, LateTransfers)
    assert transfers.num_held == 0
    late.settle(NO_DIGESTS)
    del tensor
    gc.collect()
    assert gone() is None
    assert counts.to_dict() == {}


def step_of(exchange: OpSaver | OpReplayer, device: LateDevice, noise: Tensor) -> StepTrace:
    mode = HashMode()
    mode.recorder.exchange = exchange
    with in_every_step(device), mode:
        hidden = torch.zeros(3) + noise
        hidden.add_(noise).mul_(2)  # each overwrites what was put back into the one before
    assert mode.trace is not None
    return mode.trace


def test_a_step_is_recorded_and_verified_without_a_wait(tmp_path: Path, device: LateDevice) -> None:
    kept = saver(tmp_path)
    saving, replaying = OpSaver(["aten.add*", "aten.mul_*"], kept), OpReplayer(["aten.add*", "aten.mul_*"])
    recorded = step_of(saving, device, torch.ones(3))
    kept.write(12)
    assert saving.counts.to_dict()["aten.add_.Tensor"]["count"] == 1
    for noise, num_differing in ((torch.ones(3), 0), (torch.full((3,), 5.0), 1)):
        replaying.begin(reader(tmp_path))
        before = {op: count["differing"] for op, count in replaying.counts.to_dict().items()}
        verified = step_of(replaying, device, noise)
        assert [site.op for site in verified.program.sites] == [site.op for site in recorded.program.sites]
        outputs = [at for at, site in enumerate(recorded.program.sites) if site.op.startswith(("aten.add", "aten.mul"))]
        assert len(outputs) == 3
        assert [verified.digests[at] for at in outputs] == [recorded.digests[at] for at in outputs]
        after = {op: count["differing"] for op, count in replaying.counts.to_dict().items()}
        # multiplying what was put back gives what was saved
        assert {op: after[op] - before.get(op, 0) for op in after} == {
            "aten.add.Tensor": num_differing,
            "aten.add_.Tensor": num_differing,
            "aten.mul_.Tensor": 0,
        }
    assert device.waits == []
    assert device.num_watched == 3


def test_what_a_loader_gave_is_read_at_once_and_waited_for_at_the_end(device: LateDevice) -> None:
    ledger, batch = Ledger(), torch.arange(4.0)
    wanted = digest_tensor(batch)
    device.waits.clear()
    with as_in_a_step(device):
        ledger.note_tensor("batch", "batch[0] as loaded", batch)
        batch.zero_()
    assert device.waits == []
    (row,) = ledger.take(3)
    assert (row.step, row.point, row.name, row.value) == (3, "batch", "batch[0] as loaded", wanted)


def test_a_wait_is_noticed(device: LateDevice) -> None:
    with as_in_a_step(device):
        digest_tensor(torch.ones(3))
        digest_tensor(torch.ones(2**20))
    assert len(device.waits) == 2


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch says it once a process
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.bool])
def test_bits_of_a_gpu_come_back_without_a_wait(tmp_path: Path, dtype: torch.dtype, layout: str) -> None:
    late, counts, kept = sites(), ReplayCounts(), saver(tmp_path)
    device = torch.device("cuda", torch.cuda.current_device())
    assert late.computes_on(device)  # the kernels are compiled and tried here
    bases = [of_bytes(dtype, (300, 7), seed, is_finite=False).to(device) for seed in (1, 2)]
    original, live = map(LAYOUTS[layout], bases)
    if dtype.is_complex:
        original, live = original.conj(), live.conj()
    wanted = digest_tensor(original)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kept.keep("key", original, late=late)
        bases[0].zero_()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    late.settle(NO_DIGESTS)
    kept.write(12)
    saved = reader(tmp_path).take("key", like=live)
    assert saved.digest == wanted
    torch.cuda.set_sync_debug_mode("error")
    try:
        replay(saved, live, late=late, counts=counts, op="op")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    late.settle(NO_DIGESTS)
    assert digest_tensor(live) == wanted
    assert counts.to_dict()["op"]["differing"] == 1
