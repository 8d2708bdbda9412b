"""What the attributes of modules are, taken to be put back: which objects they hold, and random generators."""

import collections
import random
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_MAX_OBJECTS = 100_000
_NOT_ENTERED = (nn.Module, Tensor, type, ModuleType, FunctionType, str, bytes, int, float, complex, bool, NoneType)
_FOREIGN = ("torch", "lightning", "numpy", "builtins")


class Attributes:
    """The attributes of all modules below one, as they are now.

    Held: which object each attribute is, and each entry of dictionaries, lists, sets and deques, however deep (so
    parameters and buffers that are replaced come back, and hooks); the attributes of plain objects among them, the
    content of NumPy arrays, and the states of generators. The content of tensors is not held here, nor what objects of
    torch's and Lightning's own, or without a ``__dict__``, keep inside.

    Args:
        module: the root.
    """

    def __init__(self, module: nn.Module) -> None:
        self._refills: list[Callable[[], None]] = []
        waiting: list[Any] = []
        for part in module.modules():
            self._refills.append(_refill_dict(vars(part)))
            waiting.extend(vars(part).values())
        seen: dict[int, Any] = {}  # with the objects, whose ids would be used again
        while waiting and len(seen) < _MAX_OBJECTS:
            value = waiting.pop()
            if id(value) in seen or isinstance(value, _NOT_ENTERED):
                continue
            seen[id(value)] = value
            if (refill := _refill_of(value)) is not None:
                self._refills.append(refill)
            waiting.extend(_entries_of(value))

    def put_back(self) -> None:
        """Make the attributes again what they were."""
        for refill in self._refills:
            refill()


def tensor_attributes(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that modules hold beside parameters and buffers: attributes, and entries of containers.

    Not those that autograd computed: a forward pass makes them again.
    """
    for part in module.modules():
        for name, value in vars(part).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            entries = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else (value,)
            for entry in entries:
                if isinstance(entry, Tensor) and entry.is_leaf:
                    yield entry


def _refill_of(value: Any) -> Callable[[], None] | None:
    """Return what makes a container or a generator again what it is now; None for anything else."""
    if type(value) in (dict, collections.OrderedDict, collections.defaultdict):
        return _refill_dict(value)
    if type(value) in (list, collections.deque):
        return _refill_sequence(value)
    if type(value) is set:
        return _refill_set(value)
    if isinstance(value, np.ndarray) and value.flags.writeable and not value.dtype.hasobject:
        return _refill_array(value)
    if _is_plain(value):
        return _refill_dict(vars(value))
    if isinstance(value, torch.Generator):
        return _setter(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return _setter(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return _setter(value.set_state, value.get_state(legacy=False))
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        return _setter(lambda before: setattr(bits, "state", before), bits.state)
    return None


def _is_plain(value: Any) -> bool:
    """Return whether a value is an object of somebody's own class, with attributes."""
    owner = type(value).__module__.partition(".")[0]
    return owner not in _FOREIGN and isinstance(getattr(value, "__dict__", None), dict)


def _entries_of(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return list(value)
    return list(vars(value).values()) if _is_plain(value) else ()


def _refill_array(value: Any) -> Callable[[], None]:
    before = value.copy()

    def put_back() -> None:
        np.copyto(value, before)

    return put_back


def _setter(write: Callable[[Any], object], state: Any) -> Callable[[], None]:
    def put_back() -> None:
        write(state)

    return put_back


def _refill_dict(value: dict[Any, Any]) -> Callable[[], None]:
    before = dict(value)

    def put_back() -> None:
        # nothing is written where nothing changed: Dynamo watches the dictionaries of modules
        if list(value) != list(before) or any(value[key] is not entry for key, entry in before.items()):
            value.clear()
            value.update(before)

    return put_back


def _refill_sequence(value: Any) -> Callable[[], None]:
    before = list(value)

    def put_back() -> None:
        if len(value) != len(before) or any(one is not other for one, other in zip(value, before, strict=True)):
            value.clear()
            value.extend(before)

    return put_back


def _refill_set(value: set[Any]) -> Callable[[], None]:
    before = set(value)

    def put_back() -> None:
        if value != before:
            value.clear()
            value.update(before)

    return put_back
