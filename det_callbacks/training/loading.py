"""The batches that loaders have drawn, and the generators that they and modules hold."""

import functools
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from det_callbacks.internals.replaced import ReplacedMethods, subclass_of
from det_callbacks.internals.torch import CHILDREN, DataLoaderIter
from det_callbacks.settings.generators import HELD_TYPES, Held, is_default
from det_callbacks.trace.leaves import attributes_of, shown

MAX_OBJECTS = 20_000
"""Limit on visited objects; takes about 20 milliseconds."""

MAX_ITEMS = 256
"""Larger containers are treated as data."""

_LEFT: tuple[Any, ...] = (
    *(bool, int, float, complex, str, bytes, bytearray, type(None), type, range, slice),
    *(
        torch.Tensor,
        np.ndarray,
        np.generic,
        torch.dtype,
        torch.device,
        types.ModuleType,
        types.BuiltinFunctionType,
    ),
    # these reach everything
    *(DataLoaderIter, torch.optim.Optimizer),
)
_WRAPPERS = {
    functools.partial: ("func", "args", "keywords"),
    types.MethodType: ("__self__",),
    types.BuiltinMethodType: ("__self__",),
}

MAX_WAITING = 64  # a fetcher holds one or two
_MAX_WAITING_OF_LOADER = 16  # limit for a loop that does not report when it trains on a batch


def find_generators(roots: Mapping[str, object], *, left: tuple[type, ...] = ()) -> dict[str, Held]:
    """Return path -> generator, found via attributes, items, closures and partials;
    without default generators.

    It skips objects of det_callbacks and of the types ``left``.
    """
    found: dict[str, Held] = {}
    own = random.getstate.__self__  # type: ignore[attr-defined]  # a bound method
    seen: dict[int, object] = {}  # kept alive, so that no identity is reused
    pending: deque[tuple[str, Any]] = deque(roots.items())
    left = (*_LEFT, *left)
    while pending and len(seen) < MAX_OBJECTS:
        path, value = pending.popleft()
        kind = type(value)  # isinstance asks the object for its class
        is_left = issubclass(kind, left) or kind.__module__.startswith("det_callbacks.")
        if is_left or id(value) in seen or value is own:
            continue
        seen[id(value)] = value
        if not issubclass(kind, HELD_TYPES):
            pending.extend((path + suffix, item) for suffix, item in _inside(value))
        elif not issubclass(kind, random.SystemRandom) and not (
            issubclass(kind, torch.Generator) and is_default(value)
        ):
            found[path] = value
    return found


def _inside(value: Any) -> Iterator[tuple[str, object]]:
    """Yield what an object stores; its methods and properties, which are the
    program's code, do not run.
    """
    kind = type(value)
    for container in (dict, list, tuple, set, frozenset, deque):
        if issubclass(kind, container):
            if container.__len__(value) <= MAX_ITEMS:
                items = (
                    dict.items(value) if container is dict else enumerate(container.__iter__(value))
                )
                yield from ((f"[{shown(key)}]", item) for key, item in items)
            return
    if kind is types.FunctionType:
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # not set yet
                yield f".{name}", cell.cell_contents
        return
    names = _WRAPPERS.get(kind, ())
    found = attributes_of(value) | {name: getattr(value, name) for name in names}
    if issubclass(kind, torch.nn.Module):
        found |= dict(found.pop(CHILDREN, {}).items())  # not a dictionary in a scripted module
    yield from ((f".{name}", item) for name, item in found.items())


class Draws:
    """The loaded batches, oldest first; follows the samplers until ``detach``."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self.waiting: deque[tuple[Any, dict[str, Any]]] = deque(maxlen=max_waiting)
        self._samplers = ReplacedMethods()
        self._indices: dict[str, deque[Any]] = {}

    def follow(self, name: str, loader: Any) -> None:
        """Keep the indices from a loader's sampler, if batches come in their order."""
        is_map = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if not is_map or (loader.num_workers and not getattr(loader, "in_order", True)):
            return
        sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        indices = deque[Any]()

        def keep(index: Any) -> Any:
            indices.append(index)
            return index

        def watched(base: Any) -> Any:
            def iterate(self: Any) -> Any:
                indices.clear()
                return map(keep, base.__iter__(self))

            return subclass_of(base, __iter__=iterate)

        # for example a list of indices: instances of built-in types keep their class
        with suppress(TypeError):
            self._samplers.put(sampler, "__class__", watched)
            self._indices[name] = indices

    def add(self, batch: Any) -> None:
        self.waiting.append(
            (batch, {name: known.popleft() for name, known in self._indices.items() if known})
        )

    def detach(self) -> None:
        self._samplers.restore()
        self.waiting.clear()
        self._indices.clear()


class DrawnLoader:
    """A loader during iteration, held weakly, and the batches that it returned."""

    def __init__(self, loader: Any) -> None:
        self._loader = ref(loader)
        self.draws = Draws(_MAX_WAITING_OF_LOADER)
        self.draws.follow("train_dataloader", loader)
        self.num_iterations = 0

    @property
    def loader(self) -> Any:
        return self._loader()
