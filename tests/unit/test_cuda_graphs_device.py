"""CUDA graphs that inductor makes on a GPU: a run repeats itself, and nothing waits."""

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
