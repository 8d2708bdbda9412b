"""The private names of Dynamo and inductor (torch 2.11 to 2.15), each with its purpose.

Importing Dynamo takes seconds, so ``later`` names are looked up on first use.
"""

import re
import sys
from types import CodeType, ModuleType
from typing import Any

from det_callbacks.internals.torch import TORCH

_set_strategy = TORCH.needed(
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "keeps Dynamo from tracing functions that run between the parts of a compiled function",
)
_make_strategy = TORCH.needed("torch._C._dynamo.eval_frame._FrameExecStrategy", "likewise")
_actions = TORCH.needed("torch._C._dynamo.eval_frame._FrameAction", "likewise")


def skip(code: CodeType) -> None:
    """Have Dynamo skip this code, like ``torch.compiler.disable``, without importing Dynamo."""
    if not TORCH.missing:
        _set_strategy(code, _make_strategy(_actions.SKIP, _actions.SKIP))


def break_graph_at(function: Any, reason: str) -> None:
    """Have Dynamo break the graph at calls of this function, without importing Dynamo."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = reason


OBSERVE_IN_ORDER = TORCH.needed(
    "torch._library.effects.EffectType.ORDERED", "keeps an op that returns nothing in a graph"
)

# Replaced while a run is recorded.

COMPILES_GRAPH = "call_user_compiler"
_output_graph = TORCH.later(
    "torch._dynamo.output_graph.OutputGraph", "the class that builds Dynamo's graphs"
)
_compiles_graph = TORCH.later(
    f"torch._dynamo.output_graph.OutputGraph.{COMPILES_GRAPH}",
    "the method that passes a graph to its compiler",
)


def output_graph() -> Any:
    """Return the class whose method ``COMPILES_GRAPH`` passes each graph to its compiler."""
    _compiles_graph()  # raises if it is missing
    return _output_graph()


RUNS_GRAPH = "__call__"
_inductor_graph = TORCH.later(
    "torch._inductor.output_code.CompiledFxGraph", "the class of graphs that were compiled before"
)

# For the kernels of compiled graphs.

_generated_modules = TORCH.later(
    "torch._inductor.codecache.PyCodeCache.modules",
    "the Python modules that inductor generated, with their kernels",
)
module_key = TORCH.of_instance(
    "torch._inductor.output_code.CompiledFxGraph.cache_key",
    "names the generated module of a compiled graph",
)
triton_arguments = TORCH.of_instance(
    "torch._inductor.runtime.triton_heuristics.CachingAutotuner.triton_meta",
    "the arguments of a Triton kernel",
)
written_by_triton = TORCH.of_instance(
    "torch._inductor.runtime.triton_heuristics.CachingAutotuner.mutated_arg_names",
    "the arguments that a Triton kernel writes",
)
triton_launchers = TORCH.of_instance(
    "torch._inductor.runtime.triton_heuristics.CachingAutotuner.launchers",
    "the configuration that autotuning chose for a Triton kernel",
)
COMMENTS_KERNEL = "codegen_comment"
load_inductor = TORCH.later(
    f"torch._inductor.codegen.cpp.CppScheduling.{COMMENTS_KERNEL}",
    "which nodes of its graph a C++ kernel computes",
)
_cpp_scheduling = TORCH.later("torch._inductor.codegen.cpp.CppScheduling", "likewise")
_nodes_of = TORCH.later("torch._inductor.utils.aggregate_origins", "likewise")
_compiling = TORCH.later("torch._inductor.virtualized.V", "likewise, by the generated module")
MAKES_MODULE = "compile_to_module"
_lowering = TORCH.later("torch._inductor.graph.GraphLowering", "likewise")
_makes_module = TORCH.later(
    f"torch._inductor.graph.GraphLowering.{MAKES_MODULE}",
    "which node of its graph each buffer holds",
)
node_of_buffer = TORCH.of_instance("torch._inductor.ir.Buffer.get_origin_node", "likewise")
key_of_lowered = TORCH.of_instance("torch._inductor.graph.GraphLowering.cache_key", "likewise")


def inductor_classes() -> dict[str, Any]:
    """Return the classes of inductor whose methods are replaced, by the name of the method;
    without those that were not imported.
    """
    classes = {}
    for method, module, look_up in (
        (RUNS_GRAPH, "torch._inductor.output_code", _inductor_graph),
        (COMMENTS_KERNEL, "torch._inductor.codegen.cpp", _cpp_scheduling),
        (MAKES_MODULE, "torch._inductor.graph", _lowering),
    ):
        if module in sys.modules:
            classes[method] = look_up()
    return classes


def generated_modules(graph: Any) -> list[ModuleType]:
    """Return the modules that inductor generated for a compiled graph: one,
    or one for each set of its constants.
    """
    key = module_key(graph)
    return [module for module in _generated_modules() if vars(module).get("key") == key]


def nodes_of_kernel(scheduled: Any) -> tuple[Any, list[Any]]:
    """Return the graph that inductor compiles, and its ``torch.fx`` nodes that a
    kernel computes, in order.
    """
    nodes = list(_nodes_of()(list(scheduled)))
    graphs = {id(node.graph): node.graph for node in nodes}
    order = {node: number for graph in graphs.values() for number, node in enumerate(graph.nodes)}
    return _compiling().graph, sorted(nodes, key=order.__getitem__)


# Reset when a run begins.

stance = TORCH.later(
    "torch._dynamo.eval_frame._stance", "whether compiled code may be compiled again"
)
forget_code = TORCH.later(
    "torch._dynamo.reset_code_caches",
    "drops compiled code; torch.compiler.reset also turns off compiled autograd and drops CUDA "
    "graphs",
)
varying_sizes = TORCH.later(
    "torch._dynamo.pgo.get_code_state", "the sizes that Dynamo knows to vary"
)

# For compare_compiled.

config = TORCH.later(
    "torch._dynamo.config",
    "makes Dynamo raise instead of falling back to eager code",
)
inductor_config = TORCH.later(
    "torch._inductor.config",
    "makes inductor draw the random numbers of eager code",
)
compiler_of = TORCH.later(
    "torch._dynamo.backends.registry.lookup_backend",
    "the compiler of a named backend",
)
inductor_with_mode = TORCH.later(
    "torch._TorchCompileInductorWrapper",
    "the backend that torch.compile makes for a mode of inductor",
)
optimized_module = TORCH.later(
    "torch._dynamo.eval_frame.OptimizedModule", "the class of modules that torch.compile returns"
)

# Attributes.

ORIGINAL = "_orig_mod"  # attribute of a compiled module: the original module
GRAPH_SOURCE = "_dynamo_source"  # attribute of a graph's input: where Dynamo found it
GRAPH_MEMBER = re.compile(
    r"[LG]\['\w+'\](?:\.__self__)?(?:\._(?:modules|parameters|buffers)\['[^']+'\])+"
)
"""Dynamo's text for a parameter or buffer: "L['self']._modules['net']._parameters['weight']"."""
INDUCTOR_CONFIG = "torch._inductor.config"
_config_module = TORCH.later(
    "torch.utils._config_module.ConfigModule",
    "the class of torch's modules of options, with their defaults",
)


def changed_options() -> dict[str, Any]:
    """Return the options that the program changed, by path,
    of the modules of options that it imported.
    """
    kind, changed = _config_module(), dict[str, Any]()
    for path, module in sorted(sys.modules.copy().items()):
        if issubclass(type(module), kind) and path.startswith("torch."):
            options: Any = module
            for name, value in options.get_config_copy().items():
                if value != options._config[name].default:
                    changed[f"{path}.{name}"] = value
    return changed


is_compiled_in_place = TORCH.of_instance(
    "torch.nn.Module._compiled_call_impl", "the call that Module.compile installed"
)
