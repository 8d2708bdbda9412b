"""Generators that objects hold: a data set's own, a sampler's, a module's."""

import functools
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.strategies import Strategy
from torch.utils.data.dataloader import _BaseDataLoaderIter

from det_callbacks.rng import HELD_TYPES, Held, is_default

MAX_OBJECTS = 20_000
"""Objects that are looked at; some 20 milliseconds."""

MAX_ITEMS = 256
"""A container with more is taken for data."""

_LEFT: tuple[Any, ...] = (
    *(bool, int, float, complex, str, bytes, bytearray, type(None), type, range, slice),
    *(torch.Tensor, np.ndarray, np.generic, torch.dtype, torch.device, types.ModuleType, types.BuiltinFunctionType),
    # these lead to everything
    *(pl.Trainer, Logger, Strategy, _Loop, _BaseDataLoaderIter, torch.optim.Optimizer),
)


def find_generators(roots: Mapping[str, object], *, left: tuple[type, ...] = ()) -> dict[str, Held]:
    """Return path -> random generator for those that the roots reach by attributes, items, closures and partials.

    The process's own generators are not among them, and neither is ``random.SystemRandom``, which has no state. Looks
    at 20,000 objects at most, into no container of more than 256 items, and into nothing of Lightning's loops or ours.

    Args:
        roots: name -> object; names begin the paths.
        left: further types whose instances are not looked into.
    """
    found: dict[str, Held] = {}
    own = random.getstate.__self__  # type: ignore[attr-defined]  # a bound method
    seen: dict[int, object] = {}  # kept alive, so that no identity is used twice
    pending = deque(roots.items())
    while pending and len(seen) < MAX_OBJECTS:
        path, value = pending.popleft()
        is_left = isinstance(value, (*_LEFT, *left)) or type(value).__module__.startswith("det_callbacks.")
        if is_left or id(value) in seen or value is own:
            continue
        seen[id(value)] = value
        if not isinstance(value, HELD_TYPES):
            pending.extend((path + suffix, item) for suffix, item in _inside(value))
        elif not isinstance(value, random.SystemRandom) and not (
            isinstance(value, torch.Generator) and is_default(value)
        ):
            found[path] = value
    return found


def _inside(value: Any) -> Iterator[tuple[str, object]]:
    """Yield what an object holds, with what it adds to the path."""
    if isinstance(value, Mapping | list | tuple | set | frozenset | deque):
        if len(value) <= MAX_ITEMS:
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            yield from ((f"[{key!r}]", item) for key, item in items)
    elif isinstance(value, functools.partial):
        held = {"func": value.func, "args": value.args, "keywords": value.keywords}
        yield from ((f".{name}", item) for name, item in held.items())
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # a name that has no value yet
                yield f".{name}", cell.cell_contents
    else:
        found = dict(getattr(value, "__dict__", {}))
        if isinstance(value, torch.nn.Module):
            found |= dict(found.pop("_modules", {}).items())  # of a scripted module it is no dictionary
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    found[name] = getattr(value, name)
        yield from ((f".{name}", item) for name, item in found.items())
