"""Replays of CUDA graphs in a step: what they leave is seen, and nothing else is blamed for it."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiling import difference
from host_graphs import HostGraphs, captured, host_graphs, nudge_last
from late_device import late_device
from torch import Tensor, library, nn
from tracing import assert_same, site_of, step_of, traced, with_role

from det_callbacks.compare.wording import describe
from det_callbacks.digest import digest_tensor
from det_callbacks.report.closing import level_words
from det_callbacks.trace import graph_watch
from det_callbacks.trace.hash_mode import HashMode
from det_callbacks.trace.program import Site
from det_callbacks.trace.steps import StepTrace
from det_callbacks.trace.storages import StorageLedger


@pytest.fixture(name="graphs")
def _graphs() -> Iterator[HostGraphs]:
    with host_graphs() as graphs:
        yield graphs
    assert not graph_watch._WATCHERS


def site_at(trace: StepTrace, position: int) -> Site:
    return trace.program.sites[position]


def test_what_a_replay_leaves_is_seen(graphs: HostGraphs) -> None:
    static = torch.zeros(3)
    graph, out = captured(lambda: static.mul_(2) + 1)
    expected = torch.full((3,), 2.0)

    def body() -> None:
        static.copy_(torch.ones(3))
        graph.replay()
        static.sum()
        out.sum()

    trace = traced(body)
    (launch,) = with_role(trace, "launch")
    assert (launch.op, launch.phase, launch.inputs) == ("cuda_graph.1.replay", "forward", ())
    first, second = with_role(trace, "left")
    sites = trace.program.sites
    assert first.op == second.op == "cuda_graph.1.memory"
    assert int(trace.digests[sites.index(first)]) == digest_tensor(expected)
    assert int(trace.digests[sites.index(second)]) == digest_tensor(expected + 1)
    assert [site_at(trace, place).op for place in first.inputs] == ["aten.copy_.default", "cuda_graph.1.replay"]
    assert [site_at(trace, place).op for place in second.inputs] == ["cuda_graph.1.replay"]
    assert [site_at(trace, place).role for place in site_of(trace, "sum.default").inputs] == ["left"]
    assert trace.program.opaque_regions == ("cuda_graph.1",)
    assert_same(trace, traced(body))


def test_a_name_says_where_a_graph_comes_in_its_step(graphs: HostGraphs) -> None:
    first, second = (captured(lambda: torch.ones(1).exp())[0] for _ in range(2))
    mode = HashMode()

    def names(*replayed: torch.cuda.CUDAGraph) -> list[str]:
        trace = step_of(mode, lambda: [graph.replay() for graph in replayed])
        return [f"{site.op}#{site.occurrence}" for site in with_role(trace, "launch")]

    assert names(first, second, first) == [
        "cuda_graph.1.replay#0",
        "cuda_graph.2.replay#0",
        "cuda_graph.1.replay#1",
    ]
    assert names(second) == ["cuda_graph.1.replay#0"]


def planted(graphs: HostGraphs, *, x: float = 1.0, nudge: Any = None, before: Any = None) -> StepTrace:
    static = torch.zeros(3)
    graph, out = captured(lambda: static.exp())

    def body() -> None:
        static.copy_(torch.full((3,), 2.0) * x)
        (static * 2).sum()
        graph.replay()
        out.mul(3).sum()

    graphs.after_replay = nudge
    try:
        return traced(body)
    finally:
        graphs.after_replay = None


def test_another_replay_is_no_ops_fault(graphs: HostGraphs) -> None:
    found = difference(planted(graphs), planted(graphs, nudge=nudge_last))
    first, *others = found.divergences
    assert (first.op, first.is_origin) == ("cuda_graph.1.memory", None)
    assert [(one.op, one.is_origin) for one in others] == [("aten.mul.Tensor", False), ("aten.sum.default", False)]
    assert found.origins == ()


def test_what_went_into_a_replay_can_be_the_origin_and_what_it_left_cannot(graphs: HostGraphs) -> None:
    found = difference(planted(graphs), planted(graphs, x=1.5))
    assert found.divergences[0].is_origin is not None
    left = [one.is_origin for one in found.divergences if one.op == "cuda_graph.1.memory"]
    assert left == [None]


def test_memory_that_differed_before_a_replay_came_in(graphs: HostGraphs) -> None:
    graph, _ = captured(lambda: torch.ones(1).exp())

    def body(value: float) -> None:
        x = torch.tensor([1.0, value])
        y = x.exp()
        graph.replay()
        y.sum()

    found = difference(traced(lambda: body(1.0)), traced(lambda: body(2.0)))
    (left,) = (one for one in found.divergences if one.op == "cuda_graph.1.memory")
    assert left.is_origin is False


def test_a_replay_that_only_one_run_has_is_a_difference(graphs: HostGraphs) -> None:
    graph, _ = captured(lambda: torch.ones(1).exp())
    found = difference(traced(lambda: graph.replay()), traced(lambda: torch.ones(1)))
    first = found.divergences[0]
    assert (first.op, first.kind) == ("cuda_graph.1.replay", "missing")


def test_a_differing_replay_on_a_late_device(graphs: HostGraphs) -> None:
    with late_device() as device:
        reference, current = planted(graphs), planted(graphs, nudge=nudge_last)
        assert_same(reference, planted(graphs))
    assert device.num_collected == 3
    found = difference(reference, current)
    assert [one.op for one in found.divergences if one.is_origin is not False] == ["cuda_graph.1.memory"]


def test_what_waits_is_digested_before_a_replay_writes_it(graphs: HostGraphs) -> None:
    static = torch.zeros(3)
    graph, _ = captured(lambda: static.add_(5))
    with late_device():
        trace = traced(lambda: (static.copy_(torch.ones(3)), graph.replay()))
    position = next(at for at, site in enumerate(trace.program.sites) if site.op == "aten.copy_.default")
    assert int(trace.digests[position]) == digest_tensor(torch.ones(3))


def test_at_level_state_only_what_waits_is_launched(graphs: HostGraphs) -> None:
    static = torch.zeros(3)
    graph, _ = captured(lambda: static.add_(5))
    model = nn.Linear(1, 1)
    with late_device():
        mode = HashMode(model, level="state")
        mode.begin(batch=static)
        graph.replay()
        trace = mode.finish()
    assert trace is not None
    assert not with_role(trace, "launch")
    batch = next(at for at, site in enumerate(trace.program.sites) if site.phase == "data")
    assert int(trace.digests[batch]) == digest_tensor(torch.zeros(3))
    assert static.sum() == 15


def test_an_op_that_replays_a_graph_itself_keeps_its_rows(graphs: HostGraphs) -> None:
    graph, _ = captured(lambda: torch.ones(1).exp())
    with library._scoped_library("det_graphs", "FRAGMENT") as made:
        made.define("twice(Tensor x) -> Tensor")

        def twice(x: Tensor) -> Tensor:
            graph.replay()
            return x * 2

        made.impl("twice", twice, "CompositeExplicitAutograd")

        def body() -> None:
            y = torch.ones(2).sin()
            torch.ops.det_graphs.twice(y).cos()
            y.tan()

        trace = traced(body)
    assert not with_role(trace, "launch")
    assert trace.program.opaque_regions == ("cuda_graph.1",)
    assert [site.op for site in trace.program.sites if site.op] == [
        "aten.ones.default",
        "aten.sin.default",
        "det_graphs.twice.default",
        "aten.cos.default",
        "cuda_graph.1.memory",
        "aten.tan.default",
    ]


def test_a_graph_is_not_kept_alive(graphs: HostGraphs) -> None:
    graph, _ = captured(lambda: torch.ones(1).exp())
    mode = HashMode()
    mode.begin()
    graph.replay()
    known = weakref.ref(graph)
    del graph
    gc.collect()
    assert known() is None
    mode.finish()


# make_graphed_callables


def graphed_steps(graphs: HostGraphs, *, nudge: Any = None, **selection: Any) -> list[StepTrace]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model[0] = torch.cuda.make_graphed_callables(model[0], (torch.ones(2, 3),))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mode = HashMode(model, **selection)
    traces = []
    for number in range(2):
        graphs.after_replay = nudge if number else None

        def body() -> None:
            optimizer.zero_grad()
            model(torch.rand(2, 3)).sum().backward()
            optimizer.step()

        traces.append(step_of(mode, body))
    graphs.after_replay = None
    return traces


@pytest.mark.parametrize("level", ["op", "module"])
def test_graphed_callables(graphs: HostGraphs, level: str) -> None:
    traces = graphed_steps(graphs, level=level)
    launches = [(site.op, site.phase, site.module) for site in with_role(traces[1], "launch")]
    of_backward = "0" if level == "op" else "?"  # who made a node is known where ops are seen
    assert launches == [("cuda_graph.1.replay", "forward", "0"), ("cuda_graph.2.replay", "backward", of_backward)]
    for one, other in zip(traces, graphed_steps(graphs, level=level), strict=True):
        assert_same(one, other)
    assert traces[0].program.id == traces[1].program.id
    forward = traces[1].program.sites
    if level == "op":
        assert any(site.op == "aten.copy_.default" and site.module == "0" for site in forward), "the static input"
        left = next(site for site in with_role(traces[1], "left") if site.phase == "forward")
        assert left.module == "0"


def test_a_graphed_module_that_gives_other_bits(graphs: HostGraphs) -> None:
    reference, current = graphed_steps(graphs), graphed_steps(graphs, nudge=nudge_last)
    assert_same(reference[0], current[0])
    found = difference(reference[1], current[1])
    first, *others = found.divergences
    assert (first.name, first.is_origin, first.module) == ("output", None, "0")
    assert next((one.op, one.is_origin) for one in others if one.op) == ("cuda_graph.1.memory", None)
    assert found.origins == ()
    assert describe(found.findings[0]).endswith(
        "output of 0 holds other bits; a CUDA graph, of which nothing is seen inside, may have written it, so where it "
        "starts cannot be proven"
    )


# what is said


def test_the_closing_line_counts_graphs() -> None:
    words = level_words("op", "run", ["cuda_graph.1", "cuda_graph.2", "compiled.Net_forward"])
    assert words == "op (1 compiled region seen from outside; 2 CUDA graphs seen from outside)"


def test_what_a_collective_has_yet_to_bring_is_not_lost() -> None:
    ledger = StorageLedger()
    tensor, other = torch.zeros(4), torch.zeros(4)
    ledger.write(tensor, 3)
    ledger.write(other, 4)
    ledger.deliver(tensor[:2], 0)
    ledger.lose(7)
    known = ledger.writers[tensor.untyped_storage()._cdata]
    assert not isinstance(known, int)
    assert [at for _, at in known.writes] == [-2]
    assert ledger.suspects_of(tensor) == [3, 7]
    assert ledger.suspects_of(other) == [4, 7]
    assert ledger.writers_of(other) == [7]
    ledger.drop_from(4)
    assert ledger.suspects_of(other) == [7]
    ledger.close()
    assert ledger.writers_of(other) == []


def test_an_op_more_after_a_replay_is_the_only_difference(graphs: HostGraphs) -> None:
    graph, out = captured(lambda: torch.ones(2).exp())

    def body(is_longer: bool) -> None:
        graph.replay()
        if is_longer:
            out.cos()
        out.sin()

    found = difference(traced(lambda: body(False)), traced(lambda: body(True)))
    assert [(one.op, one.kind) for one in found.divergences] == [("aten.cos.default", "extra")]


def test_what_a_step_ends_with_follows_from_the_replay_that_may_have_written_it(graphs: HostGraphs) -> None:
    model = nn.Linear(2, 1)
    graph, _ = captured(lambda: model.weight.detach().mul_(2))
    trace = traced(graph.replay, model)
    (state,) = (site for site in trace.program.sites if site.phase == "state" and site.name == "weight")
    assert [site_at(trace, place).op for place in state.inputs] == ["cuda_graph.1.replay"]
