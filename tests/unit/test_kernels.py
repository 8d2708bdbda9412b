"""The kernels that inductor generated: a row each, with what it reads, and the user's lines."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from compiling import COMPILING, backend_of, difference, ends
from torch import Tensor
from tracing import assert_same, traced

from det_callbacks.causes.sentences import describe
from det_callbacks.runs.program import Site
from det_callbacks.runs.steps import Expectation, StepTrace
from det_callbacks.trace.compiled import graphs
from det_callbacks.trace.compiled.generated_code import read_code
from det_callbacks.trace.compiled.kernels import SEEN_KERNELS
from det_callbacks.trace.compiled.replaced import REPLACED
from det_callbacks.trace.hash_mode import HashMode

pytestmark = COMPILING

_GENERATED = """
from torch._inductor.select_algorithm import extern_kernels

empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
async_compile = AsyncCompile()


# kernel path: /tmp/x.py
# Topologically Sorted Source Nodes: [y, z], Original ATen: [aten.mul, aten.sin]
# Source node to ATen node mapping:
#   y => mul
triton_poi_fused_mul_sin_0 = async_compile.triton('triton_poi_fused_mul_sin_0', \'\'\'
import triton
\'\'\', device_str='cuda')


# Topologically Sorted Source Nodes: [w], Original ATen: [aten.cos]
triton_poi_fused_cos_1 = async_compile.triton('triton_poi_fused_cos_1', \'\'\' \'\'\', device_str='cuda')


triton_poi_fused_add_2 = async_compile.triton('triton_poi_fused_add_2', \'\'\' \'\'\', device_str='cuda')


async_compile.wait(globals())
del async_compile

class Runner:
    def call(self, args):
        arg0_1, arg1_1 = args
        args.clear()
        buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
        triton_poi_fused_mul_sin_0.run(arg0_1, buf0, 32, stream=0)
        buf1 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
        # Topologically Sorted Source Nodes: [mm], Original ATen: [aten.mm]
        extern_kernels.mm(buf0, arg1_1, out=buf1)
        buf2 = buf0; del buf0  # reuse
        triton_poi_fused_cos_1.run(buf1, buf2, 32, stream=0)
        del buf1
        triton_poi_fused_add_2.run(buf2, arg1_1, 32, stream=0)
        return (buf2, )

runner = Runner()
call = runner.call
"""  # noqa: E501  # a text


class Autotuner:
    """Has what inductor's CachingAutotuner has of a kernel."""

    def __init__(
        self, compute: Callable[..., None], names: list[str], changed: tuple[str, ...] = ()
    ) -> None:
        self.compute, self.mutated_arg_names = compute, [*changed]
        self.configure(64)
        self.triton_meta = {
            "signature": {**dict.fromkeys(names, "*fp32"), "xnumel": "i32", "XBLOCK": "constexpr"}
        }

    def configure(self, block: int) -> None:
        config = SimpleNamespace(kwargs={"XBLOCK": block}, num_warps=4, num_stages=1)
        self.launchers = [SimpleNamespace(config=config)]

    def run(self, *args: Any, stream: int) -> None:
        torch.ones(3).add(1)  # as autotuning does
        self.compute(*args[:-1])


def _add_in_place(buffer: Tensor, w: Tensor) -> None:
    buffer.add_(w[:4])


class Graph:
    """A compiled graph of inductor's."""

    cache_key = "generated"

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, inputs: list[Any]) -> Any:
        return self.call(inputs)


def function(x: Tensor, weight: Tensor) -> Tensor:
    y = x * 2
    z = y.sin()
    w = torch.mm(z, weight).cos()
    return w + weight[:4]


FIRST_LINE = function.__code__.co_firstlineno


def generated(text: str, kernels: dict[str, Any], path: Path) -> ModuleType:
    """Return a module as inductor generates it, whose kernels are stand-ins."""
    path.write_text(text)
    module = ModuleType("generated")
    compiler = type(
        "Compiler",
        (),
        {"triton": lambda *_, **__: None, "wait": lambda _, names: names.update(kernels)},
    )
    vars(module).update(key=f"{path}", __file__=str(path), torch=torch, AsyncCompile=compiler)
    exec(compile(text, str(path), "exec"), vars(module))
    return module


@pytest.fixture
def kernels() -> dict[str, Any]:
    def mul_sin(x: Tensor, out: Tensor) -> None:
        out.copy_((x * 2).sin())

    def cos(x: Tensor, out: Tensor) -> None:
        out.copy_(x.cos())

    return {
        "triton_poi_fused_mul_sin_0": Autotuner(mul_sin, ["in_ptr0", "out_ptr0"]),
        "triton_poi_fused_cos_1": Autotuner(cos, ["in_ptr0", "out_ptr0"]),
        "triton_poi_fused_add_2": Autotuner(
            _add_in_place, ["in_out_ptr0", "in_ptr0"], ("in_out_ptr0",)
        ),
    }


@pytest.fixture
def module(kernels: dict[str, Any], tmp_path: Path) -> ModuleType:
    return generated(_GENERATED, kernels, tmp_path / "generated.py")


@pytest.fixture
def step(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a step of a compiled function whose graph runs the module."""
    from torch._inductor import codecache, output_code

    monkeypatch.setattr(REPLACED, "_inductor", {})  # else it knows the class that was there before
    monkeypatch.setattr(output_code, "CompiledFxGraph", Graph)
    monkeypatch.setattr(codecache.PyCodeCache, "modules", [module])
    monkeypatch.setattr(Graph, "cache_key", vars(module)["key"])
    compiled = torch.compile(
        function, backend=backend_of(lambda _, *inputs: Graph(vars(module)["call"])([*inputs]))
    )
    x, weight = torch.linspace(-1, 1, 32).reshape(4, 8), torch.linspace(0, 1, 64).reshape(8, 8)

    def run() -> None:
        with torch.no_grad():
            compiled(x, weight).exp()

    return run


def inner(trace: StepTrace) -> list[Site]:
    """Return the sites of kernels, and of ops inside the region."""
    return [
        site
        for site in trace.program.sites
        if site.op.startswith("inductor.") or site.op.endswith(".out")
    ]


def read_by(trace: StepTrace, site: Site) -> list[str]:
    """Return what a site reads: the ops, and the numbers of inputs."""
    sites = trace.program.sites
    return [sites[at].op.rpartition("fused_")[2] or f"input {at}" for at in site.inputs]


def test_each_kernel_is_a_row_with_what_it_reads(step):
    trace = traced(step)
    mul_sin, mm, cos, add = inner(trace)
    assert [site.op for site in inner(trace)] == [
        "inductor.triton_poi_fused_mul_sin_0",
        "aten.mm.out",
        "inductor.triton_poi_fused_cos_1",
        "inductor.triton_poi_fused_add_2",
    ]
    assert read_by(trace, mul_sin) == ["input 3", "compiled.function.inputs"]
    assert read_by(trace, mm) == ["input 4", "compiled.function.inputs", "mul_sin_0"]
    assert read_by(trace, cos) == ["aten.mm.out"], "the buffer that it reuses holds nothing for it"
    assert read_by(trace, add) == ["input 4", "compiled.function.inputs", "cos_1"], "in place"
    (out,) = ends(trace, "outputs")
    assert read_by(trace, out) == ["add_2"]
    assert trace.program.opaque_regions == ()
    assert "aten.add.Tensor" not in {site.op for site in trace.program.sites}, (
        "what a launch does is no op of the step"
    )
    assert_same(trace, traced(step))


def test_a_kernel_has_the_lines_of_the_nodes_that_it_computes(step):
    mul_sin, mm, cos, add = inner(traced(step))
    first, second, third = (
        f"tests/unit/{Path(__file__).name}:{FIRST_LINE + at}" for at in (1, 2, 3)
    )
    lines = f"{first} in function", f"{second} in function"
    assert mul_sin.source == (f"fused: mul ({first}), sin ({second})", *lines)
    assert mm.source == cos.source == (f"{third} in function",)
    assert add.source == (), "inductor says nothing of it"


@pytest.mark.parametrize("number", [0, 2, 3])
def test_an_origin_inside_a_region_is_the_kernel(number, step, kernels):
    mode = HashMode()

    def run(expected: Expectation | None = None) -> StepTrace:
        mode.begin(expected=expected)
        step()
        trace = mode.finish()
        assert trace is not None
        return trace

    reference = run()
    op = inner(reference)[number].op
    kernel = kernels[op.removeprefix("inductor.")]
    compute = kernel.compute

    def flips_a_bit(*tensors: Tensor) -> None:
        compute(*tensors)
        written = tensors[0] if kernel.mutated_arg_names else tensors[-1]
        written.view(torch.int32)[1, 2] ^= 1 << 20

    kernel.compute = flips_a_bit
    for current in (run(), run(Expectation.of(reference.digests, reference.program.id))):
        found = difference(reference, current)
        assert [found.site(row).op for row in found.starting("here")] == [op]
        assert {found.start(row) for row in found.rows[1:]} == {"read"}


def test_the_choice_of_autotuning_is_told_where_the_bits_differ(step, kernels):
    reference = traced(step)
    kernel = kernels["triton_poi_fused_cos_1"]
    kernel.configure(128)
    current = traced(step)
    assert current.program.id == reference.program.id
    assert len(difference(reference, current).rows) == 0
    compute = kernel.compute

    def rounds_otherwise(x: Tensor, out: Tensor) -> None:
        compute(x, out)
        out.mul_(1 + 1e-6)

    kernel.compute = rounds_otherwise
    found = difference(reference, traced(step))
    (row,) = found.starting("here")
    assert (
        'ran with another configuration ({"XBLOCK":64,"num_warps":4,"num_stages":1} -> '
        '{"XBLOCK":128,"num_warps":4,"num_stages":1}) and produced different bits'
    ) in describe(found.row_difference(row))


def test_a_kernel_whose_input_something_unseen_wrote_is_no_origin(step, kernels):
    mode = HashMode()
    with mode:
        step()
    reference = mode.trace
    kernel = kernels["triton_poi_fused_cos_1"]
    compute = kernel.compute

    def after_an_unseen_write(x: Tensor, out: Tensor) -> None:
        x.numpy()[0, 0] += 1
        compute(x, out)

    kernel.compute = after_an_unseen_write
    mode.begin(expected=Expectation.of(reference.digests, reference.program.id))
    step()
    found = difference(reference, mode.finish())
    assert found.starting("here") == []
    assert found.site(found.starting("unseen writer")[0]).is_kernel


def test_kernels_are_replaced_only_while_their_graph_runs(step, module, kernels):
    before = dict(vars(module))
    seen: list[bool] = []

    def fails(*_: Tensor) -> None:
        seen.append(vars(module)["triton_poi_fused_cos_1"] is kernels["triton_poi_fused_cos_1"])
        raise ArithmeticError

    step()
    traced(step)
    kernels["triton_poi_fused_add_2"].compute = fails
    with pytest.raises(ArithmeticError):
        step()
    with pytest.raises(ArithmeticError), HashMode():
        step()
    assert seen == [True, False]
    assert {name for name, value in vars(module).items() if before.get(name) is not value} == set()
    assert SEEN_KERNELS._replaced == {}


def test_two_threads_that_run_one_module_leave_it_as_it_was(module, kernels):
    class Watcher:
        def run_kernel(self, call: Any) -> Any:
            return call.run()

        def note_allocation(self, tensor: Tensor) -> None:
            pass

    before = dict(vars(module))
    first, second = SEEN_KERNELS.of([module], Watcher()), SEEN_KERNELS.of([module], Watcher())
    with first:
        second.__enter__()
    assert vars(module)["triton_poi_fused_cos_1"] is not kernels["triton_poi_fused_cos_1"], (
        "the second still runs"
    )
    second.__exit__(None, None, None)
    assert {name for name, value in vars(module).items() if before.get(name) is not value} == set()


def test_another_choice_of_autotuning_is_another_kernel(
    step, module, kernels, tmp_path, monkeypatch
):
    from torch._inductor import codecache

    reference = traced(step)
    text = _GENERATED.replace("triton_poi_fused_cos_1", "triton_tem_fused_cos_1")
    kernels["triton_tem_fused_cos_1"] = kernels.pop("triton_poi_fused_cos_1")
    other = generated(text, kernels, tmp_path / "other.py")
    monkeypatch.setattr(codecache.PyCodeCache, "modules", [other])
    monkeypatch.setattr(Graph, "cache_key", vars(other)["key"])
    vars(module)["call"] = vars(other)["call"]
    found = difference(reference, traced(step))
    assert {(found.site(row).op, found.kinds[row]) for row in found.rows.tolist()} == {
        ("inductor.triton_poi_fused_cos_1", "missing"),
        ("inductor.triton_tem_fused_cos_1", "extra"),
    }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (_GENERATED.replace("async_compile.triton(", "async_compile.pallas("), "pallas"),
        (
            "inductor_entry = CppWrapperCodeCache.load_pybinding([], '')\ncall = None\n",
            "cpp_wrapper",
        ),
    ],
)
def test_kernels_that_cannot_be_seen_leave_the_region_as_a_whole(text, why, step, module):
    Path(str(module.__file__)).write_text(text)
    trace = traced(step)
    assert trace.program.opaque_regions == (f"compiled.function ({why})",)
    assert not any(site.is_kernel for site in trace.program.sites)
    (out,) = ends(trace, "outputs")
    assert {trace.program.sites[at].role for at in out.inputs} >= {"graph", "region_input"}


def test_a_cuda_graph_leaves_the_region_as_a_whole(step, monkeypatch):
    monkeypatch.setattr(graphs, "_runs_as_cuda_graph", lambda *_: True)
    trace = traced(step)
    assert trace.program.opaque_regions == ("compiled.function (CUDA graph)",)
    assert inner(trace) == []


_CPP = '''
cpp_fused_add_0 = async_compile.cpp_pybinding(['float*', 'const int64_t*', 'const float*', 'bool*', 'int64_t'], r"""
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(float* in_out_ptr0,
                       const int64_t* in_ptr0,
                       const float* in_ptr1,
                       bool* out_ptr0,
                       int64_t ks0)
{
}
""")

def call(args):
    buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
    buf1 = reinterpret_tensor(buf0, (4, 4), (8, 1), 4)  # alias
    cpp_fused_add_0(buf1, arg0, arg1, buf0, 4)
    cpp_fused_add_0(buf1, arg0, arg1, buf0, 4)
    buf2 = reinterpret_tensor(buf0, (8, 4), (4, 1), 0); del buf0  # reuse
    cpp_fused_add_0(buf1, arg0, arg1, buf2, 4)
    cpp_fused_add_0(buf1, arg0, arg1, reinterpret_tensor(buf2, (4, 4), (4, 1), 0), 4)
'''  # noqa: E501  # a text


def test_the_signature_of_a_cpp_kernel_says_what_it_writes():
    code = read_code("key", _CPP)
    kernel = code.kernels["cpp_fused_add_0"]
    assert (kernel.op, kernel.writes, kernel.updates) == ("inductor.cpp_fused_add_0", {0, 3}, {0})
    assert [set(at) for _, at in sorted(code.first_writes.items())] == [{0, 3}, set(), {3}, set()]
