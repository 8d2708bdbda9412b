"""Generators that objects hold: a data set's own, a sampler's, a module's."""

import functools
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from det_callbacks.rng import HELD_TYPES, Held, is_default

MAX_OBJECTS = 20_000
"""Objects that are looked at; some 20 milliseconds."""

MAX_ITEMS = 256
"""A container with more is taken for data."""

_LEFT: tuple[Any, ...] = (
    *(bool, int, float, complex, str, bytes, bytearray, type(None), type, range, slice),
    *(torch.Tensor, torch.nn.Parameter, np.ndarray, np.generic, torch.dtype, torch.device),
    *(types.ModuleType, types.BuiltinFunctionType, types.CodeType),
)


def find_generators(roots: Mapping[str, object], *, left: tuple[type, ...] = ()) -> dict[str, Held]:
    """Return path -> random generator for those that the roots reach by attributes, items, closures and partials.

    The process's own generators are not among them, and neither is ``random.SystemRandom``, which has no state. Looks
    at 20,000 objects at most and into no container of more than 256 items.

    Args:
        roots: name -> object; names begin the paths.
        left: types whose instances are not looked into.
    """
    found: dict[str, Held] = {}
    own = random.getstate.__self__  # type: ignore[attr-defined]  # a bound method
    seen: dict[int, object] = {}  # kept alive, so that no identity is used twice
    pending = deque(roots.items())
    while pending and len(seen) < MAX_OBJECTS:
        path, value = pending.popleft()
        if isinstance(value, (*_LEFT, *left)) or id(value) in seen or value is own:
            continue
        seen[id(value)] = value
        if isinstance(value, HELD_TYPES):
            is_own = isinstance(value, torch.Generator) and is_default(value)
            if not is_own and not isinstance(value, random.SystemRandom):
                found[path] = value
            continue
        pending.extend(_inside(path, value))
    return found


def _inside(path: str, value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping | list | tuple | set | frozenset | deque):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        if len(value) <= MAX_ITEMS:
            yield from ((f"{path}[{key!r}]", item) for key, item in items)
        return
    if isinstance(value, functools.partial):
        yield f"{path}.func", value.func
        yield from ((f"{path}.args[{index}]", item) for index, item in enumerate(value.args))
        yield from ((f"{path}.{key}", item) for key, item in value.keywords.items())
        return
    if isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
        return
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # a name that has no value yet
                yield f"{path}.{name}", cell.cell_contents
        return
    found = dict(getattr(value, "__dict__", {}))
    if isinstance(value, torch.nn.Module):
        modules = dict(found.pop("_modules", {}).items())  # of a scripted module it is no dictionary
        found = {name: item for name, item in found.items() if name not in ("_buffers", "_parameters")} | modules
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    yield from ((f"{path}.{name}", item) for name, item in found.items())
