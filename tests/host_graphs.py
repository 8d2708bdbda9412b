"""CUDA graphs without CUDA: torch's own Python code of them, over a class that captures and replays on the host.

Within ``host_graphs()`` a ``torch.cuda.CUDAGraph`` notes the ops between ``capture_begin`` and ``capture_end``, with
whatever they were given; memory is then as if none had run. ``replay`` runs them past every dispatch mode, and writes
into the tensors that the capture had returned.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowAutograd  # looked at in torch 2.13
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # looked at in torch 2.13
from torch.utils._pytree import tree_leaves

Call = tuple[Any, tuple[Any, ...], dict[str, Any], Any]


@contextmanager
def past_every_mode() -> Iterator[None]:
    """Run ops where nobody sees them, autograd included."""
    with _disable_current_modes(), torch.no_grad(), _AutoDispatchBelowAutograd():
        yield


class HostGraphs:
    """What happens within ``host_graphs``.

    Attributes:
        capturing: threads whose stream is being captured.
        on_begin: called when a capture has begun.
        on_end: called when a capture is about to end.
        after_replay: called, unseen, with the calls of a graph that has run.
        fails: name of the method that raises.
    """

    def __init__(self) -> None:
        self.capturing: set[int] = set()
        self.on_begin: Callable[[], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self.after_replay: Callable[[list[Call]], None] | None = None
        self.fails = ""
        self.num_replays = 0

    def is_capturing(self) -> bool:
        return threading.get_ident() in self.capturing


class _Capture(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema.arguments
        named = {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs
        written = [
            item
            for argument in schema
            if argument.is_write
            for item in tree_leaves(named.get(argument.name))
            if isinstance(item, Tensor)
        ]
        with past_every_mode():
            before = [tensor.clone() for tensor in written]
        out = func(*args, **kwargs)
        with past_every_mode():
            for tensor, content in zip(written, before, strict=True):
                tensor.data.copy_(content)
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor) and not written and "view" not in str(func) and not func.is_view:
                    tensor.data.fill_(-7 if not tensor.dtype.is_floating_point else torch.nan)
        self.calls.append((func, args, kwargs, out))
        return out


def _methods(graphs: HostGraphs) -> dict[str, Any]:
    def fail(name: str) -> None:
        if graphs.fails == name:
            raise RuntimeError(f"{name} failed")

    def capture_begin(graph: Any, pool: Any = None, capture_error_mode: str = "global") -> None:
        fail("capture_begin")
        graphs.capturing.add(threading.get_ident())
        graph.mode = _Capture()
        graph.mode.__enter__()
        if graphs.on_begin is not None:
            graphs.on_begin()

    def capture_end(graph: Any) -> None:
        if graphs.on_end is not None:
            graphs.on_end()
        graph.mode.__exit__(None, None, None)
        graphs.capturing.discard(threading.get_ident())
        fail("capture_end")

    def replay(graph: Any) -> None:
        fail("replay")
        graphs.num_replays += 1
        with past_every_mode():
            for func, args, kwargs, out in graph.mode.calls:
                result = func(*args, **kwargs)
                for ours, now in zip(tree_leaves(out), tree_leaves(result), strict=True):
                    if isinstance(ours, Tensor) and ours is not now:
                        ours.data.copy_(now)
            if graphs.after_replay is not None:
                graphs.after_replay(graph.mode.calls)

    return {
        "__new__": staticmethod(lambda cls, keep_graph=False: object.__new__(cls)),
        "__init__": lambda graph, keep_graph=False: None,
        "capture_begin": capture_begin,
        "capture_end": capture_end,
        "replay": replay,
    }


@contextmanager
def host_graphs() -> Iterator[HostGraphs]:
    """Let ``torch.cuda.CUDAGraph``, ``torch.cuda.graph`` and ``make_graphed_callables`` work on the host."""
    graphs = HostGraphs()
    base = torch.cuda.graphs._CUDAGraph
    with (
        mock.patch.multiple(base, create=True, **_methods(graphs)),
        mock.patch.multiple(
            torch.cuda,
            synchronize=lambda *_: None,
            empty_cache=lambda: None,
            Stream=mock.Mock,
            stream=lambda _: nullcontext(),
            is_current_stream_capturing=graphs.is_capturing,
        ),
        mock.patch.object(torch._C, "_host_emptyCache", mock.Mock(), create=True),
        mock.patch.object(torch.cuda.graphs, "graph_pool_handle", return_value=(0, 1)),
    ):
        yield graphs


def captured(body: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return a graph of what a function does, and what it returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = body()
    return graph, out


def nudge_last(calls: list[Call]) -> None:
    """Have the last op of a graph give something else; for ``HostGraphs.after_replay``."""
    calls[-1][-1].data.view(-1)[0] += 1
