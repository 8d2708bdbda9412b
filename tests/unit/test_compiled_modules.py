import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from det_callbacks.trace.hash_mode import HashMode


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # our hooks are global on purpose
def test_a_compiled_module_is_not_compiled_anew_in_each_step():
    torch._dynamo.reset()
    counter = CompileCounter()
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    compiled = torch.compile(model, backend=counter)
    with torch.no_grad():
        for _ in range(2):
            mode = HashMode(model)
            for _ in range(4):
                with mode:
                    compiled(torch.ones(2, 3))
    assert counter.frame_count == 1
    torch._dynamo.reset()
