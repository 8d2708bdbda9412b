"""CUDA graphs in a step: a capture is left alone, and what a replay may have written is unknown."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from compiling import COMPILING, FOLLOWER, backend_of, difference
from host_graphs import HostGraph, capture, host_graphs
from late_device import as_in_a_step, late_device
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from tracing import assert_same, position_of, site_of, step_of, traced, with_role

from det_callbacks.digest.components import digest_tensor
from det_callbacks.errors import CoverageWarning
from det_callbacks.observers.observations import Observations
from det_callbacks.runs.selection import Selection
from det_callbacks.trace.compiled import graphs as compiled_graphs
from det_callbacks.trace.compiled.replaced import REPLACED
from det_callbacks.trace.hash_mode import HashMode
from det_callbacks.trace.recorder import Recorder
from det_callbacks.trace.storages import StorageWriters

pytestmark = COMPILING
OF_TORCH = torch.cuda.graphs._CUDAGraph


@pytest.fixture(autouse=True)
def _graphs(compiles_anew: None) -> Iterator[None]:
    REPLACED.unfollow(FOLLOWER)  # so that each step puts its own in place
    with host_graphs():
        yield


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a build of torch with CUDA")
@pytest.mark.parametrize("method", ["capture_begin", "replay"])
def test_graphs_of_torch_call_the_methods_that_are_replaced(method, monkeypatch):
    # without the initialisation, which needs a device
    graph = torch.cuda.CUDAGraph.__new__(torch.cuda.CUDAGraph)
    assert method in vars(OF_TORCH)
    monkeypatch.setattr(OF_TORCH, method, Mock(side_effect=KeyError("called")))
    # precedes a first replay from torch 2.14 on
    monkeypatch.setattr(torch.cuda.CUDAGraph, "instantiate", Mock())
    with pytest.raises(KeyError, match="called"):
        getattr(graph, method)()


def test_what_a_replay_may_have_written_is_digested_anew():
    static = torch.zeros(3)
    graph = HostGraph(lambda: static.mul_(2))

    def body(*, is_replayed: bool = True) -> None:
        static.copy_(torch.ones(3))
        if is_replayed:
            graph.replay()
        static.exp()

    trace = traced(body)
    (left,) = with_role(trace, "graph_output")
    sites = trace.program.sites
    assert (left.op, left.name, left.inputs) == ("", None, ())
    assert int(trace.digests[sites.index(left)]) == digest_tensor(torch.full((3,), 2.0))
    assert site_of(trace, "exp.default").inputs == (sites.index(left),)
    assert (trace.program.opaque_regions, trace.program.ops_skipped["replayed"]) == (
        ("cuda_graph",),
        1,
    )
    assert_same(trace, traced(body))
    without = traced(lambda: body(is_replayed=False))
    assert {one.kind for one in difference(trace, without).divergences} == {"missing", "content"}
    mode = HashMode()
    steps = [
        step_of(mode, lambda number=number: [graph.replay() for _ in range(number)])
        for number in (0, 2, 1)
    ]
    counts = [step.program.ops_skipped.get("replayed", 0) for step in steps]
    assert counts == [0, 2, 1], "also where nothing is read afterwards"


def test_what_waits_is_digested_before_a_replay_writes_it():
    made: list[Tensor] = []
    graph = HostGraph(lambda: made[0].add_(5))
    with late_device():
        trace = traced(lambda: [made.append(torch.zeros(3).exp()), graph.replay()])
    assert int(trace.digests[position_of(trace, "exp.default")]) == digest_tensor(torch.ones(3))
    assert made[0].sum() == 18


def test_what_a_collective_has_yet_to_bring_is_not_lost():
    ledger = StorageWriters()
    tensor = torch.zeros(4)
    ledger.write(tensor, 3)
    ledger.deliver(tensor[:2], 0)
    ledger.invalidate()
    assert [at for _, at in ledger.writers[tensor.untyped_storage()._cdata].writes] == [-2]
    ledger.close()


# captures


def test_a_capture_is_left_alone():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    static = torch.ones(2, 3)
    mode = HashMode(model)
    with late_device() as device, as_in_a_step(device):
        mode.begin(batch=static)
        pending = static * 2
        num_launched = sum(device.num_launched)
        with capture():
            before = (list(device.num_launched), mode.recorder.num_sites)
            optimizer.zero_grad()
            loss = model(static).sum()
            loss.backward()
            optimizer.step()
            mode.record_values("forward", loss, "loss")
            assert (list(device.num_launched), mode.recorder.num_sites) == before
        assert sum(before[0]) > num_launched, "what waited was launched before the capture"
        after = pending + 1
        trace = mode.finish()
    assert device.waits == []
    assert trace.program.ops_skipped["captured"] > 20
    assert int(trace.digests[position_of(trace, "mul.Tensor")]) == digest_tensor(
        torch.full((2, 3), 2.0)
    )
    assert after.sum() == 18


def test_what_is_observed_in_a_capture_is_said_to_be_left_out():
    recorder = Recorder(Selection())
    observations = Observations(recorder, owner="a test")
    recorder.begin()
    observations.begin()
    with (
        pytest.warns(CoverageWarning, match="'x' was observed during the capture of a CUDA graph"),
        capture(),
    ):
        observations.observe("x", [("x", torch.ones(2))])
    observations.observe("y", [("y", torch.ones(2))])
    observations.end()
    trace = recorder.finish()
    assert [site.name for site in trace.program.sites] == ["y"]
    assert trace.program.ops_skipped["captured"] == 1


# compiled regions that run as CUDA graphs


def test_a_region_that_runs_as_a_cuda_graph_has_the_same_rows_in_each_step(monkeypatch):
    monkeypatch.setattr(compiled_graphs, "_runs_as_cuda_graph", lambda *_: True)
    kept, out = torch.ones(3), torch.zeros(3)
    graph = HostGraph(lambda: out.copy_(kept.mul_(3)))
    runs: list[int] = []

    def run(_: Any, x: Tensor) -> Any:
        runs.append(1)
        if len(runs) == 1:  # warms up
            return (x.exp(),)
        if len(runs) == 2:
            with capture():
                x.exp()
        graph.replay()
        return (out,)

    compiled = torch.compile(lambda x: x + 1, backend=backend_of(run))
    mode = HashMode()

    def body() -> None:
        x = torch.ones(3)
        compiled(x)
        x.sin()

    with torch.no_grad(), late_device() as device:
        traces = [step_of(mode, body) for _ in range(3)]
    assert len({trace.program.id for trace in traces}) == 1
    assert "aten.exp.default" not in {site.op for site in traces[0].program.sites}
    assert not with_role(traces[2], "graph_output")
    assert "captured" in traces[0].program.ops_skipped, "warming up"
    assert device.num_skipped, "the allocator is told nothing of what the region gave"


@pytest.mark.parametrize(
    ("mode", "device", "is_graphed"),
    [
        ("reduce-overhead", "cuda", True),
        ("default", "cuda", False),
        ("reduce-overhead", "cpu", False),
    ],
)
def test_whether_inductor_makes_a_cuda_graph(mode, device, is_graphed):
    compiler = torch._TorchCompileInductorWrapper(mode, None, False)
    with FakeTensorMode():
        inputs = [2, torch.empty(1, device=device)]
    assert compiled_graphs._runs_as_cuda_graph(compiler, "inductor", inputs) is is_graphed
