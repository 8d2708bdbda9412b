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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in what Dynamo imports
def test_modules_that_dynamo_leaves_to_eager_code_keep_their_names() -> None:
    """What it leaves runs our hooks under its frame evaluation: compiled by themselves, they would do nothing."""
    torch._dynamo.reset()
    model = nn.Module()
    model.net = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    model.net.compile(backend=CompileCounter())
    mode = HashMode(model)
    for _ in range(3):
        with mode:
            model.net(torch.ones(2, 3))
        assert mode.trace is not None
        modules = {site.op: site.module for site in mode.trace.program.sites if site.op}
        assert modules["aten.addmm.default"] == "net.0"
        assert modules["aten.native_layer_norm.default"] == "net.1"
    torch._dynamo.reset()
