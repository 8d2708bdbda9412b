"""CUDA graphs without CUDA: what is captured runs on the host, and a replay calls ``graph.work`` past every mode."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from unittest import mock

import torch
from torch._C import _AutoDispatchBelowAutograd  # looked at in torch 2.13
from torch.utils._python_dispatch import _disable_current_modes  # looked at in torch 2.13

_CAPTURING: set[int] = set()  # threads


class HostGraph:
    """What ``torch.cuda.CUDAGraph`` derives from, on the host."""

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
    """Let a ``HostGraph`` be taken for a graph of torch, whose own class asks for a driver, or is empty in a CPU build.

    That torch's own graphs call the replaced methods is tested on a device, and that they exist in each CUDA build.
    """
    with (
        mock.patch.object(torch.cuda.graphs, "_CUDAGraph", HostGraph),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", side_effect=lambda: get_ident() in _CAPTURING),
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
