"""Kernels that inductor compiles for the host, and on a GPU for it."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import COMPILING, difference, ends, generates_anew
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional
from tracing import traced

from det_callbacks.runs.steps import StepTrace
from det_callbacks.trace.hash_mode import HashMode

pytestmark = [*COMPILING, pytest.mark.slow, pytest.mark.usefixtures("generates_anew")]
assert generates_anew


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 8)
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embedding(x))
        return functional.gelu(self.linear(h)) * 2


LINE = Block.forward.__code__.co_firstlineno


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Block()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.1, momentum=0.9, foreach=True
        )
        self._model, self._update = torch.compile(self.model), torch.compile(self.optimizer.step)
        self._x = torch.arange(12).reshape(4, 3) % 4

    def step(self) -> None:
        self.optimizer.zero_grad()
        self._model(self._x).square().sum().backward()
        self._update()

    def left(self) -> list[Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [
            value.detach().clone()
            for value in (*self.model.parameters(), *states)
            if isinstance(value, Tensor)
        ]


def record(training: Training, *, steps: int = 3) -> list[StepTrace]:
    mode = HashMode(training.model)
    mode.optimizers = [training.optimizer]
    traces: list[StepTrace] = []
    for _ in range(steps):
        with mode:
            training.step()
        assert mode.trace is not None
        traces.append(mode.trace)
    return traces


def test_each_kernel_of_a_training_step_is_a_row_and_nothing_else_changes():
    training = Training()
    traces = record(training)
    num_graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    again = record(Training())
    torch._dynamo.reset()
    counters.clear()
    alone = Training()
    for _ in range(3):
        alone.step()
    assert counters["stats"]["unique_graphs"] == num_graphs
    assert all(map(torch.equal, training.left(), alone.left()))
    assert [trace.program.id for trace in again] == [trace.program.id for trace in traces]
    trace = traces[-1]
    sites = trace.program.sites
    kernels = [site for site in sites if site.is_kernel]
    assert {site.phase for site in kernels} == {"forward", "backward", "optimizer"}
    assert trace.program.opaque_regions == ()
    for site in kernels:
        assert sites[site.inputs[0]].role != "graph", (
            "it reads what it reads, not all of the region"
        )
    updated = [site for site in kernels if site.phase == "optimizer"]
    names = [name for name, _ in training.model.named_parameters()]
    assert Counter(site.name for site in updated) == Counter(
        [*names, *(f"momentum_buffer of {one}" for one in names)]
    )
    for site in ends(trace, "outputs", "backward"):
        assert all(sites[at].is_kernel or sites[at].op.endswith(".out") for at in site.inputs)


def test_a_kernel_has_the_lines_of_what_it_fused():
    trace = record(Training(), steps=1)[0]
    file = f"tests/unit/{Path(__file__).name}"
    by_phase: dict[str, set[str]] = {}
    for site in trace.program.sites:
        if site.is_kernel and site.phase != "optimizer":
            by_phase.setdefault(site.phase, set()).add(site.source[0])
    first = f"embedding ({file}:{LINE + 1}), layer_norm ({file}:{LINE + 1})"
    assert any(first in shown for shown in by_phase["forward"])
    assert any(
        f"gelu ({file}:{LINE + 2}), mul ({file}:{LINE + 2})" in shown
        for shown in by_phase["forward"]
    )
    assert any(f"gelu_backward ({file}:{LINE + 2})" in shown for shown in by_phase["backward"])
    (mm,) = (site for site in trace.program.sites if site.op == "aten.addmm.out")
    assert mm.source == (f"{file}:{LINE + 2} in forward",)


def broken(x: Tensor) -> Tensor:
    return (x.sin() @ x.t()).exp() + 1


def changed() -> Callable[[Tensor], Tensor]:
    """Return the function with another last number."""

    def broken(x: Tensor) -> Tensor:
        return (x.sin() @ x.t()).exp() + 2

    return broken


def compiled_step(function: Callable[[Tensor], Tensor], **options: Any) -> Callable[[], None]:
    compiled = torch.compile(function, options=options or None)
    x = torch.linspace(-1, 1, 32).reshape(4, 8)

    def step() -> None:
        with torch.no_grad():
            compiled(x)

    return step


def test_an_origin_in_generated_code_is_the_kernel_that_flips_a_bit(monkeypatch):
    from torch._inductor.codecache import PyCodeCache

    step = compiled_step(broken)
    reference = traced(step)
    names = [
        site.op.removeprefix("inductor.") for site in reference.program.sites if site.is_kernel
    ]
    assert len(names) == 2
    for name in names:
        (module,) = (one for one in PyCodeCache.modules if name in vars(one))
        kernel = vars(module)[name]

        def flips_a_bit(*args: Tensor, kernel: Callable[..., None] = kernel) -> None:
            kernel(*args)
            args[-1].view(torch.int32)[1, 2] ^= 1 << 20

        with monkeypatch.context() as patch:
            patch.setitem(vars(module), name, flips_a_bit)
            found = difference(reference, traced(step))
        assert [found.site(row).op for row in found.starting("here")] == [f"inductor.{name}"]
    assert not len(difference(reference, traced(step)).rows)


def test_a_fused_line_that_the_user_changed_is_named():
    reference = traced(compiled_step(broken))
    torch._dynamo.reset()
    found = difference(reference, traced(compiled_step(changed())))
    graph, kernel = (found.describe(row) for row in found.starting("here"))
    assert (graph.op, kernel.op) == ("compiled.broken.graph", "inductor.cpp_fused_add_exp_1")
    line = f"tests/unit/{Path(__file__).name}:{changed.__code__.co_firstlineno + 4}"
    assert kernel.source[0] == f"fused: exp ({line}), add ({line})"


def origin_with_two_threads() -> str:
    """Train twice with a kernel whose threads add in any order; the op that is the origin."""
    torch.manual_seed(0)
    weight, index = torch.zeros(2, 64, requires_grad=True), torch.randint(0, 2, (20_000,))
    scale = torch.randn(20_000, 64)
    compiled = torch.compile(lambda: (functional.embedding(index, weight) * scale).sum())
    torch.set_num_threads(2)
    mode = HashMode()

    def run() -> StepTrace:
        weight.grad = None
        with mode:
            compiled().backward()
        assert mode.trace is not None
        return mode.trace

    run()
    reference = run()
    found = next(one for one in (difference(reference, run()) for _ in range(50)) if len(one.rows))
    (origin,) = {found.site(row).op for row in found.starting("here")}
    return origin


def test_the_kernel_that_adds_in_the_order_of_its_threads_is_the_origin():
    # in a process of its own: a fork of this one would wait for the second thread forever
    code = "import test_cpp_kernels; print(test_cpp_kernels.origin_with_two_threads())"
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    origin = done.stdout.split()[-1]
    assert origin.startswith("inductor.cpp_fused_")
    assert "embedding_dense_backward" in origin


def test_code_without_python_between_its_kernels_is_seen_as_a_whole():
    trace = traced(compiled_step(broken, cpp_wrapper=True))
    assert trace.program.opaque_regions == ("compiled.broken (cpp_wrapper)",)
    assert not any(site.is_kernel for site in trace.program.sites)


def test_memory_that_several_buffers_share_keeps_its_writers():
    trace = traced(compiled_step(broken, memory_planning=True))
    sites = trace.program.sites
    ops = [
        [sites[at].op or sites[at].role for at in site.inputs] for site in sites if site.is_kernel
    ]
    assert ops == [["input", "compiled.broken.inputs"], ["aten.mm.out"]]


@pytest.mark.gpu
def test_a_triton_kernel_is_a_row_with_its_lines():
    compiled = torch.compile(broken)
    x = torch.linspace(-1, 1, 32, device="cuda").reshape(4, 8)
    traces = [traced(lambda: compiled(x)) for _ in range(2)]
    assert not len(difference(*traces).rows)
    kernels = [site for site in traces[0].program.sites if site.is_kernel]
    assert all(site.op.startswith("inductor.triton_") for site in kernels)
    line = f"tests/unit/{Path(__file__).name}:{broken.__code__.co_firstlineno + 1}"
    assert kernels[-1].source[0] == f"fused: exp ({line}), add ({line})"
