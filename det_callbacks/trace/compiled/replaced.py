"""What is replaced in torch at run time, and why: docs/explanation/replaced.md. Looked at in torch 2.11 to 2.15.

A graph that was compiled meanwhile is called through a function of ours for as long as it exists; where no step is
under way, that costs 0.1 microseconds. A CUDA graph that C++ code or cuda-python captures or launches tells nobody.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Protocol

from det_callbacks.internals import dynamo
from det_callbacks.internals.torch import CudaGraph
from det_callbacks.trace.compiled.graphs import TracedGraph, describe_graph


class Watcher(Protocol):
    """Is told of what runs in the steps of a recorder."""

    def run(self, graph: TracedGraph, call: Callable[..., Any], *args: Any) -> Any:
        """Run a compiled graph."""

    def run_earlier(self, call: Callable[[], Any]) -> Any:
        """Run a graph that inductor compiled before anybody followed."""

    def before_capture(self, graph: Any) -> None:
        """Note that a CUDA graph is about to be captured."""

    def before_replay(self, graph: Any) -> None:
        """Note that a CUDA graph is about to be replayed."""


class ReplacedInTorch:
    """Methods that stand where torch's stood, and who needs that."""

    def __init__(self) -> None:
        self.watchers: list[Watcher] = []  # of the steps under way, outermost first: told of what runs
        self._followers: set[int] = set()
        self._methods: dict[tuple[Any, str], tuple[Any, Any]] = {}

    def follow(self, follower: object) -> None:
        """Name what is compiled from now on, until ``unfollow``; imports Dynamo, which every optimizer does."""
        # first: so that ``unfollow`` finds what Ctrl-C has left half done
        self._followers.add(id(follower))
        self._replace(dynamo.output_graph(), dynamo.COMPILES_GRAPH, self._compile)
        self._replace(CudaGraph, "capture_begin", partial(self._tell, "before_capture"))
        self._replace(CudaGraph, "replay", partial(self._tell, "before_replay"))
        # tells of what was compiled before; not by an import, which takes seconds: without it, there is nothing
        inductor_graph = dynamo.inductor_graph()
        if inductor_graph is not None:
            self._replace(inductor_graph, "__call__", self._run_earlier)

    def watch(self, watcher: Watcher) -> None:
        """Tell a watcher of what runs from now on, until ``unfollow``."""
        self.watchers.append(watcher)
        self.follow(watcher)

    def unfollow(self, follower: object) -> None:
        """Put everything back when nobody else follows, but for what somebody else has replaced since."""
        self._followers.discard(id(follower))
        self.watchers = [one for one in self.watchers if one is not follower]
        while self._methods and not self._followers:
            (owner, name), (before, ours) = self._methods.popitem()
            if vars(owner).get(name) is ours:
                setattr(owner, name, before)

    def _replace(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        before = vars(owner).get(name)
        if before is None or (owner, name) in self._methods:  # builds of torch without CUDA have none of its methods
            return

        @wraps(before)
        def ours(*args: Any, **kwargs: Any) -> Any:
            return instead(before, *args, **kwargs)

        self._methods[owner, name] = before, ours
        setattr(owner, name, ours)

    def _compile(self, compile_graph: Callable[..., Any], output: Any, graph: Any, example_inputs: Any) -> Any:
        # before the compiler has it: its passes write into the graph
        described = describe_graph(graph, output, example_inputs)
        compiled = compile_graph(output, graph, example_inputs)
        # torch's own cond and flex_attention are "compiled" so, and each op is seen as in eager code
        return compiled if "eager" in described.backend.split("_") else self._followed(described, compiled)

    def _followed(self, graph: TracedGraph, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs a compiled graph, with those who watch around it."""
        lazy = getattr(compiled, "__self__", None)
        if isinstance(lazy, dynamo.LazyGraph) and getattr(compiled, "__name__", "") == dynamo.LAZY_FORWARD:
            # what Dynamo does with it: else each call would be one of the graph as a module
            dynamo.write_lazy_graph(lazy)
            compiled = lazy.forward

        @wraps(compiled)
        def run(*args: Any) -> Any:
            call = compiled
            for watcher in self.watchers:
                call = partial(watcher.run, graph, call)
            return call(*args)

        return run

    def _run_earlier(self, call_graph: Callable[..., Any], graph: Any, inputs: Any) -> Any:
        run = partial(call_graph, graph, inputs)
        return self.watchers[-1].run_earlier(run) if self.watchers else run()

    def _tell(self, before: str, method: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
        for watcher in self.watchers:
            getattr(watcher, before)(graph)
        return method(graph, *args, **kwargs)


def forget_compiled() -> None:
    """Have Dynamo compile again what it compiled before, so that ``REPLACED.follow`` sees the graph.

    The file caches of inductor stay, as do the sizes that Dynamo has seen vary: it would trace other graphs without
    them. Under another stance than the default, code that was compiled may not be compiled again, and stays.
    """
    if dynamo.stance().stance != "default":
        return
    varying_sizes = dict(dynamo.varying_sizes()())
    dynamo.forget_code()()
    dynamo.varying_sizes()().update(varying_sizes)


REPLACED = ReplacedInTorch()
