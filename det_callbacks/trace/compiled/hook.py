"""Where Dynamo hands a graph to a compiler: there the compiled graph is put behind a function of ours.

That function stays for as long as the compiled code does and costs 0.1 microseconds where nobody watches. A graph that
inductor compiled before anybody followed is met where it is called. Two methods of torch are replaced while somebody
follows, a fit or a step, and put back then. They are private; looked at in 2.13: ``OutputGraph.call_user_compiler``
(called for each graph, its result is what the frame's new bytecode calls; ``root_tx`` is the traced frame) and
``CompiledFxGraph.__call__``.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from threading import get_ident
from typing import Any, Protocol

import torch
from torch.fx._lazy_graph_module import _LazyGraphModule  # looked at in torch 2.13

from det_callbacks.trace.compiled.graphs import RegionNames, TracedGraph, describe_graph
from det_callbacks.trace.replaced import Replaced

_EARLIER = "graph_compiled_earlier"


class Watcher(Protocol):
    """What is told of compiled graphs that run."""

    def run(self, graph: TracedGraph, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a compiled graph: call ``call(*args)`` once and return its result."""

    def run_unknown(self, name: str, call: Callable[[], Any], inputs: list[Any], *, is_graphed: bool) -> Any:
        """Run a graph of which nothing is known but its inputs; return what ``call()`` returns."""


class Watchers:
    """Those who watch, outermost first, and what is running in which thread."""

    def __init__(self) -> None:
        self.open: list[Watcher] = []
        self.inside: dict[int, int] = {}
        """Thread -> number of known graphs that run in it, one inside the other."""
        self._names = RegionNames()
        self._followers: set[object] = set()
        self._replaced = Replaced()

    def follow(self, follower: object) -> None:
        """Name what is compiled from now on, until ``unfollow``; imports Dynamo, which every optimizer does."""
        self._followers.add(follower)  # first: so ``unfollow`` finds what Ctrl-C has left half done
        self._replaced.replace(torch._dynamo.output_graph.OutputGraph, "call_user_compiler", self._compiling)
        # not by an import: it takes seconds, and without it inductor has compiled nothing
        inductor = sys.modules.get("torch._inductor.output_code")
        if inductor is not None:
            self._replaced.replace(inductor.CompiledFxGraph, "__call__", self._meeting)

    def unfollow(self, follower: object) -> None:
        """Undo a ``follow``; may be called more than once."""
        self._followers.discard(follower)
        if not self._followers:
            self._replaced.put_back()

    def watch(self, watcher: Watcher) -> None:
        """Tell a watcher of the compiled graphs that run from now on."""
        self.open.append(watcher)
        self.follow(watcher)

    def unwatch(self, watcher: Watcher) -> None:
        """Tell a watcher nothing any more; may be called more than once."""
        if watcher in self.open:
            self.open.remove(watcher)
        if not self.open:
            self.inside.clear()
        self.unfollow(watcher)

    def followed(self, graph: TracedGraph, compiled: Callable[..., Any]) -> Callable[..., Any]:
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
            for watcher in self.open[1:]:
                call = _around(watcher, graph, call)
            thread = get_ident()
            self.inside[thread] = self.inside.get(thread, 0) + 1
            try:
                return self.open[0].run(graph, call, args)
            finally:
                self._leave(thread)

        return run

    def _leave(self, thread: int) -> None:
        depth = self.inside.get(thread, 0) - 1
        if depth > 0:
            self.inside[thread] = depth
        else:
            self.inside.pop(thread, None)

    def _compiling(self, compile_graph: Any) -> Any:
        @wraps(compile_graph)
        def call_user_compiler(output: Any, graph: Any, example_inputs: Any) -> Any:
            frame, compiler = output.root_tx, output.compiler_fn
            owner = frame.f_locals.get("self", frame.f_locals.get("fn"))
            backend = getattr(compiler, "compiler_name", None) or getattr(compiler, "__name__", None)
            # before the compiler has it: its passes write into the graph
            described = describe_graph(
                graph,
                name=self._names.of(frame.f_code, owner),
                backend=str(backend),
                is_graphed=_runs_as_cuda_graph(compiler, str(backend), example_inputs),
            )
            return self.followed(described, compile_graph(output, graph, example_inputs))

        return call_user_compiler

    def _meeting(self, call_graph: Any) -> Any:
        @wraps(call_graph)
        def call(graph: Any, inputs: Any) -> Any:
            if not self.open or self.inside.get(get_ident()):
                return call_graph(graph, inputs)
            is_graphed = bool(graph.fx_kwargs.get("cudagraphs"))
            run = partial(call_graph, graph, inputs)
            return self.open[-1].run_unknown(_EARLIER, run, list(inputs), is_graphed=is_graphed)

        return call


def _runs_as_cuda_graph(compiler: Any, backend: str, inputs: Sequence[Any]) -> bool:
    """Return whether inductor, or the backend cudagraphs, captures what it compiles here and replays it."""
    if not any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs):
        return False
    # of torch.compile's own compiler: all options in force (looked at in torch 2.13)
    config: Mapping[str, Any] = getattr(compiler, "get_compiler_config", dict)()
    return backend == "cudagraphs" or bool(config.get("triton.cudagraphs"))


def _around(watcher: Watcher, graph: TracedGraph, call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: watcher.run(graph, call, args)


WATCHERS = Watchers()
