"""Compiled code that inductor's CUDA graph trees run: nothing inside is recorded, in no step, and nothing is held."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import COMPILING, difference, ends, origins
from host_graphs import HostGraphs, host_graphs, nudge_last
from late_device import late_device
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.multiprocessing.reductions import StorageWeakRef  # what torch itself looks at
from tracing import assert_same, step_of

from det_callbacks.digest import digest_tensor
from det_callbacks.trace import graph_watch
from det_callbacks.trace.hash_mode import HashMode
from det_callbacks.trace.steps import StepTrace

pytestmark = COMPILING


def trees() -> Any:
    # not at the top: inductor's modules warn when they are imported, which the marks of a test allow
    return importlib.import_module("torch._inductor.cudagraph_trees").CUDAGraphTreeManager


class Managed:
    """One function as the trees run it: once to warm up, once to capture it, then by replays into the same memory."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._given: list[Any] = []
        self._graph = torch.cuda.CUDAGraph()
        self._outputs: list[Any] = []
        self.num_runs = 0
        self.alive: list[int] = []
        """For each run how many storages of the last run's outputs somebody still held."""
        self._references: list[StorageWeakRef] = []

    def run(self, inputs: list[Any]) -> Any:
        self.alive.append(sum(not reference.expired() for reference in self._references))
        self.num_runs += 1
        given = list(inputs)
        inputs.clear()
        if self.num_runs == 1:
            outputs = list(self._function(*given))
            self._references = [StorageWeakRef(one.untyped_storage()) for one in outputs if isinstance(one, Tensor)]
            return outputs
        if self.num_runs == 2:
            self._given = [value.clone() if isinstance(value, Tensor) else value for value in given]
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._outputs = list(self._function(*self._given))
        for ours, value in zip(self._given, given, strict=True):
            if isinstance(ours, Tensor):
                ours.copy_(value)
        self._graph.replay()
        return [one.detach() if isinstance(one, Tensor) else one for one in self._outputs]


@pytest.fixture(name="graphs")
def _graphs() -> Iterator[HostGraphs]:
    with host_graphs() as graphs:
        yield graphs
    assert not graph_watch._WATCHERS
    assert not hasattr(trees().run, "__wrapped__")


@pytest.fixture(name="managed")
def _managed(graphs: HostGraphs) -> Iterator[list[Managed]]:
    """Whatever a compiler of ``backend_of`` compiled, run by the method of torch that runs such code."""
    found: list[Managed] = []

    def run(manager: Any, inputs: list[Any], function_id: int) -> Any:
        return found[function_id].run(inputs)

    with mock.patch.object(trees(), "_run", run):
        yield found


def backend_of(found: list[Managed]) -> Any:
    manager = object.__new__(trees())
    manager.graph = mock.Mock()

    def compile_graph(graph: Any, _: Any) -> Any:
        number = len(found)
        found.append(Managed(graph.forward))
        manager.id_to_mode = dict.fromkeys(range(number + 1))
        manager.id_to_compile_id = dict.fromkeys(range(number + 1))

        def run(inputs: list[Any]) -> Any:
            return manager.run(inputs, number)

        run._boxed_call = True  # type: ignore[attr-defined]  # what AOTAutograd reads
        return run

    return aot_autograd(fw_compiler=compile_graph)


def steps_of(
    managed: list[Managed], graphs: HostGraphs, *, nudged: int = -1, num_steps: int = 4
) -> tuple[list[StepTrace], list[Tensor]]:
    torch.manual_seed(1)
    torch._dynamo.reset()
    managed.clear()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    compiled = torch.compile(model, backend=backend_of(managed))
    mode = HashMode(model)
    traces, outputs = [], []

    for number in range(num_steps):
        given = torch.full((2, 3), float(number))

        def body(x: Tensor = given) -> None:
            model.zero_grad()
            out = compiled(x)
            outputs.append(out.detach().clone())
            out.sum().backward()

        graphs.after_replay = nudge_last if number == nudged else None
        traces.append(step_of(mode, body))
    graphs.after_replay = None
    return traces, outputs


def test_each_step_has_the_ends_of_the_region_and_nothing_inside(graphs: HostGraphs, managed: list[Managed]) -> None:
    traces, outputs = steps_of(managed, graphs)
    assert [one.num_runs for one in managed] == [4, 4]
    assert graphs.num_replays == 6
    assert len({trace.program.id for trace in traces}) == 1
    for trace, expected in zip(traces, outputs, strict=True):
        assert not ends(trace, "inside")
        assert not any(site.role in ("launch", "left") for site in trace.program.sites)
        (site,) = ends(trace, "outputs")
        assert int(trace.digests[trace.program.sites.index(site)]) == digest_tensor(expected)
        assert trace.program.opaque_regions == ("compiled.Sequential_forward",)
    assert traces[0].program.ops_skipped["captured"] > 0, "warming up"
    assert traces[1].program.ops_skipped["captured"] > 0, "capturing"
    assert len(ends(traces[3], "outputs", "backward")) == 4


def test_runs_of_such_steps_agree_and_a_replay_that_gives_other_bits_is_the_regions(
    graphs: HostGraphs, managed: list[Managed]
) -> None:
    with late_device():
        reference, _ = steps_of(managed, graphs)
        current, _ = steps_of(managed, graphs, nudged=3)
    for one, other in zip(reference[:3], current[:3], strict=True):
        assert_same(one, other)
    found = difference(reference[3], current[3])
    assert found.divergences[0].op == "compiled.Sequential_forward.outputs"
    assert {op for op, _ in origins(found)} == {"compiled.Sequential_forward.outputs"}


def test_nothing_is_held_of_what_such_a_region_gave(graphs: HostGraphs, managed: list[Managed]) -> None:
    compiled = torch.compile(lambda x: (x.exp() + 1).sum(0), backend=backend_of(managed))
    mode = HashMode()
    launched: list[tuple[int, int]] = []
    with late_device() as device, torch.no_grad():

        def body() -> None:
            x = torch.ones(4, 3)
            x.sin()  # waits
            before = sum(device.num_launched)
            out = compiled(x)
            (queue,) = (queue for queue in mode.recorder.late._digests._queues.values() if queue is not None)
            launched.append((sum(device.num_launched) - before, queue.num_pending))
            del out
            compiled(x)

        step_of(mode, body)
    assert [alive for one in managed for alive in one.alive] == [0, 0]
    ((num_launched, num_pending),) = launched
    assert num_launched >= 2
    assert device.num_unheld == 2, "the allocator is told nothing of what the region gave"
    assert num_pending == 0
