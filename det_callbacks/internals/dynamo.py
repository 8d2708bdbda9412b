"""Every private name of Dynamo and inductor (torch 2.11 to 2.15): what for, and what is lost without it.

Importing Dynamo takes seconds, so ``later`` names are looked up when they are asked for.
"""

import re
import sys
from types import CodeType
from typing import Any

from det_callbacks.internals.torch import TORCH

_SLOWER = "torch.compile may take longer while a run is recorded"
_set_strategy = TORCH.optional(
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "keeps Dynamo from looking at functions that run between the parts of a compiled one",
    lost=_SLOWER,
)
_make_strategy = TORCH.optional("torch._C._dynamo.eval_frame._FrameExecStrategy", "likewise", lost=_SLOWER)
_actions = TORCH.optional("torch._C._dynamo.eval_frame._FrameAction", "likewise", lost=_SLOWER)


def skip(code: CodeType) -> None:
    """Have Dynamo run this code as it is, as ``torch.compiler.disable`` does, without importing Dynamo."""
    if None not in (_set_strategy, _make_strategy, _actions):
        _set_strategy(code, _make_strategy(_actions.SKIP, _actions.SKIP))


def break_graph_at(function: Any, reason: str) -> None:
    """Have Dynamo end a graph where the function is called, without importing Dynamo."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = reason


OBSERVE_IN_ORDER = TORCH.optional(
    "torch._library.effects.EffectType.ORDERED",
    "keeps an op that returns nothing in a graph",
    lost="what compiled functions observe is left out",
)

# What is replaced while a run is followed.

COMPILES_GRAPH = "call_user_compiler"
_output_graph = TORCH.later("torch._dynamo.output_graph.OutputGraph", "what Dynamo makes a graph with")
_compiles_graph = TORCH.later(
    f"torch._dynamo.output_graph.OutputGraph.{COMPILES_GRAPH}", "the method that hands a graph to its compiler"
)


def output_graph() -> Any:
    """Return the class whose method ``COMPILES_GRAPH`` hands each graph to its compiler."""
    _compiles_graph()  # raises where it is missing
    return _output_graph()


def inductor_graph() -> Any:
    """Return the class of what inductor compiled, None where inductor was not imported."""
    module = sys.modules.get("torch._inductor.output_code")
    return None if module is None else _inductor_graph()


_inductor_graph = TORCH.later("torch._inductor.output_code.CompiledFxGraph", "tells of what was compiled before")
_LAZY_GRAPH = "torch.fx._lazy_graph_module._LazyGraphModule"
LazyGraph = TORCH.needed_class(_LAZY_GRAPH, "a graph that Dynamo writes later")
LAZY_FORWARD = TORCH.name_of(f"{_LAZY_GRAPH}._lazy_forward", "the method that writes it, and then runs it")
write_lazy_graph = TORCH.needed(f"{_LAZY_GRAPH}.force_recompile", "writes it")

# What is forgotten when a run begins.

stance = TORCH.later("torch._dynamo.eval_frame._stance", "whether code that was compiled may be compiled again")
forget_code = TORCH.later(
    "torch._dynamo.reset_code_caches",
    "drops what was compiled; torch.compiler.reset also turns compiled autograd off and drops CUDA graphs",
)
varying_sizes = TORCH.later("torch._dynamo.pgo.get_code_state", "the sizes that Dynamo has seen vary")

# What compare_compiled needs.

COMPARING = "compare_compiled"
config = TORCH.later("torch._dynamo.config", "has Dynamo raise where it would go back to eager code", for_=COMPARING)
inductor_config = TORCH.later("torch._inductor.config", "the same random numbers as in eager code", for_=COMPARING)
compiler_of = TORCH.later(
    "torch._dynamo.backends.registry.lookup_backend", "the compiler behind the name of a backend", for_=COMPARING
)
inductor_with_mode = TORCH.later(
    "torch._TorchCompileInductorWrapper", "what torch.compile makes of a mode of inductor", for_=COMPARING
)
optimized_module = TORCH.later(
    "torch._dynamo.eval_frame.OptimizedModule", "the class of what torch.compile makes of a module", for_=COMPARING
)

# Attributes.

ORIGINAL = "_orig_mod"  # of what ``torch.compile(module)`` returns: the module
GRAPH_SOURCE = "_dynamo_source"  # of an input of a graph: where Dynamo found it
GRAPH_MEMBER = re.compile(r"[LG]\['\w+'\](?:\.__self__)?(?:\._(?:modules|parameters|buffers)\['[^']+'\])+")
"""Dynamo's text for a parameter or buffer: "L['self']._modules['net']._parameters['weight']"."""
INDUCTOR_CONFIG = "torch._inductor.config"
is_compiled_in_place = TORCH.of_instance(
    "torch.nn.Module._compiled_call_impl", "what Module.compile has put in place of a call", for_=COMPARING
)
