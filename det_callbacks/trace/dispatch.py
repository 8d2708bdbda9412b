"""The base class of the dispatch modes in this package."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch.overrides import enable_reentrant_dispatch

from det_callbacks.internals import dynamo
from det_callbacks.internals.torch import (
    TorchDispatchMode,
    call_composite,
    call_without_torch_function,
    current_mode,
    has_kernel_for,
    pass_on,
    pop_mode,
    push_mode,
    without_autocast,
)
from det_callbacks.trace.overloads import tensors_in

_Function = TypeVar("_Function", bound=Callable[..., Any])


TAKE_APART = object()
"""Returned by a handler for a composite op: the mode takes the op apart and
handles the ops inside.
"""


class ProgramCode:
    """Runs ops that may run Python code of the program, which sees the torch functions that it
    would see without us.
    """

    def __init__(self) -> None:
        self.hidden: Any = None  # hides the handler of the running op from torch functions

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        hidden = self.hidden
        hidden.__exit__(None, None, None)
        try:
            return call_without_torch_function(call, (), args, kwargs)
        finally:
            hidden.__enter__()
            self.hidden = hidden


class DispatchMode(TorchDispatchMode):
    """A dispatch mode under which torch.compile still compiles;
    costs 4 instead of 7 microseconds an op.

    ``handle`` is called like ``__torch_dispatch__``, and returns the op's
    result, or ``TAKE_APART``.
    """

    supports_higher_order_operators = True

    def __init__(self, handle: Callable[..., Any] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves its modes unannotated
        self._handle = handle
        dynamo.skip(type(self).__torch_dispatch__.__code__)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile under this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch's wrapper of __torch_dispatch__ costs 3 microseconds per op. It keeps Dynamo out of
        # this code between the parts of a compiled function; __init__ does so once.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._handle is None:
            return pass_on(func, args, kwargs or {})
        out = self._handle(func, types, args, kwargs or {})
        return out if out is not TAKE_APART else self.take_apart(func, args, kwargs or {})

    @property
    def is_on(self) -> bool:
        """Whether this mode handles ops; otherwise it passes them on."""
        return self._handle is not None

    def turn_off(self) -> None:
        self._handle = None

    def take_apart(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a composite op so that this mode handles the ops inside,
        as it does outside inference mode.

        A handler runs without autocast. The ops inside need the autocast state that they have
        without this mode: that of the call, or off if the composite op has an autocast rule.
        """
        devices = {tensor.device.type for tensor in tensors_in((*args, *kwargs.values()))}
        has_rule = any(
            torch.amp.is_autocast_available(device)
            and has_kernel_for(func.name(), f"Autocast{device.upper()}")
            for device in devices
        )
        push_mode(self)
        try:
            with enable_reentrant_dispatch(), without_autocast() if has_rule else nullcontext():
                return call_composite(func, *args, **kwargs)
        finally:
            pop_mode()

    @property
    def is_on_top(self) -> bool:
        """Whether this mode was entered last; leaving a mode pops the one entered last."""
        return current_mode() is self

    def leave(self) -> str | None:
        """Leave this mode; if another mode is on top, only turn this one off and
        return the class of the other.
        """
        if self.is_on_top:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own
            return None
        self.turn_off()
        return self.describe_top()

    def describe_top(self) -> str:
        return type(current_mode()).__name__


def runs_uncompiled(function: _Function) -> _Function:
    """Keep Dynamo from compiling a function between compiled parts of another;
    a graph may still contain it.
    """
    dynamo.skip(function.__code__)
    return function


def breaks_graph(reason: str) -> Callable[[_Function], _Function]:
    """Make compiled functions call a function outside their graph.

    Does what ``torch.compiler.disable`` does, without importing Dynamo together with this package.
    """

    def mark(function: _Function) -> _Function:
        runs_uncompiled(function)
        dynamo.break_graph_at(function, reason)
        return function

    return mark
