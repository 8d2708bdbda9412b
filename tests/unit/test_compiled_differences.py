"""Where a difference starts when parts of a step are compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import COMPILING, NUDGE, batch, difference, net, nudged, opaque_backend, origins, restored, train
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from tracing import step_of, traced

from det_callbacks.compare.differences import StepDifference
from det_callbacks.runs.steps import StepTrace
from det_callbacks.trace.hash_mode import HashMode

pytestmark = COMPILING


def changed(backend: Any, step: Callable[[Any, bool], None]) -> StepDifference:
    """Return what differs between a step of a compiled network and the same one with a change."""
    model = net()
    compiled = torch.compile(model, backend=backend)
    train(compiled)()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    reference = restored(model, state, lambda: traced(lambda: step(compiled, False), model))
    return difference(reference, restored(model, state, lambda: traced(lambda: step(compiled, True), model)))


def test_one_ulp_in_an_input_comes_in_from_outside(backend: Any) -> None:
    given = {False: batch(), True: nudged(batch())}
    found = changed(backend, lambda compiled, is_nudged: train(compiled, given[is_nudged])())
    first = found.divergences[0]
    assert (first.phase, first.op, first.is_origin) == ("input", "", False)
    entering = next(item for item in found.divergences if item.op == "compiled.Net_forward.inputs")
    assert (entering.name, entering.is_origin) == ("x", False)
    assert found.origins == ()


def test_one_ulp_that_nobody_saw_being_written_is_no_origin(backend: Any) -> None:
    def step(compiled: Any, is_nudged: bool) -> None:
        x = batch() * 3
        if is_nudged:
            x.numpy()[1, 1] += 1e-6
        train(compiled, x)()

    first = changed(backend, step).divergences[0]
    assert (first.op, first.name, first.is_origin) == ("compiled.Net_forward.inputs", "x", None)


def test_one_ulp_inside_is_the_regions(backend: Any) -> None:
    def step(compiled: Any, is_nudged: bool) -> None:
        NUDGE["twice"] = is_nudged
        train(compiled)()

    found = changed(backend, step)
    first = found.divergences[0]
    assert (first.op, first.is_origin) == ("det_tests.twice.default", None)
    assert {op for op, _ in origins(found)} == {"compiled.Net_forward.outputs"}
    assert {origin.phase for origin in found.origins} == {"forward"}, "the backward pass may read what the op gave"


def test_a_fused_kernel_that_computes_something_else_is_the_regions() -> None:
    kernels = {"factor": 1.0}

    def compiler(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            outputs = graph.forward(*args)
            outputs[0].numpy()[...] *= kernels["factor"]  # no dispatch, as in a kernel of inductor's
            return outputs

        return make_boxed_func(run)

    model = nn.Linear(3, 3)
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=compiler))
    with torch.no_grad():
        reference = traced(lambda: compiled(torch.ones(2, 3)), model)
        kernels["factor"] = 1.5
        current = traced(lambda: compiled(torch.ones(2, 3)), model)
    found = difference(reference, current)
    assert origins(found) == [("compiled.Linear_forward.outputs", None)]
    assert found.divergences[0].op == "compiled.Linear_forward.outputs"


def test_another_graph_is_a_difference_in_structure() -> None:
    compiled = torch.compile(lambda x: x * x.shape[0], backend=opaque_backend())
    mode = HashMode()
    with torch.no_grad():
        reference = step_of(mode, lambda: compiled(torch.ones(4, 2)))
        step_of(mode, lambda: compiled(torch.ones(5, 2)))  # compiles for any size, and is preferred from here on
        current = step_of(mode, lambda: compiled(torch.ones(4, 2)))
    assert counters["stats"]["unique_graphs"] == 2
    first = difference(reference, current).divergences[0]
    assert (first.op.rpartition(".")[2], first.kind, first.is_origin) == ("graph", "structure", True)


def test_eager_steps_are_those_of_the_code_that_was_compiled(backend: Any) -> None:
    plain_model, model = net(), net()
    trained = torch.compile(model, backend=backend)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    train(trained)()  # compiled before: it runs as eager code all the same
    assert counters["stats"]["unique_graphs"] == 1
    plain = restored(plain_model, state, lambda: traced(train(plain_model), plain_model))
    root = nn.ModuleDict({"net": trained})
    trace = restored(model, state, lambda: traced(train(trained), root, compiled="eager"))
    with torch.compiler.set_stance("force_eager"):
        train(trained)()
    assert trace.program.opaque_regions == ()

    def seen(step: StepTrace) -> list[tuple[str, str, str, str, int]]:
        return [
            (site.phase, site.module.removeprefix("net._orig_mod").lstrip("."), site.op, site.source[0], int(digest))
            for site, digest in zip(step.program.sites, step.digests, strict=True)
            if site.phase in ("forward", "backward") and site.role == "output"
        ]

    assert seen(trace) == seen(plain), "as if nothing had been compiled"
    train(trained)()
    assert counters["stats"]["unique_graphs"] == 1, "what was compiled goes on"


@pytest.mark.parametrize("level", ["op", "state"])
def test_the_stance_of_an_eager_step_ends_with_it(level: str) -> None:
    ran = []

    def compiler(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            ran.append(1)
            return graph.forward(*args)

        return run

    compiled = torch.compile(lambda x: x * 2, backend=compiler)
    mode = HashMode(level=level, compiled="eager")
    step_of(mode, lambda: compiled(torch.ones(2)))
    with pytest.raises(ZeroDivisionError), mode:
        raise ZeroDivisionError
    assert not ran
    compiled(torch.ones(2))
    assert ran
