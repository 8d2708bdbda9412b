"""Where Dynamo hands a graph to a compiler: there the compiled graph is put behind a function of ours.

That function costs 0.1 microseconds where nobody watches. It stays for as long as the compiled code does, which
outlives a fit; a graph that was compiled before is met by ``CompiledFxGraph``'s own call instead, where inductor made
it. Private names of torch, looked at in 2.13: ``OutputGraph.call_user_compiler`` (called for each graph, its result is
what the frame's new bytecode calls), ``OutputGraph.root_tx`` (the traced frame), ``CompiledFxGraph.__call__`` and
``CachingAutotuner.run`` (which launches a Triton kernel).
"""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from threading import get_ident
from typing import Any, Protocol

import torch
from torch.fx._lazy_graph_module import _LazyGraphModule  # looked at in torch 2.13

from det_callbacks.trace.compiled.graphs import RegionNames, TracedGraph, describe_graph

_INSTALLED = "_det_callbacks_follows"
_EARLIER = "graph_compiled_earlier"


class Watcher(Protocol):
    """What is told of compiled graphs that run."""

    def run(self, graph: TracedGraph, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a compiled graph: call ``call(*args)`` once and return its result."""

    def run_unknown(self, name: str, call: Callable[[], Any], inputs: list[Any]) -> Any:
        """Run a graph of which nothing is known but its inputs; return what ``call()`` returns."""

    def before_kernel(self, kernel: Any, args: Sequence[Any]) -> None:
        """Note that one of inductor's Triton kernels is about to be launched."""

    def after_kernel(self) -> None:
        """Note that its launch has returned, or raised."""

    def run_kernel(self, kernel: Any, args: Sequence[Any]) -> None:
        """Note that one of inductor's Triton kernels was launched."""


class Watchers:
    """Those who watch, outermost first, and what is running in which thread."""

    def __init__(self) -> None:
        self.open: list[Watcher] = []
        self.inside: dict[int, int] = {}
        """Thread -> number of known graphs that run in it, one inside the other."""
        self._names = RegionNames()

    def install(self) -> None:
        """Follow what is compiled from now on; imports Dynamo (which every optimizer does). More than once is fine."""
        output_graph = torch._dynamo.output_graph.OutputGraph
        if hasattr(output_graph.call_user_compiler, _INSTALLED):
            return
        compile_graph = output_graph.call_user_compiler
        names = self._names

        @wraps(compile_graph)
        def followed(output: Any, graph: Any, example_inputs: Any) -> Any:
            frame, compiler = output.root_tx, output.compiler_fn
            owner = frame.f_locals.get("self", frame.f_locals.get("fn"))
            backend = getattr(compiler, "compiler_name", None) or getattr(compiler, "__name__", None)
            # before the compiler has it: its passes write into the graph
            described = describe_graph(graph, name=names.of(frame.f_code, owner), backend=str(backend))
            compiled = compile_graph(output, graph, example_inputs)
            WATCHERS._meet_kernels()  # the first graph that has some brings the module
            return WATCHERS.followed(described, compiled)

        setattr(followed, _INSTALLED, True)
        output_graph.call_user_compiler = followed  # type: ignore[method-assign, assignment]  # the point of it

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
                self.leave(thread)

        return run

    def leave(self, thread: int) -> None:
        """Note that a known graph has ended in a thread."""
        depth = self.inside.get(thread, 0) - 1
        if depth > 0:
            self.inside[thread] = depth
        else:
            self.inside.pop(thread, None)

    def watch(self, watcher: Watcher) -> None:
        """Tell a watcher of the compiled graphs that run from now on."""
        self.open.append(watcher)  # first: so ``unwatch`` finds what Ctrl-C has left half done
        self._meet_earlier()
        self._meet_kernels()

    def unwatch(self, watcher: Watcher) -> None:
        """Tell a watcher nothing any more; may be called more than once."""
        if watcher in self.open:
            self.open.remove(watcher)
        if not self.open:
            self.inside.clear()
            _take_back(_compiled_fx_graph(), "__call__")
            _take_back(_autotuner(), "run")

    def _meet_earlier(self) -> None:
        inductor = _compiled_fx_graph()
        if inductor is None or hasattr(inductor.__call__, _INSTALLED):
            return
        call_graph = inductor.__call__

        @wraps(call_graph)
        def met(graph: Any, inputs: Any) -> Any:
            if not self.open or self.inside.get(get_ident()):
                return call_graph(graph, inputs)
            return self.open[-1].run_unknown(_EARLIER, lambda: call_graph(graph, inputs), list(inputs))

        setattr(met, _INSTALLED, call_graph)
        inductor.__call__ = met

    def _meet_kernels(self) -> None:
        """Follow inductor's Triton kernels, whose launches no dispatch mode sees."""
        autotuner = _autotuner()
        if not self.open or autotuner is None or hasattr(autotuner.run, _INSTALLED):
            return
        run_kernel = autotuner.run

        @wraps(run_kernel)
        def launched(kernel: Any, *args: Any, **options: Any) -> Any:
            for watcher in self.open:
                watcher.before_kernel(kernel, args)
            try:
                result = run_kernel(kernel, *args, **options)
            finally:
                for watcher in self.open:
                    watcher.after_kernel()
            if not options.get("benchmark_run"):
                for watcher in self.open:
                    watcher.run_kernel(kernel, args)
            return result

        setattr(launched, _INSTALLED, run_kernel)
        autotuner.run = launched


def _take_back(owner: Any, name: str) -> None:
    """Put back a method that was followed."""
    original = None if owner is None else getattr(getattr(owner, name), _INSTALLED, None)
    if original is not None:
        setattr(owner, name, original)


def _around(watcher: Watcher, graph: TracedGraph, call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: watcher.run(graph, call, args)


def _compiled_fx_graph() -> Any:
    """Return inductor's class of compiled graphs, None as long as nothing was compiled by it."""
    # not by an import: it takes seconds, and without it there is no such graph
    module = sys.modules.get("torch._inductor.output_code")
    return None if module is None else module.CompiledFxGraph


def _autotuner() -> Any:
    """Return the class of inductor's Triton kernels, None as long as it compiled none."""
    module = sys.modules.get("torch._inductor.runtime.triton_heuristics")
    return None if module is None else module.CachingAutotuner


WATCHERS = Watchers()
