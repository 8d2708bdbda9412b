"""CUDA graphs without CUDA: what is captured runs on the host,
and a replay calls ``graph.work`` past every mode.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from unittest import mock

import torch
from torch._C import _AutoDispatchBelowAutograd  # looked at in torch 2.13
from torch.utils._python_dispatch import _disable_current_modes  # looked at in torch 2.13

_CAPTURING: set[int] = set()  # identifiers of threads


class HostGraph:
    """A CUDA graph on the host: a replay calls ``work``."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work

    def capture_begin(self) -> None:
        _CAPTURING.add(get_ident())

    def capture_end(self) -> None:
        _CAPTURING.discard(get_ident())

    def replay(self) -> None:
        with _disable_current_modes(), torch.no_grad(), _AutoDispatchBelowAutograd():
            self.work()


@contextmanager
def host_graphs() -> Iterator[None]:
    """Let the package find ``HostGraph`` where it looks for the class that
    torch's graphs derive from.

    Torch's own class needs a driver, or is empty in builds without CUDA.
    ``tests/unit/test_cuda_graphs.py`` checks that torch's graphs call the methods
    that the package replaces.
    """
    with (
        mock.patch("det_callbacks.trace.compiled.replaced.CudaGraph", HostGraph),
        mock.patch.object(
            torch.cuda, "is_current_stream_capturing", side_effect=lambda: get_ident() in _CAPTURING
        ),
    ):
        yield


@contextmanager
def capture() -> Iterator[None]:
    """Capture the ops within."""
    graph = HostGraph(lambda: None)
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()
