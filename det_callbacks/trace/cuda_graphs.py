"""CUDA graphs in a step: what is captured makes no rows, a replay is counted, and what it may have written is unknown.

While a stream is captured its ops are noted by the driver and do not run: there is nothing to digest, and a launch or a
wait of ours would become part of the graph or break it. A replay runs all of them past every mode, so what the step
knew of memory until then counts no more: what is read next is digested anew, as a row of role "left".

``torch.cuda.graphs._CUDAGraph`` is the class in C++ that ``torch.cuda.CUDAGraph`` and every other subclass call in the
end. A graph that C++ code or cuda-python captures or launches tells nobody.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from det_callbacks.runs.program import GRAPH
from det_callbacks.trace.replaced import REPLACED

if TYPE_CHECKING:
    from det_callbacks.trace.recorder import Recorder


class CudaGraphs:
    """Follows the CUDA graphs of one step after the other.

    Attributes:
        begun: the captures that were begun in this step, by ``id``; the same set for good.
    """

    _open: list["CudaGraphs"] = []  # noqa: RUF012  # whose step is under way, by all that were replaced

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self.begun: set[int] = set()

    def begin(self) -> None:
        """Start a step."""
        self.end()
        self._open.append(self)
        base = torch.cuda.graphs._CUDAGraph  # type: ignore[attr-defined]  # imported there
        REPLACED.hold(self, base, "capture_begin", lambda method: _wrapped(method, CudaGraphs._before_capture))
        REPLACED.hold(self, base, "replay", lambda method: _wrapped(method, CudaGraphs._before_replay))

    def end(self) -> None:
        """End a step; may be called more than once."""
        if self in self._open:
            self._open.remove(self)
        REPLACED.release(self)
        self.begun.clear()

    def is_capturing(self) -> bool:
        """Return whether what runs here is captured, so that nothing may be recorded beside it."""
        return bool(self.begun) and torch.cuda.is_current_stream_capturing()

    def _before_capture(self, graph: Any) -> None:
        self._recorder.late.flush()  # within the capture the device could not read what waits
        self.begun.add(id(graph))

    def _before_replay(self, _graph: Any) -> None:
        self._recorder.late.before_any_write()
        if not self._recorder.compiled.is_inside():  # a compiled region that replays one has rows for what it gives
            self._recorder.counts.skipped["replayed"] += 1
            self._recorder.run_unseen(GRAPH)


def _wrapped(method: Any, before: Callable[[CudaGraphs, Any], None]) -> Any:
    @functools.wraps(method)
    def call(graph: Any, *args: Any, **kwargs: Any) -> Any:
        for one in CudaGraphs._open:
            before(one, graph)
        return method(graph, *args, **kwargs)

    return call
