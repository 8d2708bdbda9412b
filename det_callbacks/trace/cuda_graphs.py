"""CUDA graphs in a step: what is captured makes no rows, a replay is counted, and what it may have written is unknown.

While a stream is captured its ops are noted by the driver and do not run: there is nothing to digest, and a launch or a
wait of ours would become part of the graph or break it. A replay runs all of them past every mode, so what the step
knew of memory until then counts no more: what is read next is digested anew, as a row of role "left".

Three methods of ``torch.cuda.graphs._CUDAGraph`` are replaced while a step is under way. It is the class in C++ that
``torch.cuda.CUDAGraph`` and every other subclass call in the end (looked at in torch 2.13; in builds without CUDA it
has no methods). A graph that C++ code or cuda-python captures or launches tells nobody.
"""

import functools
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from det_callbacks.runs.program import GRAPH
from det_callbacks.trace.replaced import Replaced
from det_callbacks.trace.tree import Event

if TYPE_CHECKING:
    from det_callbacks.trace.recorder import Recorder


class LeftName(str):
    """Name of a row of role "left": memory that a replay may have written, at its first read after it.

    Its text is compared when a step is predicted, and tells it from that of an input; ``tensor`` is the name shown.
    """

    __slots__ = ("tensor",)

    tensor: str | None

    @classmethod
    def of(cls, tensor: str | None) -> "LeftName":
        """Return the name of the row of a tensor."""
        name = cls(f"left in {tensor or ''}")
        name.tensor = tensor
        return name


class CudaGraphs:
    """Follows the CUDA graphs of one step after the other.

    Args:
        recorder: whose step it is.

    Attributes:
        captures: those under way, by ``id``; the same set for good.
    """

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self.captures: set[int] = set()

    def begin(self) -> None:
        """Start a step."""
        self.end()
        _OPEN.append(self)  # first: so ``end`` finds what Ctrl-C has left half done
        base = torch.cuda.graphs._CUDAGraph  # type: ignore[attr-defined]  # imported there
        for name, make in (("capture_begin", _begins), ("capture_end", _ends), ("replay", _replays)):
            _REPLACED.replace(base, name, make)

    def end(self) -> None:
        """End a step; may be called more than once."""
        if self in _OPEN:
            _OPEN.remove(self)
        if not _OPEN:
            _REPLACED.put_back()
        self.captures.clear()

    def is_capturing(self) -> bool:
        """Return whether what runs here is captured, so that nothing may be recorded beside it."""
        return bool(self.captures) and torch.cuda.is_current_stream_capturing()

    def before_capture(self, graph: Any) -> None:
        """Have the device read what waits: within the capture it could not."""
        self._recorder.late.flush()
        self.captures.add(id(graph))

    def before_replay(self) -> None:
        """Note that a graph runs, which may write any memory; a compiled region that runs one has rows for what."""
        recorder = self._recorder
        recorder.late.before_any_write()
        if get_ident() not in recorder.compiled.inside:
            recorder.passing.skipped["replayed"] += 1
            recorder.passing.opaque.add(GRAPH)
            recorder.ledger.lose()
            parent = recorder.at  # an event without rows: a step without the replay is another program
            like: tuple[Any, ...] = (GRAPH, recorder.phase, "", [], [], [], 0)
            event = next((child for child in parent.children if child.fits(*like)), None)
            if event is None:
                event = Event(parent, *like)
                recorder.tree.add(event)
            parent.likely = recorder.at = event


_OPEN: list[CudaGraphs] = []
_REPLACED = Replaced()


def _begins(method: Any) -> Any:
    @functools.wraps(method)
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
        for one in _OPEN:
            one.before_capture(graph)
        try:
            return method(graph, *args, **kwargs)
        except BaseException:  # Ctrl-C too: ops have to be recorded again
            for one in _OPEN:
                one.captures.discard(id(graph))
            raise

    return capture_begin


def _ends(method: Any) -> Any:
    @functools.wraps(method)
    def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(graph, *args, **kwargs)
        finally:  # an invalidated capture has ended as well
            for one in _OPEN:
                one.captures.discard(id(graph))

    return capture_end


def _replays(method: Any) -> Any:
    @functools.wraps(method)
    def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
        for one in _OPEN:
            one.before_replay()
        return method(graph, *args, **kwargs)

    return replay
