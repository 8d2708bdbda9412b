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


_WRAPPED: dict[tuple[Any, str], tuple[Callable[..., Any], Callable[..., Any] | None]] = {}
"""Class and name of a method -> the last wrapper of ours, and what the class itself had there."""


def watch(watcher: Watcher) -> None:
    """Tell a watcher from now on; wraps the three methods while there is any."""
    _WATCHERS.append(watcher)  # first: so ``unwatch`` finds what Ctrl-C has left half done
    if len(_WATCHERS) == 1:
        for owner, name in _METHODS:
            method = getattr(owner, name)
            known = _WRAPPED.get((owner, name))
            telling = known[0] if known is not None and known[0].__wrapped__ is method else _told(method)  # type: ignore[attr-defined]  # of functools.wraps
            # what the class has itself; None where a base class in C has it
            _WRAPPED[owner, name] = telling, vars(owner).get(name)
            setattr(owner, name, telling)


def unwatch(watcher: Watcher) -> None:
    """Tell a watcher nothing any more; may be called more than once, and again where Ctrl-C ended it."""
    if watcher in _WATCHERS:
        _WATCHERS.remove(watcher)
    if not _WATCHERS:
        for (owner, name), (telling, before) in _WRAPPED.items():
            if vars(owner).get(name) is not telling:  # put back already, or somebody else's around ours
                continue
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
