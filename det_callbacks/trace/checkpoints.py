"""Which module called a region under activation checkpointing.

A region's ops outside any module call belong to the module that called ``torch.utils.checkpoint``; when they are
repeated in the backward pass, that module is no longer on the stack.

Looked at in torch 2.13: without reentry, a region is a ``_CheckpointFrame`` in the closure of the saved-tensor hooks
that are in force while it runs, and a local of the unpack hook that repeats it; with reentry it is the node of
``CheckpointFunction``, the ``ctx`` of its backward. Where these names are not found, the region is unknown.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from det_callbacks.trace.source import frames_above_engine

top_hooks: Callable[[bool], tuple[Any, Any] | None] = torch._C._autograd._top_saved_tensors_default_hooks
"""Returns the saved-tensor hooks in force as (pack, unpack), or None; takes 0.05 microseconds."""

_FILE = CheckpointFunction.forward.__code__.co_filename


def running_region() -> Any:
    """Return the region that the running code repeats inside a backward pass, None when it repeats none."""
    for frame in frames_above_engine():
        if frame.f_code.co_filename == _FILE:
            if frame.f_code.co_name == "unpack_hook":
                return frame.f_locals.get("frame")
            if frame.f_code.co_name == "backward":
                return frame.f_locals.get("ctx")
    return None


class Checkpoints:
    """Remembers who called the regions without reentry; holds no region alive."""

    def __init__(self) -> None:
        self._callers: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._last: Callable[[], Any] = lambda: None

    def is_new(self, hooks: tuple[Any, Any]) -> bool:
        """Return whether these hooks have not been looked at yet."""
        return self._last() is not hooks[1]

    def note(self, hooks: tuple[Any, Any], caller: str) -> None:
        """Note which module opened the region of the hooks in force, if they are of a region.

        Args:
            hooks: what ``top_hooks`` returned.
            caller: the module that runs at the first event after the hooks were set.
        """
        unpack = hooks[1]
        if self._last() is unpack:
            return
        region = _region_of(unpack)
        if region is not None:
            self._last = weakref.ref(unpack)
            self._callers.setdefault(region, caller)

    def caller_of(self, region: Any, default: str) -> str:
        """Return the module that called a region, the default when that was not seen."""
        return self._callers.get(region, default)


def _region_of(unpack: Any) -> Any:
    code = getattr(unpack, "__code__", None)
    if code is None or code.co_filename != _FILE or "frame" not in code.co_freevars:
        return None
    return unpack.__closure__[code.co_freevars.index("frame")].cell_contents
