"""compare_compiled: eager against compiled, and what is not compiled is no result."""

import copy
from typing import Any

import pytest
import torch
from compiling import COMPILING
from numerics_models import MODELS, Apply, Transformer, mlp, state_of
from torch import fx
from torch._dynamo import config as dynamo_config

from det_callbacks import ModuleRunError, NothingComparedError, compare_compiled

pytestmark = [*COMPILING, pytest.mark.usefixtures("single_thread")]


def test_aot_eager_is_equal_and_was_compiled():
    model, inputs = MODELS["tied with dropout"]()
    before = state_of(model)
    report = compare_compiled(model, inputs, backend="aot_eager", iterations=2)
    assert report.equal, str(report)
    assert (report.control, *report.notes[:1]) == (
        "compiled Transformer",
        "1 graph compiled by aot_eager",
    )
    assert "_orig_mod" not in str([found.name for found in report.comparisons])
    assert state_of(model) == before


@pytest.mark.slow
def test_inductor_is_within_tolerance():
    model, inputs = MODELS["transformer"]()
    report = compare_compiled(model, inputs, iterations=3)
    assert report.close, str(report)
    assert not report.equal, (
        "fused kernels round otherwise; without a difference nothing of this was looked at"
    )
    assert "compiled by inductor" in report.notes[0]
    assert {"output", "gradient"} <= {found.phase for found in report.differing}


def drop_an_addition(graph: fx.GraphModule, example_inputs: Any) -> Any:
    """A backend that transforms the graph wrongly."""
    graph = copy.copy(graph)
    addition = [node for node in graph.graph.nodes if "add" in str(node.target)][-1]
    addition.replace_all_uses_with(addition.args[0])
    graph.graph.erase_node(addition)
    graph.recompile()
    return graph.forward


def test_a_backend_that_drops_a_residual_is_found():
    torch.manual_seed(0)
    model = Transformer(layers=1)
    report = compare_compiled(
        model, torch.randint(50, (2, 8)), backend=drop_an_addition, iterations=2
    )
    assert (report.first.iteration, report.first.phase, report.first.name) == (
        0,
        "output",
        "output",
    )
    assert report.first.excess > 100
    assert report.notes[0].startswith("1 graph compiled by drop_an_addition")


def test_giving_up_after_recompilations_is_an_error():
    """Dynamo would go on in eager mode, which agrees with itself."""

    branching = Apply(lambda weight, x, power: weight * x * str(power).count("1"))
    with (
        dynamo_config.patch(recompile_limit=2),
        pytest.raises(ModuleRunError, match="in iteration 2"),
    ):
        compare_compiled(
            branching, lambda i: (torch.ones(2, 4), str(i)), backend="eager", iterations=4
        )


def failing(graph: Any, example_inputs: Any) -> Any:
    raise RuntimeError("no kernels today")


@pytest.mark.parametrize(
    ("module", "options", "error", "words"),
    [
        (
            Apply(torch.compiler.disable(lambda weight, x: weight * x[:, :4])),
            {},
            NothingComparedError,
            "No compiled",
        ),
        (mlp(), {"backend": failing}, ModuleRunError, r"control[\s\S]*no kernels today"),
        (mlp(), {"mode": "max-autotune"}, ValueError, "takes none"),
        (torch.relu, {}, TypeError, r"torch\.nn\.Module"),
        (torch.compile(mlp(), backend="eager"), {}, ValueError, "compiled already"),
    ],
)
def test_what_cannot_be_compared_is_no_result(module, options, error, words):
    with pytest.raises(error, match=words):
        compare_compiled(
            module, torch.ones(2, 16), **{"backend": "eager", "iterations": 1, **options}
        )
