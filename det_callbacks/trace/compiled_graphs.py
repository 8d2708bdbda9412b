"""Compiled graphs: what a graph is that Dynamo traced, and when one runs.

Where Dynamo hands a graph to a compiler, the compiled graph is put behind a function of ours, which stays for as long
as the compiled code does and costs 0.1 microseconds where no step is under way. What inductor compiled before anybody
followed is met where it is called.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule  # looked at in torch 2.13

from det_callbacks.digest import digest_bytes
from det_callbacks.runs.program import REGION
from det_callbacks.trace.replaced import REPLACED

_TORCH = str(Path(torch.__file__).parent)
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")
_SYMBOL = re.compile(r"\b[suz]+\d+\b")
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_CHILD = re.compile(r"(?:_modules|_parameters|_buffers)\['([^']+)'\]|\.(?!_)(\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInput:
    """One input of a graph: its name in the code, and its qualified name where it is of the module that was traced."""

    name: str
    path: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedGraph:
    """A graph as Dynamo traced it, before a compiler got it.

    Attributes:
        region: its name in the coverage: the function whose code it is, without dots ("compiled.Net_forward").
        backend: name of the compiler.
        inputs: of the graph, in order.
        held: tensors that the graph holds itself: Dynamo makes the parameters and states of a compiled optimizer
            attributes of the graph (torch 2.13).
        num_ops: calls in the graph.
        is_graphed: its first runs warm up and capture a CUDA graph and the others replay it, so that each shows
            something else of what is inside.
        fingerprint: 64-bit digest of its code, the dtypes and shapes of its inputs, and the compiler's name.
    """

    region: str
    backend: str
    inputs: tuple[GraphInput, ...]
    held: tuple[tuple[GraphInput, Tensor], ...] = field(repr=False)
    num_ops: int
    is_graphed: bool
    fingerprint: int


def describe_graph(graph: fx.GraphModule, *, name: str, backend: str, is_graphed: bool) -> TracedGraph:
    """Return what is kept of a graph; costs some 20 microseconds a node, once each time something is compiled."""
    nodes = list(graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    code = [module.graph.python_code("self").src for module in graph.modules() if isinstance(module, fx.GraphModule)]
    given = [node.meta.get("example_value") for node in placeholders]
    shapes = [f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else "" for value in given]
    symbols: dict[str, str] = {}  # of sizes: numbered in the order in which they come
    text = _ADDRESS.sub("", "\n".join([backend, *shapes, *code]))
    text = _SYMBOL.sub(lambda found: symbols.setdefault(found[0], f"size{len(symbols)}"), text)
    attributes = dict.fromkeys(str(node.target) for node in nodes if node.op == "get_attr")
    held = ((GraphInput(name=name), getattr(graph, name, None)) for name in attributes)
    return TracedGraph(
        region=f"{REGION}{name}",
        backend=backend,
        inputs=tuple(map(_input_of, placeholders)),
        held=tuple((known, value) for known, value in held if isinstance(value, Tensor)),
        num_ops=sum(node.op.startswith("call_") for node in nodes),
        is_graphed=is_graphed,
        fingerprint=digest_bytes(text.encode()),
    )


def _path_in_module(text: str) -> str:
    """Return "net.0.weight" for "L['self']._modules['net']._modules['0']._parameters['weight']", or its short form."""
    rest = text.partition("]")[2]
    if "['" not in rest:
        return rest.lstrip(".")
    return ".".join(first or second for first, second in _CHILD.findall(rest))


def _input_of(node: fx.Node) -> GraphInput:
    known = node.meta.get("grapharg")
    text = getattr(getattr(node, "_dynamo_source", None) or getattr(known, "source", None), "name", None)
    if callable(text):  # a method up to torch 2.9
        text = text()
    if not isinstance(text, str):
        return GraphInput(name=str(node.target))
    if "_parameters[" in text or "_buffers[" in text:
        path = _path_in_module(text)
        return GraphInput(name=path, path=path)
    return GraphInput(name=re.sub(r"^[LG]\['(\w+)'\]", r"\1", text))


def _name_of(frame: Any) -> str:
    """Return the name of a traced frame: its function, or for code of torch's own the module that it calls."""
    qualified: str = frame.f_code.co_qualname.rpartition("<locals>.")[2]
    if frame.f_code.co_filename.startswith(_TORCH):
        owner = frame.f_locals.get("self", frame.f_locals.get("fn"))
        is_module = isinstance(owner, nn.Module)
        qualified = f"{type(owner).__name__}.forward" if is_module else getattr(owner, "__qualname__", qualified)
    return re.sub(r"\W+", "_", _RESUMED.sub(r"\1", qualified)).strip("_") or "graph"


class Watcher(Protocol):
    """What is told of compiled graphs that run."""

    def run(self, graph: TracedGraph, call: Callable[..., Any], *args: Any) -> Any:
        """Run a compiled graph: call ``call(*args)`` once and return its result."""

    def run_earlier(self, call: Callable[[], Any]) -> Any:
        """Run a graph of which nothing is known; return what ``call()`` returns."""


class CompiledGraphs:
    """Which compiled graphs run: told to the recorders of the steps under way.

    Attributes:
        open: these recorders, outermost first.
    """

    def __init__(self) -> None:
        self.open: list[Watcher] = []

    def follow(self, follower: object) -> None:
        """Name what is compiled from now on, until ``unfollow``; imports Dynamo, which every optimizer does."""
        REPLACED.hold(follower, torch._dynamo.output_graph.OutputGraph, "call_user_compiler", self._compiling)
        # not by an import: it takes seconds, and without it inductor has compiled nothing
        inductor = sys.modules.get("torch._inductor.output_code")
        if inductor is not None:
            REPLACED.hold(follower, inductor.CompiledFxGraph, "__call__", self._calling)

    def unfollow(self, follower: object) -> None:
        """Undo a ``follow``; may be called more than once."""
        REPLACED.release(follower)

    def watch(self, watcher: Watcher) -> None:
        """Tell a recorder of the compiled graphs that run from now on."""
        self.open.append(watcher)
        self.follow(watcher)

    def unwatch(self, watcher: Watcher) -> None:
        """Tell a recorder nothing any more; may be called more than once."""
        if watcher in self.open:
            self.open.remove(watcher)
        self.unfollow(watcher)

    def _compiling(self, compile_graph: Any) -> Any:
        @wraps(compile_graph)
        def call_user_compiler(output: Any, graph: Any, example_inputs: Any) -> Any:
            compiler = output.compiler_fn
            backend = str(getattr(compiler, "compiler_name", None) or getattr(compiler, "__name__", None))
            # before the compiler has it: its passes write into the graph
            described = describe_graph(
                graph,
                name=_name_of(output.root_tx),
                backend=backend,
                is_graphed=_runs_as_cuda_graph(compiler, backend, example_inputs),
            )
            return self._followed(described, compile_graph(output, graph, example_inputs))

        return call_user_compiler

    def _followed(self, graph: TracedGraph, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs a compiled graph, with those who watch around it."""
        lazy = getattr(compiled, "__self__", None)
        if isinstance(lazy, _LazyGraphModule) and getattr(compiled, "__name__", "") == "_lazy_forward":
            # what Dynamo does with it: else each call would be one of the graph as a module
            _LazyGraphModule.force_recompile(lazy)
            compiled = lazy.forward

        @wraps(compiled)
        def run(*args: Any) -> Any:
            if not self.open:
                return compiled(*args)
            call = compiled
            for watcher in self.open:
                call = partial(watcher.run, graph, call)
            return call(*args)

        return run

    def _calling(self, call_graph: Any) -> Any:
        @wraps(call_graph)
        def call(graph: Any, inputs: Any) -> Any:
            run = partial(call_graph, graph, inputs)
            return self.open[-1].run_earlier(run) if self.open else run()

        return call


COMPILED_GRAPHS = CompiledGraphs()


def _runs_as_cuda_graph(compiler: Any, backend: str, inputs: Sequence[Any]) -> bool:
    """Return whether inductor, or the backend cudagraphs, captures what it compiles here and replays it."""
    if not any(isinstance(value, Tensor) and value.is_cuda for value in inputs):
        return False
    # of torch.compile's own compiler: all options in force (looked at in torch 2.13)
    config: Mapping[str, Any] = getattr(compiler, "get_compiler_config", dict)()
    return backend == "cudagraphs" or bool(config.get("triton.cudagraphs"))
