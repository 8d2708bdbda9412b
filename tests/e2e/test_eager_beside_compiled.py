"""Tensors of compiled code beside those of the eager code of the same training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import COMPILING, generates_anew
from numerics_loops import loop, numerics_of
from torch import Tensor, nn

from det_callbacks import TrainingRun
from det_callbacks.runs.store import Run

pytestmark = [*COMPILING, pytest.mark.slow, pytest.mark.usefixtures("generates_anew")]
assert generates_anew


class Block(nn.Module):
    """Two norms and activations of the same lines; ``factor`` is in compiled code only."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        hidden = nn.functional.gelu(self.linear(hidden))
        if torch.compiler.is_compiling():
            hidden = hidden * self.factor
        return x + hidden


def record(folder: Path, *factors: float, calls: int = 1, **options: Any) -> Path:
    def model() -> nn.Module:
        net = nn.Sequential(*(Block(factor) for factor in factors), nn.Linear(8, 4))
        compiled = torch.compile(net)

        class Repeated(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = net

            def forward(self, x: Tensor) -> Tensor:
                return sum(compiled(x * (at + 1)) for at in range(calls))

        return Repeated()

    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    return loop(folder, model, inputs, **options)


@pytest.mark.parametrize("calls", [1, 3])
def test_each_tensor_of_compiled_code_is_measured_against_eager_code(calls, tmp_path):
    compiled = record(tmp_path / "compiled", 1.0, 1.0, calls=calls)
    eager = record(tmp_path / "eager", 1.0, 1.0, calls=calls, compiled="eager")
    numerics = numerics_of(eager, compiled)
    assert numerics.conclusion == "rounding"
    measured = [site for site in numerics.sites if "cpp_fused" in site.op]
    assert {site.phase for site in measured} == {"forward", "backward"}
    # of each call: the output of each norm and the last sum
    assert len([site for site in measured if site.phase == "forward"]) == 3 * calls
    assert len([site for site in numerics.sites if site.op == "aten.addmm.out"]) == 3 * calls
    assert all(site.within for site in numerics.sites)
    back = numerics_of(compiled, eager)
    assert back.conclusion == "rounding"
    assert len(back.sites) == len(numerics.sites)


def test_a_difference_beyond_rounding_starts_at_its_kernel(tmp_path):
    eager = record(tmp_path / "eager", 1.0, 1.001, compiled="eager")
    numerics = numerics_of(eager, record(tmp_path / "compiled", 1.0, 1.001))
    assert numerics.conclusion == "change"
    jump = numerics.first_jump
    assert jump.op.startswith("inductor.cpp_fused_")
    assert jump.source[0].startswith("fused: ")
    of_line = [site for site in numerics.sites if site.op == "aten.addmm.out"]
    assert [site.within for site in of_line] == [True, True, False]


def test_which_op_makes_a_tensor_is_not_part_of_the_kind_of_its_site(tmp_path):
    program = Run.open(record(tmp_path / "run", 1.0)).view(rank=0, segment=0, step=0).program
    known = [site for site in program.sites if site.eager_op]
    assert {site.eager_op for site in known} >= {
        "aten.native_layer_norm.default",
        "aten.addmm.default",
        "aten.gelu_backward.default",
    }
    assert {site.eager_calls for site in known if site.op == "aten.addmm.out"} == {1}


@pytest.mark.parametrize("dynamic", [True, None])
def test_a_graph_for_any_size_is_recorded(dynamic, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model, optimizer = torch.compile(net, dynamic=dynamic), torch.optim.SGD(net.parameters(), 0.1)
    run = TrainingRun(tmp_path / "run", mode="record", model=net, optimizers=optimizer)
    with run:
        for size in (4, 6, 5):
            batch = torch.randn(size, 4)
            with run.step(batch):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    sites = Run.open(tmp_path / "run").view(rank=0, segment=0, step=2).program.sites
    assert any(site.eager_op == "aten.relu.default" for site in sites)
