"""Sites whose digests are known at the step's end only: the same trace as on the host,
and nothing waits before.
"""

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from late_device import LateDevice, as_in_a_step, doubles_are_late, late_device, overwrite_unseen
from op_programs import PROGRAMS
from torch import library, nn
from tracing import assert_same, position_of, site_of, traced

from det_callbacks import ObserverContext, enable_hash_mode, observe
from det_callbacks.digest.components import digest_tensor
from det_callbacks.errors import TraceError
from det_callbacks.runs.program import IN_FLIGHT
from det_callbacks.runs.steps import StepTrace
from det_callbacks.runs.store import Run
from det_callbacks.trace.deferred_sites import DeferredSites
from det_callbacks.trace.hash_mode import HashMode

EVERY_DAY = ("in_place", "embeddings", "attention_and_losses", "sparse_quantised_and_complex")


@pytest.fixture
def device() -> Iterator[LateDevice]:
    with late_device() as device:
        yield device


# of ops that torch calls beta or deprecated: the programs are not about them
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in EVERY_DAY else pytest.mark.slow) for name in PROGRAMS],
)
def test_ops_are_traced_as_on_the_host(name):
    torch.manual_seed(0)
    on_host = traced(PROGRAMS[name])
    torch.manual_seed(0)
    with late_device() as device:
        assert_same(on_host, traced(as_in_a_step(device)(PROGRAMS[name])))
    assert (device.waits, device.num_collected) == ([], 1)


class Written(nn.Module):
    """Writes its batch and its outputs in place, where nobody sees it at the levels below op."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return self.second(self.first(x).relu_())


@pytest.mark.parametrize("level", ["op", "module", "state"])
def test_a_training_step_is_the_same_at_every_level(level):
    def train(device: LateDevice) -> Iterator[tuple[StepTrace, Any]]:
        torch.manual_seed(1)
        model = Written()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
        mode = HashMode(model, level=level)
        for step in range(3):
            batch = [torch.randint(0, 3, (5,)), torch.randn(5, 2).t(), torch.randn(5, 6)]
            mode.begin(batch=batch, is_first=step == 0)
            with as_in_a_step(device):
                loss = nn.functional.cross_entropy(model(batch[2]), batch[0])
                mode.record_values("forward", loss, "loss")
                optimizer.zero_grad(set_to_none=False)
                loss.backward()
                loss.detach().zero_()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                mode.finish()
            yield mode.trace, mode.sketch

    on_host = list(train(LateDevice()))
    with late_device() as device:
        late = list(train(device))
    assert (device.waits, device.num_collected) == ([], 3)
    for (one, sketch), (other, late_sketch) in zip(on_host, late, strict=True):
        assert_same(one, other)
        assert (sketch, len(sketch)) == (late_sketch, 5)


@pytest.mark.parametrize("place", [nullcontext, late_device])
def test_an_op_that_raises_leaves_its_sites_out_and_the_step_goes_on(place):
    outside, rows = torch.ones(3, 3), torch.ones(4, 2)

    def body(is_raising: bool) -> None:
        x = torch.ones(2, 2).exp()
        for other in (outside, rows[:3]):
            if is_raising:
                with pytest.raises(RuntimeError):
                    torch.mm(x, other)
        x[0, 0].item()  # a number, at the place that the input of mm had
        outside.sum()
        rows[:3].sum()

    with place():
        assert_same(traced(lambda: body(True)), traced(lambda: body(False)))


def test_memory_that_fsdp_frees_was_read_before(device):
    # torch 2.11 and 2.12 have the latter only
    gather = getattr(
        torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor
    )

    def step(is_freed: bool) -> StepTrace:
        gathered, outside = torch.empty(6), torch.ones(6)

        def body() -> None:
            gather(gathered, torch.full((6,), 3.0))
            written = torch.empty(6)
            results = [gathered * 2, outside * 2, written.copy_(gathered) * 2]
            for tensor in (gathered, outside, written):
                if is_freed:
                    tensor.untyped_storage().resize_(0)
            torch.stack(results)

        return traced(body)

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        assert_same(step(True), step(False))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "do",
    [
        lambda mode, x: setattr(mode.recorder, "phase", "optimizer"),
        lambda mode, x: x.resize_(2),
        lambda mode, x: torch.ops._c10d_functional.wait_tensor(x),
    ],
    ids=["another phase", "another extent", "a collective"],
)
def test_what_waits_is_launched_before_what_nobody_sees_through(device, do):
    mode = HashMode()
    mode.begin()
    x = torch.ones(3).exp()
    assert device.num_launched == []
    do(mode, x)
    assert sum(device.num_launched) == 2
    overwrite_unseen(x)
    trace = mode.finish()
    assert int(trace.digests[position_of(trace, "exp.default")]) == digest_tensor(
        torch.ones(3).exp()
    )


# where no dispatch mode sees what writes memory, it is launched at once


def of_observation_and_region(folder: Path) -> list[int]:
    with ObserverContext(folder, "run"):
        observe("x", x := torch.ones(4))
        x.add_(1)
        with enable_hash_mode():
            x = torch.ones(4)
        x.add_(1)
    return Run.open(folder / "run").view(0, 0, 0).record.digests.tolist()


def of_left_out(_: Path) -> list[int]:
    with HashMode() as mode:
        x = torch.ones(4)
        mode.leaves_out(lambda: x.add_(1))()
    return mode.trace.digests.tolist()


@pytest.mark.parametrize("run", [of_observation_and_region, of_left_out])
def test_what_is_written_unseen_is_read_before(tmp_path, run):
    on_host = run(tmp_path / "host")
    with late_device() as device:
        assert run(tmp_path / "late") == on_host
    assert device.num_launched


# several threads, Ctrl-C, other patches, and memory of two devices


has_started, other_has_run = threading.Event(), threading.Event()


@library.custom_op("det_tests::meets", mutates_args=())
def meets(x: torch.Tensor) -> torch.Tensor:
    has_started.set()
    other_has_run.wait(0.5)
    return x + 1


def test_ops_of_two_threads_keep_their_own_digests():
    x, y = torch.arange(3.0), torch.arange(4.0)
    mode = HashMode()

    def other_thread() -> None:
        has_started.wait()
        mode._listener.mode.__torch_dispatch__(torch.ops.aten.exp.default, (), (y,))
        other_has_run.set()

    with mode:
        thread = threading.Thread(target=other_thread)
        thread.start()
        out = meets(x)
        thread.join()
    sites, digests = mode.trace.program.sites, mode.trace.digests.tolist()
    found = {site.op: digest for site, digest in zip(sites, digests, strict=True)}
    assert found["det_tests.meets.default"] == digest_tensor(out)
    assert found["aten.exp.default"] == digest_tensor(y.exp())
    assert [digests[place] for place in site_of(mode.trace, "exp.default").inputs] == [
        digest_tensor(y)
    ]


def test_memory_of_the_host_that_a_device_may_still_copy_into_is_not_read(monkeypatch):
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
    readers = [
        *(site_of(trace, "copy_.default", number) for number in range(3)),
        site_of(trace, "exp.default"),
    ]
    for (place,) in (reader.inputs for reader in readers):
        assert (trace.layout.entries[place].detail, trace.digests[place]) == (IN_FLIGHT, 0)


def test_a_step_that_goes_on_after_recording_an_op_failed_is_refused(device, monkeypatch):
    digest = DeferredSites.digest

    def running_out(sites: DeferredSites, position: int, tensor: torch.Tensor, slot: Any) -> int:
        if tensor.numel() == 7:
            raise torch.OutOfMemoryError("out of memory")
        return digest(sites, position, tensor, slot)

    monkeypatch.setattr(DeferredSites, "digest", running_out)
    mode = HashMode()
    mode.begin()
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(7)
    torch.ones(3).exp()
    with pytest.raises(TraceError, match="sites and"):
        mode.finish()
    with mode:
        torch.ones(3).exp()
