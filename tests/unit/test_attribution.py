import pytest
import torch
from attribution_models import MODELS, Gpt
from module_oracle import judge
from torch import nn

from det_callbacks.trace import backward
from det_callbacks.trace.hash_mode import HashMode

# the inner of two nested reentrant checkpoints: the outer one runs it without gradients first
# torch's, of hooks on inputs without gradients
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")

UNNAMED = {
    # gradients of views whose base was written after they were made: autograd makes them anew, where no op is
    "views": 12,
    # an autograd Function that calls nothing but a module
    "functions and a custom op": 1,
    # the same, and a full backward hook, which runs at a node that no op made
    "hooks": 3,
    # what a checkpoint repeats outside any module call
    "nested checkpoints": 26,
    "nested checkpoints, reentrant": 55,
    "gradient penalty": 72,
}
"""How many backward ops stay "?" although anomaly mode can tell their module."""


@pytest.mark.parametrize("name", MODELS)
def test_ops_belong_to_the_module_that_anomaly_mode_tells(name):
    found = judge(*MODELS[name]())
    assert sum(site.phase == "backward" for site, _ in found.judged) >= 10
    assert found.wrong == []
    assert len(found.unnamed) <= UNNAMED.get(name, 0), found.unnamed
    recomputed = [site for site in found.sites if site.recomputed]
    assert len(recomputed) > (40 if "checkpoint" in name else -1)
    assert {site.phase for site in recomputed} <= {"backward"}


def test_the_oracle_sees_a_map_that_is_one_node_off(monkeypatch):
    exact = backward.next_sequence_number
    monkeypatch.setattr(backward, "next_sequence_number", lambda: exact() + 1)
    assert judge(*MODELS["gpt"]()).unnamed
    monkeypatch.setattr(backward, "_fits", lambda _event, _name: True)
    assert judge(*MODELS["gpt"]()).wrong


class Sine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


def test_graphs_from_before_the_step_belong_nowhere():
    model = nn.Sequential(Sine(), Sine())
    x = torch.ones(2)
    before = model(torch.ones(2, requires_grad=True))
    mode = HashMode(model)
    with mode:
        model(x)  # has no node, so the last node before the step is the last one at its first op too
        (before * 2).sum().backward()
    backward = [site for site in mode.trace.program.sites if site.phase == "backward" and site.role == "output"]
    assert [(site.op, site.module) for site in backward] == [
        ("aten.mul.Tensor", ""),
        *[("aten.cos.default", "?"), ("aten.mul.Tensor", "?")] * 2,
    ]


def test_a_gradient_goes_by_the_first_name_of_a_tied_weight():
    model = Gpt()
    mode = HashMode(model)
    with mode:
        for _ in range(2):
            model(torch.randint(0, 11, (2, 6))).backward()
    names = {site.name: site.module for site in mode.trace.program.sites if (site.name or "").startswith("grad of tok")}
    assert names == {"grad of tok.weight": "tok"}
