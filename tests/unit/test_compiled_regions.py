"""What is seen of a compiled region: its ends, and what runs inside."""

import ctypes
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import COMPILING, FOLLOWER, NUDGE, batch, difference, ends, net, opaque_backend, restored, train
from late_device import late_device
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.checkpoint import checkpoint
from tracing import assert_same, step_of, traced

from det_callbacks import DeterminismCallback
from det_callbacks.digest import digest_tensor
from det_callbacks.trace.hash_mode import HashMode
from det_callbacks.trace.replaced import REPLACED

pytestmark = COMPILING


@contextmanager
def nobody_follows() -> Iterator[None]:
    REPLACED.unfollow(FOLLOWER)
    yield
    REPLACED.follow(FOLLOWER)


def test_both_ends_of_a_region_are_recorded_forward_and_backward(backend: Any) -> None:
    model = net()
    compiled = torch.compile(model, backend=backend)
    mode = HashMode(model)
    steps = [step_of(mode, train(compiled)) for _ in range(3)]
    assert counters["stats"]["unique_graphs"] == 1, "it was compiled, and once"
    assert steps[1].program.id == steps[2].program.id
    trace = steps[2]
    buffers = [name for name, _ in model.named_buffers()]
    assert sorted(str(site.name) for site in ends(trace, "inputs")) == sorted(["x", *buffers])
    graph = ends(trace, "graph")[0]
    assert {trace.program.sites[at].name for at in graph.inputs} >= {name for name, _ in model.named_parameters()}
    (given,) = ends(trace, "inputs", "backward")
    assert given.name == "grad of output 0"
    assert {site.name for site in ends(trace, "outputs", "backward")} == {
        f"grad of {name}" for name, _ in model.named_parameters()
    }
    assert trace.program.opaque_regions == ("compiled.Net_forward",)
    inner = [at for at, site in enumerate(trace.program.sites) if site.op == "det_tests.twice.default"]
    assert inner
    assert set(inner) <= set(ends(trace, "graph", "backward")[0].inputs), "which may read what they gave"


def test_what_a_region_computes_is_what_it_computes_unwatched(backend: Any) -> None:
    gradients = []
    for is_watched in (False, True):
        torch._dynamo.reset()
        model = net()
        compiled = torch.compile(model, backend=backend)
        for _ in range(2):
            model.zero_grad()
            if is_watched:
                traced(train(compiled), model)
            else:
                train(compiled)()
        gradients.append([value.clone() for value in (*(p.grad for p in model.parameters()), *model.buffers())])
    assert all(map(torch.equal, *gradients))


def test_compiled_blocks_that_share_their_code_are_told_apart_by_module(backend: Any) -> None:
    model = net()
    for block in model.blocks:
        block.compile(backend=backend)
    trace = traced(train(model), model)
    assert [site.module for site in ends(trace, "graph")] == ["blocks.0", "blocks.1"]
    assert [site.module for site in ends(trace, "graph", "backward")] == ["blocks.1", "blocks.0"]
    inside = [site.module for site in trace.program.sites if site.op == "det_tests.twice.default"]
    assert inside == ["blocks.0", "blocks.1"]


@pytest.mark.parametrize(
    ("modules", "level", "is_seen"), [(("blocks.1*",), "op", True), (("none*",), "op", False), (("",), "module", True)]
)
def test_a_region_is_selected_by_its_module_or_by_one_called_inside(
    modules: tuple[str, ...], level: str, is_seen: bool
) -> None:
    model = net()
    compiled = torch.compile(model, backend=opaque_backend())
    trace = traced(train(compiled), model, modules=modules, level=level)
    assert bool(ends(trace, "outputs")) is is_seen
    assert trace.program.opaque_regions == (("compiled.Net_forward",) if is_seen else ())
    if level == "module":
        assert {site.op.rpartition(".")[2] for site in trace.program.sites if site.op} == {"graph", "inputs", "outputs"}


def test_what_a_region_writes_into_its_inputs() -> None:
    compiled = torch.compile(lambda x: x.add_(1), backend=opaque_backend())

    def body() -> None:
        x = torch.ones(3)
        compiled(x)
        x.mul(2)

    trace = traced(body)
    written = [site for site in ends(trace, "outputs") if site.name == "x"]
    assert len(written) == 1
    multiplied = next(site for site in trace.program.sites if (site.op, site.role) == ("aten.mul.Tensor", "output"))
    assert [trace.program.sites[at].op.rpartition(".")[2] for at in multiplied.inputs] == ["outputs"]


def test_a_compiled_optimizer_writes_what_its_graph_holds() -> None:
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


@pytest.mark.parametrize("use_reentrant", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_region_under_activation_checkpointing(use_reentrant: bool) -> None:
    model = net()
    compiled = torch.compile(model, backend=opaque_backend())
    mode = HashMode(model)
    x = batch().requires_grad_()

    def body() -> None:
        checkpoint(compiled, x, use_reentrant=use_reentrant).sum().backward()

    steps = [step_of(mode, body) for _ in range(3)]
    assert steps[1].program.id == steps[2].program.id
    assert len(ends(steps[2], "graph", "backward")) >= 2 - (not use_reentrant)
    assert ends(steps[2], "outputs", "backward")


def test_nothing_is_left_behind_when_a_region_raises() -> None:
    filters = list(warnings.filters)

    def compiler(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            raise RuntimeError("the kernel failed")

        return make_boxed_func(run)

    compiled = torch.compile(lambda x: x + 1, backend=aot_autograd(fw_compiler=compiler))
    mode = HashMode()
    with pytest.raises(RuntimeError, match="the kernel failed"), mode:
        compiled(torch.ones(3))
    assert REPLACED.watchers == []
    assert mode.recorder.compiled.inside == {}
    assert list(warnings.filters) == filters
    assert step_of(mode, lambda: torch.ones(2) + 1).program.opaque_regions == ()


def test_a_wrapped_module_calls_no_attention_to_our_hooks_and_is_selected_by_those_inside() -> None:
    model = net()
    model.blocks = torch.compile(model.blocks, backend=opaque_backend())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = traced(train(model), model)
    assert [site.module for site in ends(trace, "graph")] == ["blocks"]
    names = {site.name for site in ends(trace, "inputs")}
    assert "blocks._orig_mod.0.norm.running_mean" in names
    trace = traced(train(model), model, modules=("blocks._orig_mod.1",))
    assert [site.module for site in ends(trace, "graph")] == ["blocks"]
    assert trace.program.opaque_regions == ("compiled.Sequential_forward",)
    assert not ends(traced(train(model), model, modules=("head",)), "graph")


@pytest.mark.slow
def test_a_graph_compiled_before_anybody_watched_is_met_where_inductor_runs_it() -> None:
    model = net()
    compiled = torch.compile(model)
    with nobody_follows():
        train(compiled)()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    steps = [restored(model, state, lambda: traced(train(compiled), model)) for _ in range(2)]
    assert_same(*steps)
    assert steps[0].program.opaque_regions == ("compiled.graph_compiled_earlier",)
    assert not ends(steps[0], "outputs")
    NUDGE["twice"] = True
    found = difference(steps[0], restored(model, state, lambda: traced(train(compiled), model)))
    assert found.divergences
    assert found.origins == (), "what it may have written is unknown"


def test_methods_of_torch_are_replaced_while_somebody_follows_and_no_longer(tmp_path: Path) -> None:
    owner = torch._dynamo.output_graph.OutputGraph
    with nobody_follows():
        original = owner.call_user_compiler
        DeterminismCallback(tmp_path, mode="record")
        assert owner.call_user_compiler is original
        mode = HashMode()
        REPLACED.follow(self := object())
        followed = owner.call_user_compiler
        with mode:
            assert owner.call_user_compiler is followed is not original
        assert owner.call_user_compiler is followed
        REPLACED.unfollow(self)
        assert owner.call_user_compiler is original
        with pytest.raises(ZeroDivisionError), mode:
            raise ZeroDivisionError
        assert owner.call_user_compiler is original


def test_memory_that_a_region_uses_again_was_digested_before() -> None:
    def compiler(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            inner = args[0].exp()
            ctypes.memset(inner.data_ptr(), 0, inner.nbytes)  # no dispatch, as in a kernel of inductor's
            return (inner,)

        return make_boxed_func(run)

    compiled = torch.compile(lambda x: x + 1, backend=aot_autograd(fw_compiler=compiler))
    with torch.no_grad(), late_device():
        trace = traced(lambda: compiled(torch.ones(3)))
    sites = trace.program.sites
    inner = next(at for at, site in enumerate(sites) if site.op == "aten.exp.default")
    assert int(trace.digests[inner]) == digest_tensor(torch.ones(3).exp())
    assert int(trace.digests[sites.index(ends(trace, "outputs")[0])]) == digest_tensor(torch.zeros(3))


def test_modules_that_dynamo_leaves_to_eager_code_keep_their_names() -> None:
    """What it leaves runs our hooks under its frame evaluation: compiled by themselves, they would do nothing."""
    model = nn.Module()
    model.net = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
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
