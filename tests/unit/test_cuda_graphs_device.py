"""CUDA graphs on a GPU: a captured step, and reduce-overhead; a run repeats itself, and nothing waits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import COMPILING, difference
from late_device import forbid_waiting
from torch import Tensor, nn
from tracing import assert_same

from det_callbacks.runs.steps import StepTrace
from det_callbacks.trace.hash_mode import HashMode

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytestmark = [*COMPILING, pytest.mark.gpu, needs_gpu]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).cuda()


def batches(num_steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 64, generator=generator).cuda() for _ in range(num_steps)]


def traces_of(model: nn.Module, step: Callable[[Tensor], Any], *, first_step: int) -> list[StepTrace]:
    """Return the traces of six steps; from one of them on nothing may wait for the device within."""
    mode = HashMode(model)
    traces = []
    for number, batch in enumerate(batches(6)):
        mode.begin(batch=batch)
        forbid_waiting(number >= first_step)
        try:
            step(batch)
        finally:
            forbid_waiting(False)
        trace = mode.finish()
        assert trace is not None
        traces.append(trace)
    return traces


def whole_step(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a step that replays forward and backward pass and the update, as torch's notes on CUDA graphs have it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    static = torch.zeros(16, 64, device="cuda")

    def run() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(static).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    state = {name: value.clone() for name, value in model.state_dict().items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = run()
    model.load_state_dict(state)

    def step(batch: Tensor) -> Tensor:
        static.copy_(batch)
        graph.replay()
        return loss * 2

    return step


def test_a_captured_step_is_seen_from_outside() -> None:
    def traces(fault: bool = False) -> list[StepTrace]:
        model = network()
        step = whole_step(model)

        def nudged(batch: Tensor) -> None:
            step(batch)
            if fault:
                with torch.no_grad():
                    model[0].weight.add_(1e-3)

        return traces_of(model, nudged, first_step=1)

    reference = traces()
    for one, other in zip(reference, traces(), strict=True):
        assert_same(one, other)
    assert reference[5].program.ops_skipped["replayed"] == 1
    assert len({int(trace.digests[-1]) for trace in reference}) > 1, "the weights changed"
    current = traces(fault=True)
    assert difference(reference[0], current[0]).divergences
    assert all(
        origin.op == "aten.add_.Tensor" for one, other in zip(reference, current, strict=True)
        for origin in difference(one, other).origins
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # inductor's, on GPUs that have them
def test_reduce_overhead() -> None:
    def traces(fault_at: int = -1) -> list[StepTrace]:
        torch._dynamo.reset()
        model = network()
        compiled = torch.compile(model, mode="reduce-overhead")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        numbers = iter(range(6))

        def step(batch: Tensor) -> None:
            if next(numbers) == fault_at:
                batch = batch * 1.5
            torch.compiler.cudagraph_mark_step_begin()
            optimizer.zero_grad()
            compiled(batch).square().mean().backward()
            optimizer.step()

        # warmed up, captured, and then replayed
        return traces_of(model, step, first_step=4)

    reference = traces()
    assert len({trace.program.id for trace in reference[1:]}) == 1
    for one, other in zip(reference, traces(), strict=True):
        assert_same(one, other)
    current = traces(fault_at=4)
    assert not difference(reference[3], current[3]).divergences
    assert difference(reference[4], current[4]).divergences
