"""The one active observer of the process."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from det_callbacks.errors import TraceError

Leaves = Sequence[tuple[str, Any]]
"""Path and value of the tensors and plain values of a nested structure, in order."""


class ObservationSink(Protocol):
    """Takes what is observed; ``det_callbacks.observers.Observations`` is one, for any recorder."""

    def observe(self, name: str, leaves: Leaves, *, first: int = 0) -> None:
        """Record values; ``first`` is the index of the first of them among the leaves of this observation."""

    def replay(self, name: str, leaves: Leaves, *, first: int = 0) -> Mapping[str, Any]:
        """Save or put back values: tensors in place; return the plain ones that were others, by path."""

    def observe_gradient(self, name: str, tensor: Tensor, *, is_replayed: bool, is_compiled: bool) -> None:
        """Record the gradient of a tensor once it is there; with ``is_replayed`` save it or put it back."""

    def enable_ops(self) -> None:
        """Record ops from here on."""

    def disable_ops(self) -> None:
        """Record no ops from here on."""


class Registry:
    """Holds the active observer; ``sink`` is read at each observation, so it is a plain attribute."""

    def __init__(self) -> None:
        self.sink: ObservationSink | None = None
        self._lock = threading.Lock()

    def put(self, sink: ObservationSink) -> None:
        """Register a sink, unless another one is."""
        with self._lock:
            if self.sink is not None:
                raise TraceError(
                    f"Another observer is active already ({self.sink}): a value would not know where to go. "
                    "Leave the ObserverContext, or end the fit with DeterminismCallback, before starting this one."
                )
            self.sink = sink

    def take(self, sink: ObservationSink) -> None:
        """Take a sink away; nothing is done when it is not the active one."""
        with self._lock:
            if self.sink is sink:
                self.sink = None


REGISTRY = Registry()


def activate(sink: ObservationSink) -> None:
    """Make a sink the active observer of this process.

    Raises:
        TraceError: another one is active; two observers at once would not know whose an observation is.
    """
    REGISTRY.put(sink)


def deactivate(sink: ObservationSink) -> None:
    """End an observer; nothing is done when it is not the active one, so that it may be called on every path."""
    REGISTRY.take(sink)
