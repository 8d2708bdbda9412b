"""Which module an op belongs to, told by anomaly mode and the Python stack alone.

An op of the forward pass, or of a recomputation, belongs to the innermost frame of a module on its
stack. An op of a backward pass belongs to the innermost such frame on the stack that anomaly mode
kept of the moment when the running node was made; a node that was made by another node (double
backward) belongs where that one does.
"""

import re
import sys
from collections.abc import Callable, Iterable
from traceback import walk_stack
from typing import Any, NamedTuple

import pytest
import torch
from attribution_models import MODELS
from numerics_models import Transformer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from det_callbacks.runs.program import Site
from det_callbacks.trace import backward
from det_callbacks.trace.hash_mode import HashMode

# torch's, of hooks on inputs without gradients
pytestmark = pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad=True:UserWarning"
)

UNNAMED = {
    # gradients of views whose base was written after they were made:
    # autograd makes them anew, where no op is
    "views": 12,
    # a full backward hook runs at a node that no op made
    "hooks": 1,
}
"""How many backward ops stay "?" although anomaly mode can tell their module."""


_NAMED_FRAME = re.compile(r'File "<module (.*?)>", line')
_ENGINE_FRAME = re.compile(r'torch/autograd/graph\.py", line \d+, in _engine_run_backward')


class Truth(NamedTuple):
    """What the oracle knows of an op; ``module`` is None where it cannot tell."""

    module: str | None
    recomputed: bool


class OracleMode(TorchDispatchMode):
    """Notes the truth about each site; to be opened above the HashMode that makes the sites."""

    def __init__(self, mode: HashMode, model: nn.Module) -> None:
        super().__init__()
        self.truths: dict[int, Truth] = {}
        self._recorder = mode.recorder
        self._owners = {
            id(value): name.rpartition(".")[0]
            for name, value in reversed([*model.named_parameters()])
        }

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        truth = self._truth()
        first = self._recorder.num_sites
        out = func(*args, **(kwargs or {}))
        self.truths.update(dict.fromkeys(range(first, self._recorder.num_sites), truth))
        return out

    def _truth(self) -> Truth:
        in_backward = torch._C._current_graph_task_id() != -1
        recomputed = False
        module: str | None = None
        for frame, _ in walk_stack(sys._getframe(1)):
            filename, function = frame.f_code.co_filename, frame.f_code.co_name
            if filename.startswith("<module ") and module is None:
                module = filename[8:-1]
            if filename.endswith("torch/autograd/graph.py") and function == "_engine_run_backward":
                break
            recomputed |= in_backward and filename.endswith("torch/utils/checkpoint.py")
        if not in_backward:
            return Truth(module or "", False)
        node = torch._C._current_autograd_node()
        if module is not None or node is None or recomputed:
            return Truth(module, recomputed)
        return Truth(self._owner(node), False)

    def _owner(self, node: Any) -> str | None:
        if node.name() == "torch::autograd::AccumulateGrad":
            return self._owners.get(id(node.variable))
        for line in reversed(node.metadata["traceback_"]):
            named = _NAMED_FRAME.search(line)
            if named is not None:
                return named[1]
            if _ENGINE_FRAME.search(line):
                parent = node.metadata.get("parent_")
                return None if parent is None else self._owner(parent)
        return ""


class Attributions(NamedTuple):
    """All sites, and of those that the oracle has a word on the ones that are
    wrong, or have no module.
    """

    sites: tuple[Site, ...]
    wrong: list[tuple[Site, Truth]]
    unnamed: list[Site]


def judge(model: nn.Module, step: Callable[[], None]) -> Attributions:
    mode = HashMode(model)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        for _ in range(2):
            with mode, OracleMode(mode, model) as oracle:
                step()
    sites = mode.trace.program.sites
    told = [(sites[at], truth) for at, truth in oracle.truths.items() if truth.module is not None]
    judged = [(site, truth) for site, truth in told if site.role in ("output", "value")]
    assert sum(site.phase == "backward" for site, _ in judged) >= 10
    wrong = [
        (site, truth)
        for site, truth in judged
        if site.module not in (truth.module, "?") or site.recomputed != truth.recomputed
    ]
    return Attributions(sites, wrong, [site for site, _ in judged if site.module == "?"])


@pytest.mark.parametrize("name", MODELS)
def test_ops_belong_to_the_module_that_anomaly_mode_tells(name):
    found = judge(*MODELS[name]())
    assert found.wrong == []
    assert len(found.unnamed) <= UNNAMED.get(name, 0), found.unnamed
    recomputed = [site for site in found.sites if site.recomputed]
    assert len(recomputed) > (40 if "checkpoint" in name else -1)
    assert {(site.phase, site.module == "?") for site in recomputed} <= {("backward", False)}


def test_the_oracle_sees_a_map_that_is_one_node_off(monkeypatch):
    exact = backward.next_sequence_number
    monkeypatch.setattr(backward, "next_sequence_number", lambda: exact() + 1)
    assert judge(*MODELS["transformer"]()).unnamed
    monkeypatch.setattr(backward, "is_maker", lambda _op, _name: True)
    assert judge(*MODELS["transformer"]()).wrong


def test_graphs_from_before_the_step_belong_nowhere():
    model = nn.Sequential(nn.Tanh(), nn.Tanh())
    x = torch.ones(2)
    before = model(torch.ones(2, requires_grad=True))
    mode = HashMode(model)
    with mode:
        # has no node, so the last node before the step is the last one at its first op too
        model(x)
        (before * 2).sum().backward()
    backward = [
        site
        for site in mode.trace.program.sites
        if site.phase == "backward" and site.role == "output"
    ]
    own, unknown = ("aten.mul.Tensor", ""), ("aten.tanh_backward.default", "?")
    assert [(site.op, site.module) for site in backward] == [own, unknown, unknown]


def test_a_gradient_goes_by_the_first_name_of_a_tied_weight():
    model = Transformer(width=8, is_tied=True)
    mode = HashMode(model)
    with mode:
        for _ in range(2):
            model(torch.randint(50, (2, 6))).sum().backward()
    named = {
        site.name: site.module
        for site in mode.trace.program.sites
        if (site.name or "").startswith("grad of ")
    }
    assert named["grad of tokens.weight"] == "tokens"
    assert "grad of head.weight" not in named
