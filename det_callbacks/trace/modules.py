"""Where an op runs: the module in the forward pass, and the autograd engine.

Per-module hooks would disable fast paths such as that of ``nn.TransformerEncoderLayer``. The Python
stack shows what activation checkpointing recomputes (torch 2.13).
"""

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from enum import Enum
from functools import lru_cache
from threading import local
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from det_callbacks.internals.torch import (
    CHECKPOINT_FILE,
    CHECKPOINT_REGIONS,
    RUN_BACKWARD,
    always_called,
    global_hooks,
    global_pre_hooks,
    graph_task_id,
    is_mode,
    modules_in,
)
from det_callbacks.trace.call_graph import NOWHERE, OpScope
from det_callbacks.trace.dispatch import runs_uncompiled
from det_callbacks.trace.source import MAX_LINES, capture_source, is_of_torch

_APPLY_FUNCTION = BackwardCFunction.apply.__code__
_is_mode = lru_cache(maxsize=1024)(is_mode)

UNKNOWN_MODULE = "?"

# torch warns that global hooks also run for the wrapper of a compiled module; ours handle that.
_ABOUT_HOOKS = re.compile(r"Using `torch\.compile\(module\)` when there are global hooks")
_NO_WARNING = ("ignore", _ABOUT_HOOKS, UserWarning, None, 0)


class EngineEntry(Enum):
    ENGINE = "one of torch's formulas, or the engine itself"
    FUNCTION = "the backward of a Python autograd Function"
    HOOK = "other Python code: a hook on a tensor or a node, or on saved tensors"


def frames_above_engine() -> Iterator[FrameType]:
    """Yield the running frames, innermost first, up to the call of the innermost backward pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not RUN_BACKWARD:
        yield frame
        frame = frame.f_back


def engine_entry(depth: int = 0) -> EngineEntry:
    """Return how the autograd engine reached the running op.

    It costs 0.1 microseconds if ``depth`` frames separate the engine from the caller.
    """
    try:
        frame = sys._getframe(depth + 1).f_back
    except ValueError:
        frame = sys._getframe(1)
    # a thread of the engine has no frame below the first
    if frame is None or frame.f_code is RUN_BACKWARD:
        return EngineEntry.ENGINE
    outermost = None
    for frame in frames_above_engine():
        outermost = frame.f_code
    if outermost is _APPLY_FUNCTION:
        return EngineEntry.FUNCTION
    return (
        EngineEntry.ENGINE
        if outermost is None or _is_mode(outermost.co_filename, outermost.co_name)
        else EngineEntry.HOOK
    )


def source_of(scope: OpScope) -> tuple[str, ...]:
    """Return the lines of user code that ran the op, or the forward op whose gradient it computes.

    Lines of a backward in Python come first.
    """
    if scope.source is None:
        return capture_source()
    own = capture_source(RUN_BACKWARD) if engine_entry() is EngineEntry.FUNCTION else ()
    return scope.source if is_of_torch(own) else (*own, *scope.source)[:MAX_LINES]


class _Here(local):
    """Whether this thread is the step's; None if it has called no module
    outside a backward pass.
    """

    is_own: bool | None = None


class ModuleCall(NamedTuple):
    """A running call of a module."""

    module: nn.Module
    scope: OpScope
    backward_pass: int  # in which it runs, -1 if in none
    is_recomputed: bool  # whether a checkpoint recomputes it


class ModuleStack:
    """The modules that run in the step's thread, named relative to ``root``,
    or to the outermost's class.

    Threads of the autograd engine count as the step's thread.
    """

    def __init__(self, root: nn.Module | None) -> None:
        self.stack: list[ModuleCall] = []
        # scope, pass and flag of the innermost call; in a compiled region,
        # ``current`` is the region's scope
        self.current, self.backward_pass, self.is_recomputed = NOWHERE, -1, False
        self.on_enter: Callable[[], None] | None = None  # called before a module is entered
        # called when a module returns outside backward
        self.on_output: Callable[[str, Any], None] | None = None
        self.on_return_elsewhere: Callable[[Any], None] | None = None  # called in another thread
        self._root = root
        self._here = _Here()
        self._scopes: dict[int, OpScope] = {}
        self._modules: list[nn.Module] = []
        self._before_next: Callable[[], None] | None = None
        self._entered: nn.Module | None = None  # by ``enter_call``
        self._hook_key: int | None = None
        self._hooks = (self.enter, self._leave)
        self._has_refreshed = False
        self._filters: list[Any] = []

    def open(self) -> None:
        self._here.is_own = True
        self._has_refreshed = False
        if self._root is not None and not self._scopes:
            self._refresh(self._root, "")
        # a call of a module with hooks takes four frames of Python instead of three,
        # and our own hooks take some
        before = sys.getrecursionlimit()
        self._recursion_limits = before, before * 4 // 3 + 100
        sys.setrecursionlimit(self._recursion_limits[1])
        # register_module_forward_hook uses a new key each time, so that Dynamo,
        # which guards keys, would recompile
        key = -1
        while key in global_hooks or key in global_pre_hooks:
            key -= 1
        self._hook_key = key
        global_pre_hooks[key], global_hooks[key] = self._hooks
        always_called[key] = True
        # warnings.filterwarnings would show again what was shown once
        self._filters = warnings.filters  # type: ignore[assignment]  # a list, declared as a sequence
        self._filters.insert(0, _NO_WARNING)

    def close(self) -> None:
        """Remove the hooks, if there are any."""
        self._before_next = self._entered = None
        if self._hook_key is None:
            return
        for hooks in (global_pre_hooks, global_hooks, always_called):
            hooks.pop(self._hook_key, None)
        if _NO_WARNING in self._filters:
            self._filters.remove(_NO_WARNING)
        self._hook_key = None
        self._here = _Here()
        self.stack.clear()
        self.return_to_stack()
        before, ours = self._recursion_limits
        if sys.getrecursionlimit() == ours:  # the program has not set it since
            sys.setrecursionlimit(before)

    def call_before_next(self, function: Callable[[], None]) -> None:
        """Call a function once, when the next module is entered."""
        self._before_next = function

    def forget(self) -> None:
        """Forget the modules that are named by class: this table would keep them alive."""
        if self._root is None and not self.stack:
            self._scopes.clear()
            self._modules.clear()

    @property
    def names(self) -> list[str]:
        return [scope.module for scope in self._scopes.values()]

    def _refresh(self, root: nn.Module, prefix: str) -> None:
        for name, module in modules_in(root, prefix):
            if id(module) not in self._scopes:
                self._scopes[id(module)] = OpScope(module=name)
                self._modules.append(module)  # so that its id is not reused

    def _scope_of(self, module: nn.Module) -> OpScope | None:
        """Return the scope of a module, or None if it is not in the model,
        such as a wrapper or a metric.
        """
        if (key := id(module)) not in self._scopes:
            if self._root is None and not self.stack:
                self._refresh(module, type(module).__name__)
            elif self._root is not None and not self._has_refreshed:
                self._has_refreshed = True
                self._refresh(self._root, "")
        return self._scopes.get(key)

    def is_elsewhere(self) -> bool:
        """Return whether this thread is neither the step's nor one of the autograd engine's."""
        if self._here.is_own is None and graph_task_id() == -1:
            self._here.is_own = False
        return self._here.is_own is False

    def return_to_stack(self) -> None:
        """Make the innermost running module the current one again."""
        if self.stack:
            _, self.current, self.backward_pass, self.is_recomputed = self.stack[-1]
        else:
            self.current, self.backward_pass, self.is_recomputed = NOWHERE, -1, False

    @runs_uncompiled  # in a compiled hook, is_compiling() would be True forever
    def enter(self, module: nn.Module, _args: tuple[Any, ...]) -> None:
        """Note that a module is called."""
        if torch.compiler.is_compiling():
            return
        if self.is_elsewhere():
            return
        entered, self._entered = self._entered, None
        if entered is module and self.stack and self.stack[-1].module is module:
            return
        if self.on_enter is not None:
            self.on_enter()
        if self._before_next is not None:
            before_next, self._before_next = self._before_next, None
            before_next()
        # ops of a module outside the model count as its caller's
        scope = self._scope_of(module) or self.current
        backward_pass = graph_task_id()
        is_recomputed = backward_pass != -1 and (
            (self.is_recomputed and self.backward_pass == backward_pass)
            or repeated_region() is not None
        )
        self.stack.append(ModuleCall(module, scope, backward_pass, is_recomputed))
        self.current, self.backward_pass, self.is_recomputed = scope, backward_pass, is_recomputed

    def enter_call(self, module: nn.Module) -> None:
        """Note the call under way; ``enter`` follows unless torch chose its
        hooks before ours were there.
        """
        self.enter(module, ())
        self._entered = module

    @runs_uncompiled
    def _leave(self, module: nn.Module, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self.is_elsewhere():
            if self.on_return_elsewhere is not None:
                self.on_return_elsewhere(output)
            return
        depth = len(self.stack)
        while depth and self.stack[depth - 1].module is not module:
            depth -= 1
        if depth:
            call = self.stack[depth - 1]
            if (
                self.on_output is not None
                and output is not None
                and call.backward_pass == -1
                and id(module) in self._scopes
            ):
                self.on_output(call.scope.module, output)
            # an exception, such as checkpointing's early stop, may skip the hooks of inner modules
            del self.stack[depth - 1 :]
            self.return_to_stack()


def repeated_region() -> Any:
    """Return the frame or context of the region that a checkpoint recomputes here, else None."""
    for frame in frames_above_engine():
        name = CHECKPOINT_REGIONS.get(frame.f_code.co_name)
        if name is not None and frame.f_code.co_filename == CHECKPOINT_FILE:
            return frame.f_locals.get(name)
    return None
