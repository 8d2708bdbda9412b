"""CUDA graphs that inductor makes on a GPU: a run repeats itself, and nothing waits."""

import pytest
import torch
from compiling import COMPILING, difference
from late_device import forbid_waiting
from torch import nn
from tracing import assert_same

from det_callbacks.runs.steps import StepTrace
from det_callbacks.trace.hash_mode import HashMode

pytestmark = [*COMPILING, pytest.mark.gpu]


def traces(fault_at: int = -1) -> list[StepTrace]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).cuda()
    compiled = torch.compile(model, mode="reduce-overhead")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mode = HashMode(model)
    found = []
    for number, batch in enumerate(torch.randn(6, 16, 64).cuda()):
        mode.begin(batch=batch)
        forbid_waiting(number >= 4)
        try:
            torch.compiler.cudagraph_mark_step_begin()
            optimizer.zero_grad()
            compiled(batch * 1.5 if number == fault_at else batch).square().mean().backward()
            optimizer.step()
        finally:
            forbid_waiting(False)
        trace = mode.finish()
        assert trace is not None
        found.append(trace)
    return found


# inductor's, on GPUs that have them
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_reduce_overhead():
    reference = traces()
    assert len({trace.program.id for trace in reference[1:]}) == 1
    for one, other in zip(reference, traces(), strict=True):
        assert_same(one, other)
    current = traces(fault_at=4)
    assert not difference(reference[3], current[3]).divergences
    assert difference(reference[4], current[4]).divergences
