"""CUDA graphs without CUDA: what is captured runs on the host, and a replay calls ``graph.work`` past every mode."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from unittest import mock

import torch
from torch._C import _AutoDispatchBelowAutograd  # looked at in torch 2.13
from torch.utils._python_dispatch import _disable_current_modes  # looked at in torch 2.13


@contextmanager
def host_graphs() -> Iterator[None]:
    """Let ``torch.cuda.CUDAGraph`` work on the host."""
    capturing: set[int] = set()

    def capture_begin(graph: Any, pool: Any = None, capture_error_mode: str = "global") -> None:
        capturing.add(get_ident())

    def capture_end(graph: Any) -> None:
        capturing.discard(get_ident())

    def replay(graph: Any) -> None:
        with _disable_current_modes(), torch.no_grad(), _AutoDispatchBelowAutograd():
            graph.work()

    methods = {"capture_begin": capture_begin, "capture_end": capture_end, "replay": replay}
    made = {
        "__new__": staticmethod(lambda cls, keep_graph=False: object.__new__(cls)),
        "__init__": lambda graph, keep_graph=False: None,
    }
    with (
        mock.patch.multiple(torch.cuda.graphs._CUDAGraph, create=True, **made, **methods),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", side_effect=lambda: get_ident() in capturing),
    ):
        yield


def graph_of(work: Callable[[], Any]) -> Any:
    """Return a graph that runs a function when it is replayed."""
    graph: Any = torch.cuda.CUDAGraph()
    graph.work = work
    return graph


@contextmanager
def capture() -> Iterator[None]:
    """Capture the ops within."""
    graph = graph_of(lambda: None)
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()
