"""What gets at a tensor's memory past every dispatch mode, told of while somebody wants to know.

``torch.UntypedStorage.resize_`` frees memory (FSDP: ``resize_(0)``). A tensor's ``data_ptr`` and ``__dlpack__`` hand it
out: to a Triton kernel that is launched on the tensor (Triton's launchers ask each argument for its ``data_ptr``;
Triton 3.7), to CuPy, Numba and ctypes. C++ code that was given a tensor asks nobody.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Watcher(Protocol):
    """Who wants to know."""

    def before_access(self, storage: torch.UntypedStorage) -> None:
        """Called before memory is freed, or its address handed out."""


_WATCHERS: list[Watcher] = []


def watch(watcher: Watcher) -> None:
    """Tell a watcher from now on; wraps the three methods while there is any."""
    if not _WATCHERS:
        for (owner, name), telling in zip(_METHODS, _TELLING, strict=True):
            setattr(owner, name, telling)
    _WATCHERS.append(watcher)


def unwatch(watcher: Watcher) -> None:
    """Tell a watcher nothing any more; may be called more than once."""
    if watcher in _WATCHERS:
        _WATCHERS.remove(watcher)
        if not _WATCHERS:
            for (owner, name), before in zip(_METHODS, _BEFORE, strict=True):
                if before is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)


def _told(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def tell(value: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            storage = value.untyped_storage() if isinstance(value, torch.Tensor) else value
        except NotImplementedError:  # sparse, or a transform's wrapper: no memory of its own
            return method(value, *args, **kwargs)
        for watcher in _WATCHERS:
            watcher.before_access(storage)
        return method(value, *args, **kwargs)

    return tell


_METHODS: tuple[tuple[Any, str], ...] = (
    (torch.UntypedStorage, "resize_"),
    (torch.Tensor, "data_ptr"),
    (torch.Tensor, "__dlpack__"),
)
_BEFORE = tuple(vars(owner).get(name) for owner, name in _METHODS)
"""What the classes have themselves; None where a base class in C has it."""
_TELLING = tuple(_told(getattr(owner, name)) for owner, name in _METHODS)
