"""Where a difference starts when parts of a step are compiled."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiling import COMPILING, NUDGE, batch, difference, net, nudged, opaque_backend, origins, restored, train
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from tracing import step_of, traced

from det_callbacks.errors import SelectionError
from det_callbacks.trace.hash_mode import HashMode
from det_callbacks.trace.selection import Selection
from det_callbacks.trace.steps import StepTrace

pytestmark = COMPILING


def test_one_ulp_in_an_input_comes_in_from_outside(backend: Any) -> None:
    model = net()
    compiled = torch.compile(model, backend=backend)
    train(compiled)()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    reference = restored(model, state, lambda: traced(train(compiled, batch()), model))
    current = restored(model, state, lambda: traced(train(compiled, nudged(batch())), model))
    found = difference(reference, current)
    first = found.divergences[0]
    assert (first.phase, first.op, first.is_origin) == ("input", "", False)
    entering = next(item for item in found.divergences if item.op == "compiled.Net_forward.inputs")
    assert (entering.name, entering.is_origin) == ("x", False)
    assert found.origins == ()


def test_one_ulp_that_nobody_saw_being_written_is_no_origin(backend: Any) -> None:
    model = net()
    compiled = torch.compile(model, backend=backend)
    train(compiled)()
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def body(is_nudged: bool) -> None:
        x = batch() * 3
        if is_nudged:
            x.numpy()[1, 1] += 1e-6
        train(compiled, x)()

    reference = restored(model, state, lambda: traced(lambda: body(False), model))
    current = restored(model, state, lambda: traced(lambda: body(True), model))
    first = difference(reference, current).divergences[0]
    assert (first.op, first.name, first.is_origin) == ("compiled.Net_forward.inputs", "x", None)


def test_one_ulp_inside_is_the_ops_where_each_is_seen_and_the_regions_else(backend: Any) -> None:
    model = net()
    compiled = torch.compile(model, backend=backend)
    train(compiled)()
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def run(is_nudged: bool) -> StepTrace:
        NUDGE["twice"] = is_nudged
        return restored(model, state, lambda: traced(train(compiled), model))

    found = difference(run(False), run(True))
    first = found.divergences[0]
    assert first.op == "det_tests.twice.default"
    if backend == "aot_eager":
        assert first.is_origin is True
    else:
        assert first.is_origin is None
        assert {op for op, _ in origins(found)} <= {"compiled.Net_forward.inside", "compiled.Net_forward.outputs"}
        assert ("compiled.Net_forward.inside", None) in origins(found)


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


def test_a_difference_in_the_eager_part_is_the_eager_ops(backend: Any) -> None:
    model = net()
    model.blocks.compile(backend=backend)
    train(model)()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    factor = {"value": 1.0}

    def body() -> None:
        (model(batch()) * factor["value"]).sum().backward()

    reference = restored(model, state, lambda: traced(body, model))
    factor["value"] = 1.0000001
    current = restored(model, state, lambda: traced(body, model))
    assert origins(difference(reference, current))[0] == ("aten.mul.Tensor", None)


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


def test_interpreted_graphs_name_op_module_and_line(backend: Any) -> None:
    eager = net()
    plain = traced(train(eager), eager)
    model = net()
    compiled = torch.compile(model, backend=backend)
    trace = traced(train(compiled), model, compiled="interpret")
    assert trace.program.opaque_regions == ()
    computed = ("forward", "backward")

    def ops(step: StepTrace) -> list[tuple[str, str, str]]:
        return [
            (site.phase, site.module, site.op)
            for site in step.program.sites
            if site.phase in computed and site.role == "output" and not site.op.startswith("compiled.")
        ]

    assert ops(trace) == ops(plain), "as if nothing had been compiled"
    assert [
        int(digest)
        for site, digest in zip(trace.program.sites, trace.digests, strict=True)
        if (site.phase, site.role) == ("state", "named")
    ] == [
        int(digest)
        for site, digest in zip(plain.program.sites, plain.digests, strict=True)
        if (site.phase, site.role) == ("state", "named")
    ]
    line = next(site.source[0] for site in trace.program.sites if site.op == "det_tests.twice.default")
    assert line.endswith("in forward")


def test_interpreting_goes_back_to_the_modules_that_run() -> None:
    model = net()
    model.blocks[0].compile(backend="aot_eager")
    trace = traced(train(model), model, compiled="interpret")
    assert next(site.module for site in trace.program.sites if site.op == "aten.addmm.default") == "blocks.0.linear"
    last = [site.module for site in trace.program.sites if site.op == "aten.addmm.default" and site.phase == "forward"]
    assert last == ["blocks.0.linear", "blocks.1.linear", "head"]


def test_interpret_or_run() -> None:
    with pytest.raises(SelectionError, match="compiled must be one of run, interpret"):
        HashMode(compiled="eager")
    selection = Selection(compiled="interpret")
    assert Selection.from_dict(selection.to_dict()) == selection
    assert "compiled" not in Selection().to_dict(), "runs from before there was a choice are equal to the default"


def test_kernels_of_inductor_are_seen_by_name_and_put_back() -> None:
    """No GPU is here: the launcher is a function in Python, called by inductor's own ``run``."""
    launched = CachingAutotuner.run
    factor = {"value": 2.0}

    def kernel_for(name: str) -> Any:
        def launch(source: Tensor, target: Tensor, size: int, *, stream: Any) -> None:
            target.numpy()[...] = source.numpy() * factor["value"]

        kernel = CachingAutotuner.__new__(CachingAutotuner)
        kernel.triton_meta = {"signature": {"in_ptr0": "*fp32", "out_ptr0": "*fp32", "xnumel": "i32"}}
        kernel.mutated_arg_names = []
        kernel.fn = SimpleNamespace(__name__=name)
        kernel._cached_launcher = launch
        return kernel

    kernels = [kernel_for("triton_poi_fused_mul_0"), kernel_for("triton_poi_fused_mul_1")]

    def compiler(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            first, second = torch.empty_like(args[0]), torch.empty_like(args[0])
            kernels[0].run(args[0], first, 6, stream=None)
            kernels[1].run(first, second, 6, stream=None)
            return (second,)

        return make_boxed_func(run)

    compiled = torch.compile(lambda x: x * 4, backend=aot_autograd(fw_compiler=compiler))
    with torch.no_grad():
        reference = traced(lambda: compiled(torch.ones(2, 3)))
        factor["value"] = 3.0
        current = traced(lambda: compiled(torch.ones(2, 3)))
    names = [site.op for site in reference.program.sites if site.op.startswith("triton.")]
    assert names == ["triton.triton_poi_fused_mul_0", "triton.triton_poi_fused_mul_1"]
    found = difference(reference, current)
    assert (found.divergences[0].op, found.divergences[0].is_origin) == ("triton.triton_poi_fused_mul_0", None)
    assert [op.rpartition(".")[2] for op, _ in origins(found)] == ["inside"]
    assert CachingAutotuner.run is launched
