"""What is seen of a compiled region: its ends, what runs inside, and where a difference starts."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import (
    COMPILING,
    NUDGE,
    backend_of,
    batch,
    difference,
    ends,
    net,
    nobody_follows,
    nudged,
    opaque_backend,
    restored,
    state_of,
    train,
)
from late_device import late_device
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from tracing import assert_same, site_of, step_of, traced
from versions import TORCH

from det_callbacks.digest.components import digest_tensor
from det_callbacks.runs.steps import StepTrace
from det_callbacks.trace.compiled.replaced import REPLACED, forget_compiled
from det_callbacks.trace.hash_mode import HashMode

pytestmark = COMPILING


def outside_only(backend: Any) -> tuple[str, ...]:
    """Return the regions that are seen only from outside."""
    return () if backend == "inductor" else ("compiled.Net_forward",)


def test_both_ends_of_a_region_are_recorded_and_it_computes_what_it_computes_unwatched(backend):
    model = net()
    compiled = torch.compile(model, backend=backend)
    state = state_of(model)

    def left(step: Callable[[], Any]) -> list[torch.Tensor]:
        restored(model, state, step)
        return [
            value.clone()
            for value in (*(weight.grad for weight in model.parameters()), *model.buffers())
        ]

    mode = HashMode(model)
    steps: list[StepTrace] = []
    watched = [left(lambda: steps.append(step_of(mode, train(compiled)))) for _ in range(3)][-1]
    assert counters["stats"]["unique_graphs"] == 1, "it was compiled, and once"
    assert all(map(torch.equal, watched, left(train(compiled))))
    assert steps[1].program.id == steps[2].program.id
    trace = steps[2]
    assert any(site.is_kernel for site in trace.program.sites) is (backend == "inductor")
    names = [name for name, _ in model.named_parameters()]
    assert sorted(site.name for site in ends(trace, "inputs")) == sorted(
        ["x", *dict(model.named_buffers())]
    )
    graph = ends(trace, "graph")[0]
    assert {trace.program.sites[at].name for at in graph.inputs} >= {*names}
    assert [given.name for given in ends(trace, "inputs", "backward")] == ["grad of output 0"]
    assert {site.name for site in ends(trace, "outputs", "backward")} == {
        f"grad of {name}" for name in names
    }
    assert trace.program.opaque_regions == outside_only(backend)
    inner = [
        at for at, site in enumerate(trace.program.sites) if site.op == "det_tests.twice.default"
    ]
    assert inner
    assert set(inner) <= set(ends(trace, "graph", "backward")[0].inputs), (
        "which may read what they gave"
    )


def test_compiled_blocks_that_share_their_code_are_told_apart_by_module(backend):
    model = net()
    for block in model.blocks:
        block.compile(backend=backend)
    trace = traced(train(model), model)
    assert [site.module for site in ends(trace, "graph")] == ["blocks.0", "blocks.1"]
    assert [site.module for site in ends(trace, "graph", "backward")] == ["blocks.1", "blocks.0"]
    inside = [site.module for site in trace.program.sites if site.op == "det_tests.twice.default"]
    assert inside == ["blocks.0", "blocks.1"]


def test_at_level_module_a_region_has_its_ends():
    model = net()
    compiled = torch.compile(model, backend=opaque_backend())
    trace = traced(train(compiled), model, modules=("",), level="module")
    assert trace.program.opaque_regions == ("compiled.Net_forward",)
    assert {site.op.rpartition(".")[2] for site in trace.program.sites if site.op} == {
        "graph",
        "inputs",
        "outputs",
    }


def unseen_by_autograd(graph: Any, x: torch.Tensor) -> Any:
    x.numpy()[...] += 1
    return graph.forward(x)


@pytest.mark.parametrize(
    ("function", "backend"),
    [(lambda x: x.add_(1), opaque_backend()), (lambda x: x + 1, backend_of(unseen_by_autograd))],
    ids=["told", "unseen"],
)
def test_what_a_region_writes_into_its_inputs(function, backend):
    compiled = torch.compile(function, backend=backend)

    def body() -> None:
        x = torch.ones(3)
        compiled(x)
        x.mul(2)

    with torch.no_grad():
        trace = traced(body)
    (written,) = [site for site in ends(trace, "outputs") if site.name == "x"]
    assert [trace.program.sites[at] for at in site_of(trace, "mul.Tensor").inputs] == [written]


def test_a_compiled_optimizer_writes_what_its_graph_holds():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = torch.compile(optimizer.step, backend=opaque_backend())

    def body() -> None:
        model(torch.ones(2, 3)).sum().backward()
        step()

    mode = HashMode(model)
    for _ in range(3):
        optimizer.zero_grad()
        trace = step_of(mode, body)
    written = {site.name for site in ends(trace, "outputs", "optimizer")}
    assert written == {"weight", "bias", "momentum_buffer of weight", "momentum_buffer of bias"}


def test_a_region_under_activation_checkpointing():
    model = net()
    compiled = torch.compile(model, backend=opaque_backend())
    mode = HashMode(model)
    x = batch().requires_grad_()
    steps = [
        step_of(mode, lambda: checkpoint(compiled, x, use_reentrant=True).sum().backward())
        for _ in range(3)
    ]
    assert steps[1].program.id == steps[2].program.id
    assert len(ends(steps[2], "graph", "backward")) == 2, "it is run again, and backwards"
    assert ends(steps[2], "outputs", "backward")


def test_nothing_is_left_behind_when_a_region_raises():
    def fail(*_: Any) -> Any:
        raise RuntimeError("the kernel failed")

    compiled = torch.compile(lambda x: x + 1, backend=backend_of(fail))
    mode = HashMode()
    with pytest.raises(RuntimeError, match="the kernel failed"), mode:
        compiled(torch.ones(3))
    assert REPLACED.watchers == []
    assert mode.recorder.places.running_regions == {}
    assert step_of(mode, lambda: torch.ones(2) + 1).program.opaque_regions == ()


def test_a_wrapped_module_calls_no_attention_to_our_hooks_and_is_selected_by_those_inside():
    model = net()
    model.blocks = torch.compile(model.blocks, backend=opaque_backend())
    trace = traced(train(model), model)  # a warning is an error here
    assert [site.module for site in ends(trace, "graph")] == ["blocks"]
    names = {site.name for site in ends(trace, "inputs")}
    assert "blocks._orig_mod.0.norm.running_mean" in names
    trace = traced(train(model), model, modules=("blocks._orig_mod.1",))
    assert [site.module for site in ends(trace, "graph")] == ["blocks"]
    assert trace.program.opaque_regions == ("compiled.Sequential_forward",)
    assert traced(train(model), model, modules=("head",)).program.opaque_regions == ()


@pytest.mark.slow
def test_a_graph_compiled_before_anybody_watched_is_met_where_inductor_runs_it():
    model = net()
    compiled = torch.compile(model)
    with nobody_follows():
        train(compiled)()
    state = state_of(model)
    steps = [restored(model, state, lambda: traced(train(compiled), model)) for _ in range(2)]
    assert_same(*steps)
    assert steps[0].program.opaque_regions == ("compiled.graph_compiled_earlier",)
    assert not ends(steps[0], "outputs")
    NUDGE["twice"] = True
    found = difference(steps[0], restored(model, state, lambda: traced(train(compiled), model)))
    assert found.divergences
    assert found.origins == (), "what it may have written is unknown"


def test_a_graph_that_was_compiled_unseen_is_followed_once_dynamo_has_forgotten_it(backend):
    model = net()
    compiled = torch.compile(model, backend=backend)
    state = state_of(model)
    cold = restored(model, state, lambda: traced(train(compiled), model))
    torch._dynamo.reset()
    with nobody_follows():
        train(compiled)()
    forget_compiled()
    warm = restored(model, state, lambda: traced(train(compiled), model))
    assert warm.program.opaque_regions == outside_only(backend)
    assert_same(cold, warm)


def test_the_graph_for_varying_sizes_comes_again_when_dynamo_has_forgotten_it():
    compiled = torch.compile(lambda x: x * x.shape[0], backend=opaque_backend())
    mode = HashMode()
    with torch.no_grad():
        for size in (4, 5):
            compiled(torch.ones(size, 2))
        before = step_of(mode, lambda: compiled(torch.ones(4, 2)))
        forget_compiled()
        compiled(torch.ones(4, 2))
        assert_same(before, step_of(mode, lambda: compiled(torch.ones(4, 2))))
    assert counters["stats"]["unique_graphs"] == 3, "it was compiled again"


def test_what_may_not_be_compiled_again_is_not_forgotten():
    compiled = torch.compile(lambda x: x + 1, backend=opaque_backend())
    compiled(torch.ones(3))
    with torch.compiler.set_stance("fail_on_recompile"):
        forget_compiled()
        compiled(torch.ones(3))
    assert counters["stats"]["unique_graphs"] == 1


def test_a_method_that_was_replaced_in_between_is_the_one_that_is_called(monkeypatch):
    owner = torch._dynamo.output_graph.OutputGraph
    with nobody_follows():
        called = []
        for name in ("first", "second"):
            monkeypatch.setattr(
                owner, "call_user_compiler", lambda *_, name=name: called.append(name)
            )
            for _ in range(2):
                with HashMode():
                    assert owner.call_user_compiler.__wrapped__(None) is None
        assert called == ["first", "first", "second", "second"]


def test_memory_that_a_region_uses_again_was_digested_before():
    def run(_: Any, x: torch.Tensor) -> Any:
        inner = x.exp()
        # no dispatch, as in a kernel of inductor's
        ctypes.memset(inner.data_ptr(), 0, inner.nbytes)
        return (inner,)

    compiled = torch.compile(lambda x: x + 1, backend=backend_of(run))
    with torch.no_grad(), late_device():
        trace = traced(lambda: compiled(torch.ones(3)))
    sites = trace.program.sites
    inner = next(at for at, site in enumerate(sites) if site.op == "aten.exp.default")
    assert int(trace.digests[inner]) == digest_tensor(torch.ones(3).exp())
    assert int(trace.digests[sites.index(ends(trace, "outputs")[0])]) == digest_tensor(
        torch.zeros(3)
    )


class LeftToEager(nn.Sequential):
    @torch.compiler.disable(recursive=False)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_modules_that_dynamo_leaves_to_eager_code_keep_their_names():
    """What it leaves runs our hooks under its frame evaluation: compiled by themselves,
    they would do nothing.
    """
    model = nn.Module()
    model.net = LeftToEager(nn.Linear(3, 3), nn.LayerNorm(3))
    counter = CompileCounter()
    model.net.compile(backend=counter)
    compiled = torch.compile(model.net[0], backend=counter)
    for _ in range(2):
        mode = HashMode(model)
        for _ in range(2):
            trace = step_of(mode, lambda: model.net(torch.ones(2, 3)))
            modules = {site.op: site.module for site in trace.program.sites if site.op}
            assert modules["aten.addmm.default"] == "net.0"
            assert modules["aten.native_layer_norm.default"] == "net.1"
            with torch.no_grad():
                step_of(mode, lambda: compiled(torch.ones(2, 3)))
    assert counter.frame_count == 1, "it is not compiled anew in each step"


def test_a_module_of_torch_s_own_that_is_compiled_in_place_keeps_its_name():
    model = nn.Module()
    model.net = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    counter = CompileCounter()
    model.net.compile(backend=counter)
    trace = traced(lambda: model.net(torch.ones(2, 3)), model)
    is_compiled = TORCH >= (2, 14)  # Dynamo of torch 2.13 and older leaves it to eager code
    assert counter.frame_count == is_compiled
    assert [site.module for site in ends(trace, "graph")] == ["net"] * is_compiled
    assert site_of(trace, "addmm.default").module == ("net" if is_compiled else "net.0")
    assert trace.program.opaque_regions == ("compiled.Sequential_forward",) * is_compiled


# where a difference starts


@pytest.mark.parametrize(
    ("place", "op", "is_origin", "started_by"),
    [
        ("outside", "", False, set()),
        ("eager", "aten.mul.Tensor", True, {"aten.mul.Tensor"}),
        ("unseen", "compiled.Net_forward.inputs", None, set()),
        ("inside", "det_tests.twice.default", None, {"compiled.Net_forward.outputs"}),
    ],
)
def test_who_starts_one_ulp(place, op, is_origin, started_by, backend):
    given = {False: batch(), True: nudged(batch())}

    def step(is_nudged: bool) -> None:
        x = (
            given[is_nudged]
            if place == "outside"
            else batch() * (3 + 2**-20 * (is_nudged and place == "eager"))
        )
        if is_nudged and place == "unseen":
            x.numpy()[1, 1] += 1e-6
        NUDGE["twice"] = is_nudged and place == "inside"
        train(compiled, x)()

    model = net()
    compiled = torch.compile(model, backend=backend)
    train(compiled)()
    state = state_of(model)
    traces = [
        restored(model, state, lambda: traced(lambda: step(way), model))  # noqa: B023
        for way in (False, True)
    ]
    found = difference(*traces)
    first = found.divergences[0]
    if place == "inside" and backend == "inductor":  # whose kernels are seen, too
        is_origin, started_by = True, {op}
    assert (first.op, first.is_origin) == (op, is_origin)
    assert {(origin.op, origin.phase) for origin in found.origins} == {
        (one, "forward") for one in started_by
    }
    if place != "inside":
        entering = next(
            item for item in found.divergences if item.op == "compiled.Net_forward.inputs"
        )
        assert (entering.name, entering.is_origin) == ("x", None if place == "unseen" else False)


def test_another_graph_is_a_difference_in_structure():
    compiled = torch.compile(lambda x: x * x.shape[0], backend=opaque_backend())
    mode = HashMode()
    with torch.no_grad():
        reference = step_of(mode, lambda: compiled(torch.ones(4, 2)))
        # compiles for any size, and is preferred from here on
        step_of(mode, lambda: compiled(torch.ones(5, 2)))
        current = step_of(mode, lambda: compiled(torch.ones(4, 2)))
    assert counters["stats"]["unique_graphs"] == 2
    first = difference(reference, current).divergences[0]
    assert (first.op.rpartition(".")[2], first.kind, first.is_origin) == (
        "graph",
        "structure",
        True,
    )


def test_eager_steps_are_those_of_the_code_that_was_compiled(backend):
    plain_model, model = net(), net()
    trained = torch.compile(model, backend=backend)
    state = state_of(model)
    train(trained)()  # compiled before: it runs as eager code all the same
    assert counters["stats"]["unique_graphs"] == 1
    plain = restored(plain_model, state, lambda: traced(train(plain_model), plain_model))
    root = nn.ModuleDict({"net": trained})
    trace = restored(model, state, lambda: traced(train(trained), root, compiled="eager"))
    assert trace.program.opaque_regions == ()

    def seen(step: StepTrace) -> list[tuple[str, str, str, str, int]]:
        return [
            (
                site.phase,
                site.module.removeprefix("net._orig_mod").lstrip("."),
                site.op,
                site.source[0],
                int(digest),
            )
            for site, digest in zip(step.program.sites, step.digests, strict=True)
            if site.phase in ("forward", "backward") and site.role == "output"
        ]

    assert seen(trace) == seen(plain), "as if nothing had been compiled"
    for level in ("op", "state"):
        with pytest.raises(ZeroDivisionError), HashMode(root, level=level, compiled="eager"):
            raise ZeroDivisionError
    assert ends(traced(train(trained), root), "graph"), "what was compiled goes on"
    assert counters["stats"]["unique_graphs"] == 1
