"""Which module is running: a stack kept by global forward hooks while a step is traced.

Per-module hooks would switch off fast paths such as ``nn.TransformerEncoderLayer``'s. What activation checkpointing
repeats in the backward pass is told by the stack (looked at in torch 2.13).
"""

import re
import warnings
from collections.abc import Callable
from threading import local
from typing import Any, Protocol

import torch
from torch import nn

from det_callbacks.internals.torch import (
    CHECKPOINT_FILE,
    CHECKPOINT_REGIONS,
    always_called,
    global_hooks,
    global_pre_hooks,
    graph_task_id,
)
from det_callbacks.trace.attribution.engine import frames_above_engine
from det_callbacks.trace.dispatch import runs_uncompiled
from det_callbacks.trace.op.call_graph import NOWHERE, OpScope

UNKNOWN_MODULE = "?"

# torch warns at each call of a compiled module that global hooks are called once more for its wrapper: ours know.
_ABOUT_HOOKS = re.compile(r"Using `torch\.compile\(module\)` when there are global hooks")
_NO_WARNING = ("ignore", _ABOUT_HOOKS, UserWarning, None, 0)


class _Here(local):
    """Whether this thread is the step's own: read without a call, since every module call asks."""

    is_own = False


class ModuleCalls:
    """The module calls that are under way in one thread."""

    def __init__(self) -> None:
        # each running module, its scope, the backward pass that it was called in (-1 for none), and whether that call
        # repeats one of the forward pass under activation checkpointing
        self.stack: list[tuple[nn.Module, OpScope, int, bool]] = []
        # the same of the innermost; while a compiled region runs, the scope is that of the module whose code it is
        self.current, self.backward_pass, self.is_recomputed = NOWHERE, -1, False

    def enter(self, module: nn.Module, scope: OpScope) -> None:
        """Note that a module is called."""
        backward_pass = graph_task_id()
        is_recomputed = backward_pass != -1 and (
            (self.is_recomputed and self.backward_pass == backward_pass) or repeated_region() is not None
        )
        self.stack.append((module, scope, backward_pass, is_recomputed))
        self.current, self.backward_pass, self.is_recomputed = scope, backward_pass, is_recomputed

    def find(self, module: nn.Module) -> int:
        """Return how many modules are running up to the innermost call of this one, itself included; 0 for none."""
        running = (depth for depth in range(len(self.stack), 0, -1) if self.stack[depth - 1][0] is module)
        return next(running, 0)

    def clear(self) -> None:
        """Leave every module."""
        self.stack.clear()
        self.return_to_stack()

    def return_to_stack(self) -> None:
        """Make the innermost running module the current one."""
        innermost = self.stack[-1][1:] if self.stack else (NOWHERE, -1, False)
        self.current, self.backward_pass, self.is_recomputed = innermost


class OtherThreads(Protocol):
    """Follows the modules that are called in other threads than the step's own."""

    def enter(self, module: nn.Module, scope: OpScope | None, args: tuple[Any, ...]) -> None:
        """Note that a module is called in this thread; without a scope it is not part of the model."""

    def leave(self, module: nn.Module, output: Any, *, is_of_model: bool) -> None:
        """Note that a module returns in this thread, None where it raises."""

    def is_followed(self) -> bool:
        """Return whether a module is running in this thread."""


class ModuleStack(ModuleCalls):
    """The modules that run in the step's own thread, by names relative to ``root``, or to the class of the outermost.

    Threads of the autograd engine, which run parts of a backward pass for it, count as that thread.
    """

    def __init__(self, root: nn.Module | None) -> None:
        super().__init__()
        self.on_enter: Callable[[], None] | None = None  # called before a module is entered
        self.on_output: Callable[[str, Any], None] | None = None  # with the name, when one returns in no backward pass
        self.others: OtherThreads | None = None  # None leaves out what runs in them
        self._root = root
        self._here = _Here()
        self._scopes: dict[int, OpScope] = {}
        self._modules: list[nn.Module] = []
        self._at_next: Callable[[], None] | None = None
        self._key: int | None = None
        self._hooks = (self._enter, self._leave)
        self._has_refreshed = False
        self._filters: list[Any] = []

    def open(self) -> None:
        """Register the hooks; this thread is the step's own."""
        self._here.is_own = True
        self._has_refreshed = False
        if self._root is not None and not self._scopes:
            self._refresh(self._root, "")
        # Not by register_module_forward_hook, which takes another key each time: Dynamo guards on the keys, and would
        # compile anew in every step until it gives up.
        key = -1
        while key in global_hooks or key in global_pre_hooks:
            key -= 1
        self._key = key
        global_pre_hooks[key], global_hooks[key] = self._hooks
        always_called[key] = True
        # not by filterwarnings, which lets every warning that was shown once be shown again
        self._filters = warnings.filters  # type: ignore[assignment]  # a list, declared as a sequence
        self._filters.insert(0, _NO_WARNING)

    def close(self) -> None:
        """Remove the hooks and leave every module; may be called more than once."""
        if self._key is not None:
            for hooks in (global_pre_hooks, global_hooks, always_called):
                hooks.pop(self._key, None)
            if _NO_WARNING in self._filters:
                self._filters.remove(_NO_WARNING)
        self._key = self._at_next = None
        self._here = _Here()
        self.clear()

    def call_at_next(self, function: Callable[[], None]) -> None:
        """Call a function once, before the next module is entered in this step."""
        self._at_next = function

    def forget(self) -> None:
        """Forget the modules named by their class, which would be kept alive; call between steps."""
        if self._root is None and not self.stack:
            self._scopes.clear()
            self._modules.clear()

    @property
    def names(self) -> list[str]:
        """Qualified names of the modules known so far, in the order in which the model lists them."""
        return [scope.module for scope in self._scopes.values()]

    def _refresh(self, root: nn.Module, prefix: str) -> None:
        for name, module in root.named_modules(prefix=prefix):
            if id(module) not in self._scopes:
                self._scopes[id(module)] = OpScope(module=name)
                self._modules.append(module)  # keeps the id from being reused

    def _scope_of(self, module: nn.Module) -> OpScope | None:
        """Return the scope of a module, None where it is not part of the model: a wrapper, a metric."""
        if (key := id(module)) not in self._scopes:
            if self._root is None and not self.stack:
                self._refresh(module, type(module).__name__)
            elif self._root is not None and not self._has_refreshed:
                self._has_refreshed = True
                self._refresh(self._root, "")
        return self._scopes.get(key)

    def _is_for_itself(self) -> bool:
        """Return whether a thread that is not the step's own runs here for itself, and not for the autograd engine."""
        return graph_task_id() == -1 or (self.others is not None and self.others.is_followed())

    @runs_uncompiled  # compiled by itself it would do nothing, for good: what is compiled is told by is_compiling
    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        if not self._here.is_own and self._is_for_itself():
            if self.others is not None:
                self.others.enter(module, self._scope_of(module), args)
            return
        if self.on_enter is not None:
            self.on_enter()
        if self._at_next is not None:
            at_next, self._at_next = self._at_next, None
            at_next()
        self.enter(module, self._scope_of(module) or self.current)  # the ops of a stranger count as its caller's

    @runs_uncompiled  # likewise
    def _leave(self, module: nn.Module, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not self._here.is_own and self._is_for_itself():
            if self.others is not None:
                self.others.leave(module, output, is_of_model=id(module) in self._scopes)
            return
        depth = len(self.stack)
        if not (depth and self.stack[-1][0] is module):
            depth = self.find(module)
        if depth:
            _, scope, backward_pass, _ = self.stack[depth - 1]
            if self.on_output is not None and output is not None and backward_pass == -1 and id(module) in self._scopes:
                self.on_output(scope.module, output)
            # an exception (checkpointing's early stop is one) may have skipped the hooks of modules further in
            del self.stack[depth - 1 :]
            self.return_to_stack()


def repeated_region() -> Any:
    """Return what activation checkpointing repeats in a backward pass here: its frame or context, None for nothing."""
    for frame in frames_above_engine():
        name = CHECKPOINT_REGIONS.get(frame.f_code.co_name)
        if name is not None and frame.f_code.co_filename == CHECKPOINT_FILE:
            return frame.f_locals.get(name)
    return None
