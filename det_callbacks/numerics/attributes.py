"""What the attributes of modules are, taken to be put back: which objects they hold, and random generators."""

import collections
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Attributes:
    """The attributes of all modules below one, as they are now.

    Held: which object each attribute is, and each entry of its dictionaries, lists, sets and deques (so parameters and
    buffers that are replaced come back, and hooks); the states of generators among them. The content of tensors is not
    held here, nor what lies deeper.

    Args:
        module: the root.
    """

    def __init__(self, module: nn.Module) -> None:
        self._refills: list[Callable[[], None]] = []
        for part in module.modules():
            attributes = vars(part)
            self._refills.append(_refill_dict(attributes))
            for value in attributes.values():
                if (refill := _refill_of(value)) is not None:
                    self._refills.append(refill)

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
