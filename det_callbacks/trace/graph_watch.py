"""What CUDA graphs do, told of while somebody wants to know: captures that begin and end, replays, and inductor's own.

Private names of torch, looked at in 2.13. ``torch.cuda.graphs._CUDAGraph`` is the class in C++ that
``torch.cuda.CUDAGraph`` and every other subclass call in the end; in builds without CUDA it has no methods.
``CUDAGraphTreeManager.run`` of ``torch._inductor.cudagraph_trees`` runs the compiled code of the modes reduce-overhead
and max-autotune, and of the backend cudagraphs: first as it is, to warm up, then to capture it, later by a replay. A
graph that C++ code or cuda-python launches tells nobody.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch

_Method = Callable[..., Any]


class Watcher(Protocol):
    """Who wants to know."""

    def before_capture(self, graph: Any) -> None:
        """Called before the current stream begins to be captured."""

    def after_capture(self, graph: Any) -> None:
        """Called when a capture has ended, or could not begin."""

    def before_replay(self, graph: Any) -> None:
        """Called before a graph is launched on the current stream."""

    def before_managed(self) -> None:
        """Called before inductor runs code that it captures, or replays, as it sees fit."""

    def after_managed(self) -> None:
        """Called when that has returned, or raised."""


_WATCHERS: list[Watcher] = []
_WRAPPED: dict[tuple[Any, str], Any] = {}
"""Class and name of a wrapped method -> what stood there."""


def watch(watcher: Watcher) -> None:
    """Tell a watcher from now on; wraps the methods while there is any."""
    _WATCHERS.append(watcher)
    base = torch.cuda.graphs._CUDAGraph  # type: ignore[attr-defined]  # imported there
    _wrap(base, "capture_begin", _begins)
    _wrap(base, "capture_end", _ends)
    _wrap(base, "replay", _replays)
    meet_managed()


def meet_managed() -> None:
    """Follow inductor's graphs, too, once the module that has them is there: an import would take seconds."""
    module = sys.modules.get("torch._inductor.cudagraph_trees")
    if module is not None and _WATCHERS:
        _wrap(module.CUDAGraphTreeManager, "run", _manages)


def unwatch(watcher: Watcher) -> None:
    """Tell a watcher nothing any more; may be called more than once, and again where Ctrl-C ended it."""
    if watcher in _WATCHERS:
        _WATCHERS.remove(watcher)
    if not _WATCHERS:
        for (owner, name), before in _WRAPPED.items():
            setattr(owner, name, before)
        _WRAPPED.clear()


def _wrap(owner: Any, name: str, tells: Callable[[_Method], _Method]) -> None:
    before = vars(owner).get(name)
    if before is not None and (owner, name) not in _WRAPPED:
        _WRAPPED[owner, name] = before
        setattr(owner, name, tells(getattr(owner, name)))


def _begins(method: _Method) -> _Method:
    @functools.wraps(method)
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
        for watcher in _WATCHERS:
            watcher.before_capture(graph)
        try:
            return method(graph, *args, **kwargs)
        except BaseException:  # Ctrl-C too: no method may stay wrapped
            for watcher in _WATCHERS:
                watcher.after_capture(graph)
            raise

    return capture_begin


def _ends(method: _Method) -> _Method:
    @functools.wraps(method)
    def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(graph, *args, **kwargs)
        finally:  # an invalidated capture has ended as well
            for watcher in _WATCHERS:
                watcher.after_capture(graph)

    return capture_end


def _replays(method: _Method) -> _Method:
    @functools.wraps(method)
    def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
        for watcher in _WATCHERS:
            watcher.before_replay(graph)
        return method(graph, *args, **kwargs)

    return replay


def _manages(method: _Method) -> _Method:
    @functools.wraps(method)
    def run(manager: Any, *args: Any, **kwargs: Any) -> Any:
        watchers = tuple(_WATCHERS)
        for watcher in watchers:
            watcher.before_managed()
        try:
            return method(manager, *args, **kwargs)
        finally:
            for watcher in watchers:
                watcher.after_managed()

    return run
