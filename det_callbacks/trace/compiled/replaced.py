"""Replaces methods of torch at run time (torch 2.11 to 2.15);
docs/explanation/replaced.md has the reasons.

Our wrapper around a graph compiled meanwhile stays as long as the graph; it costs 0.1 microseconds
outside a step.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from torch.fx import GraphModule

from det_callbacks.internals import dynamo
from det_callbacks.internals.replaced import ReplacedMethods, wrapper_of
from det_callbacks.internals.torch import CudaGraph
from det_callbacks.trace.compiled.graphs import TracedGraph, describe_graph
from det_callbacks.trace.compiled.kernel_nodes import KERNEL_NODES
from det_callbacks.trace.compiled.kernels import SEEN_KERNELS


class ReplacedInTorch(ReplacedMethods):
    """What is replaced in torch while at least one recorder of the process is active."""

    def __init__(self) -> None:
        super().__init__()
        self.watchers: list[Any] = []  # the CompiledRegions of the steps under way, outermost first
        self._followers: set[int] = set()
        self._output_graph: Any = None  # cached: each step needs it, and to look it up takes 10 us
        self._inductor: dict[str, Any] = {}  # by method, its class, once it is imported
        self._instead: dict[str, Callable[..., Any]] = {
            dynamo.COMPILES_GRAPH: self._compile,
            "capture_begin": partial(self._notify, "before_capture"),
            "replay": partial(self._notify, "before_replay"),
            dynamo.RUNS_GRAPH: self._run_inductor,
            dynamo.COMMENTS_KERNEL: self._note_kernel_nodes,
            dynamo.MAKES_MODULE: self._make_module,
        }
        # the last one of each method, since each step may replace it
        self._wrappers: dict[str, Any] = {}

    def follow(self, follower: object) -> None:
        """Have each graph that Dynamo compiles from now on report its runs, until ``unfollow``;
        imports Dynamo, as every optimizer does.
        """
        # before replacing anything, so that ``unfollow`` restores it after Ctrl-C
        self._followers.add(id(follower))
        self._output_graph = self._output_graph or dynamo.output_graph()
        self._replace(self._output_graph, dynamo.COMPILES_GRAPH)
        self._replace(CudaGraph, "capture_begin")
        self._replace(CudaGraph, "replay")
        self._follow_inductor()

    def _follow_inductor(self) -> None:
        """Follow the graphs that inductor runs, even those compiled before;
        there are none if it was never imported.
        """
        if len(self._inductor) < 3:
            self._inductor = dynamo.inductor_classes()
        for name, owner in self._inductor.items():
            self._replace(owner, name)

    def watch(self, watcher: Any) -> None:
        self.watchers.append(watcher)
        self.follow(watcher)

    def unfollow(self, follower: object) -> None:
        self._followers.discard(id(follower))
        self.watchers = [watcher for watcher in self.watchers if watcher is not follower]
        if not self._followers:
            self.restore()
            KERNEL_NODES.forget_lowered()

    def _replace(self, owner: Any, name: str) -> None:
        if name in vars(owner) and not self.has_replaced(owner, name):  # without CUDA there is none
            self.put(owner, name, partial(self._wrapper_of, name))

    def _wrapper_of(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        ours = self._wrappers.get(name)
        if ours is None or ours.__wrapped__ is not method:
            ours = self._wrappers[name] = wrapper_of(method, self._instead[name])
        return ours

    def _compile(
        self, compile_graph: Callable[..., Any], output: Any, graph: Any, example_inputs: Any
    ) -> Any:
        # first, since the compiler writes into the graph
        described = describe_graph(graph, output, example_inputs)
        if described.backend == "inductor":
            dynamo.load_inductor()
            self._follow_inductor()
        compiled = compile_graph(output, graph, example_inputs)
        self._follow_inductor()  # another compiler may have imported it
        # an "eager" backend, such as that of torch's cond, shows each op
        return (
            compiled
            if "eager" in described.backend.split("_")
            else self._followed(described, compiled)
        )

    def _followed(self, graph: TracedGraph, compiled: Callable[..., Any]) -> Callable[..., Any]:
        module = getattr(compiled, "__self__", None)
        if isinstance(module, GraphModule) and compiled == module.forward:
            # reading the code writes a lazy graph, whose lazy forward would be a call of a module
            _ = module.code
            compiled = module.forward

        @wraps(compiled)
        def run(*args: Any) -> Any:
            call = compiled
            for watcher in self.watchers:
                call = partial(watcher.run, graph, call)
            return call(*args)

        return run

    def _run_inductor(self, call_graph: Callable[..., Any], graph: Any, inputs: Any) -> Any:
        run = partial(call_graph, graph, inputs)
        return self.watchers[-1].run_inductor(graph, run) if self.watchers else run()

    def _note_kernel_nodes(
        self, comment: Callable[..., Any], scheduling: Any, nodes: Any, kernel: Any = None
    ) -> Any:
        if kernel is not None:
            KERNEL_NODES.remember_nodes(nodes, kernel)
        return comment(scheduling, nodes, kernel)

    def _make_module(self, make: Callable[..., Any], graph: Any) -> Any:
        module = make(graph)
        KERNEL_NODES.remember_buffers(graph)
        SEEN_KERNELS.keep_module(module)
        return module

    def _notify(
        self, before: str, method: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any
    ) -> Any:
        for watcher in self.watchers:
            getattr(watcher, before)(graph)
        return method(graph, *args, **kwargs)


def forget_compiled() -> None:
    """Have Dynamo recompile its graphs, so that ``REPLACED.follow`` sees them.

    This keeps inductor's file caches and the sizes that Dynamo knows to vary, because they affect
    the graphs. It keeps compiled code, too, if the stance is not the default,
    because a stance may forbid compilation.
    """
    if dynamo.stance().stance != "default":
        return
    varying_sizes = dict(dynamo.varying_sizes()())
    dynamo.forget_code()()
    dynamo.varying_sizes()().update(varying_sizes)


REPLACED = ReplacedInTorch()
