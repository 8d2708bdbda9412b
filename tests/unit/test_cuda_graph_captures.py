"""A capture of a CUDA graph in a step is left alone, and nothing of ours stays."""

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_graphs import HostGraphs, captured, host_graphs
from late_device import as_in_a_step, late_device
from torch import Tensor, nn
from tracing import reads_of, step_of, traced, with_role

from det_callbacks.digest import digest_tensor
from det_callbacks.errors import CoverageWarning, TraceError
from det_callbacks.observe.observations import Observations
from det_callbacks.trace import graph_watch
from det_callbacks.trace.hash_mode import HashMode
from det_callbacks.trace.recorder import Recorder
from det_callbacks.trace.selection import Selection


@pytest.fixture(name="graphs")
def _graphs() -> Iterator[HostGraphs]:
    with host_graphs() as graphs:
        yield graphs
    assert not graph_watch._WATCHERS


def methods() -> dict[str, Any]:
    base = vars(torch.cuda.graphs._CUDAGraph)
    return {name: base[name] for name in ("capture_begin", "capture_end", "replay")}


def test_a_capture_is_left_alone(graphs: HostGraphs) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    static = torch.ones(2, 3)
    mode = HashMode(model)
    seen: dict[str, Any] = {}
    with late_device() as device:

        def look(name: str) -> None:
            seen[name] = (list(device.num_launched), mode.recorder.num_sites)

        graphs.on_begin, graphs.on_end = lambda: look("begin"), lambda: look("end")

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = model(static).sum()
            loss.backward()
            optimizer.step()
            mode.record_values("forward", loss, "loss")
            return loss

        with as_in_a_step(device):
            mode.begin(batch=static)
            pending = static * 2
            num_launched = sum(device.num_launched)
            captured(step)
            after = pending + 1
        trace = mode.finish()
    assert trace is not None
    assert device.waits == []
    assert sum(seen["begin"][0]) > num_launched, "what waited was launched before the capture"
    assert seen["begin"] == seen["end"], "nothing was launched or recorded within it"
    assert trace.program.ops_skipped["captured"] > 20
    assert reads_of(trace, "add.Tensor") == ["mul.Tensor"]
    position = next(at for at, site in enumerate(trace.program.sites) if site.op == "aten.mul.Tensor")
    assert int(trace.digests[position]) == digest_tensor(torch.full((2, 3), 2.0))
    assert after.sum() == 18


def test_autograd_still_leads_back_to_the_module_of_what_was_captured(graphs: HostGraphs) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())

    def body() -> None:
        _, out = captured(lambda: model(torch.ones(2, 3)))
        out.sum().backward()

    backward = [site for site in traced(body, model).program.sites if site.phase == "backward" and site.op]
    assert {site.module for site in backward if "tanh_backward" in site.op} == {"1"}


def test_what_runs_in_another_thread_meanwhile_is_recorded(graphs: HostGraphs) -> None:
    mode = HashMode()

    def elsewhere() -> None:
        with mode._interceptor.__class__(mode.recorder):
            torch.ones(3).exp()

    def body() -> None:
        thread = threading.Thread(target=elsewhere)
        captured(lambda: (thread.start(), thread.join(), torch.ones(2).sin()))

    trace = step_of(mode, body)
    ops = [site.op for site in trace.program.sites if site.op]
    assert "aten.exp.default" in ops
    assert "aten.sin.default" not in ops


@pytest.mark.parametrize("fails", ["capture_begin", "capture_end", "body"])
def test_ops_are_recorded_again_after_a_capture_that_failed(graphs: HostGraphs, fails: str) -> None:
    def body() -> None:
        graphs.fails = fails
        graph = torch.cuda.CUDAGraph()
        with pytest.raises((RuntimeError, ZeroDivisionError)), torch.cuda.graph(graph):
            torch.ones(2).div_(1 / (fails != "body"))
        torch.ones(2).exp()

    assert "aten.exp.default" in [site.op for site in traced(body).program.sites]


def test_a_step_neither_begins_nor_ends_within_a_capture(graphs: HostGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    before = methods()
    mode = HashMode(nn.Linear(1, 1), level="module")  # at level op the stand-in's own mode would be in the way

    def begins() -> None:
        with pytest.raises(TraceError, match="cannot begin or end while a CUDA graph is being captured"):
            mode.begin()

    captured(begins)
    assert methods() == before

    def ends() -> None:
        with pytest.raises(TraceError, match="outside the capture"):
            mode.finish()

    mode.begin()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ends()
        assert methods() == before, "abandoned"
    assert with_role(step_of(mode, lambda: captured(lambda: torch.ones(1))[0].replay()), "launch")


@pytest.mark.parametrize("way", ["finish", "abandon", "raise", "raise at the beginning", "raise at the end"])
def test_methods_are_put_back(graphs: HostGraphs, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = methods()
    mode = HashMode(nn.Linear(1, 1))

    def interrupted() -> Any:
        raise KeyboardInterrupt

    if way == "raise at the beginning":
        monkeypatch.setattr(mode, "_name_parameters", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mode.begin()
    elif way == "raise":
        with pytest.raises(ZeroDivisionError), mode:
            1 / 0  # noqa: B018  # raises, which is all it is for
    else:
        mode.begin()
        assert methods() != before
        if way == "raise at the end":
            monkeypatch.setattr(mode, "_state", interrupted)
            with pytest.raises(KeyboardInterrupt):
                mode.finish()
        else:
            getattr(mode, way)()
    assert methods() == before
    assert not graph_watch._WATCHERS


def test_what_is_observed_in_a_capture_is_said_to_be_left_out(graphs: HostGraphs) -> None:
    recorder = Recorder(Selection())
    observations = Observations(recorder, owner="a test")
    recorder.begin()
    observations.begin()
    with pytest.warns(CoverageWarning, match="'x' was observed while a CUDA graph was being captured"):
        captured(lambda: observations.observe("x", [("x", torch.ones(2))]))
    observations.observe("y", [("y", torch.ones(2))])
    observations.end()
    trace = recorder.finish()
    assert [site.name for site in trace.program.sites] == ["y"]
    assert trace.program.ops_skipped["captured"] == 1


def test_memory_that_is_handed_out_in_a_capture_is_let_go(graphs: HostGraphs) -> None:
    mode = HashMode()
    asked: list[Any] = []
    with late_device():
        mode.begin()
        x = torch.ones(2) * 2
        mode.recorder.late._digests.before_write = asked.append
        captured(x.data_ptr)
        assert asked == [], "to order a stream behind another one would break the capture"
        x.data_ptr()
        assert len(asked) == 1
        mode.abandon()


def test_inductors_graphs_are_met_when_their_module_comes_within_a_step(
    graphs: HostGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Manager:
        def run(self) -> bool:
            return mode.recorder.passing.graphs.is_aside()

    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    mode = HashMode()
    mode.begin()
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", SimpleNamespace(CUDAGraphTreeManager=Manager))
    assert not Manager().run()
    mode.recorder.passing.graphs.follow_managed()
    assert Manager().run()
    mode.abandon()
    assert not Manager().run()
