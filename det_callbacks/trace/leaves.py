"""Lists the leaves of a nested structure by path, and the state of model and optimizers by name.

It reads what an object stores, not what the methods and properties of its class return: they are
the program's code, which may draw random numbers or load a file.
"""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from gc import get_referents
from operator import itemgetter
from types import GetSetDescriptorType, MappingProxyType, MemberDescriptorType
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from det_callbacks.internals.torch import CHILDREN, modules_in

MAX_DEPTH = 20

_VALUES = (Tensor, float, int)
_CONSTANTS = (type(None), str, bytes, type, Enum, torch.dtype, torch.device, ReferenceType)
_LEAVES = (*_VALUES, *_CONSTANTS)
_path = itemgetter(0)
_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, list, tuple})
_HEAP_TYPE = 1 << 9
"""Flag of classes defined in Python (Py_TPFLAGS_HEAPTYPE), whose instances hold only attributes."""

Entry = tuple[str, Tensor | int | float | bool]
"""A name, and its tensor or number."""


def flatten(
    tree: Any, name: str, *, is_whole: bool = False
) -> Iterator[tuple[str, Tensor | int | float | bool]]:
    """Yield the tensors and numbers in a nested structure with their paths, see ``leaves``."""
    return (
        entry
        for entry in leaves(tree, name, is_whole=is_whole)
        if issubclass(type(entry[1]), _VALUES)
    )


def leaves(tree: Any, name: str, *, is_whole: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested structure with their paths.

    It enters mappings, lists, tuples and attributes of other objects (private ones only if
    ``is_whole``), 20 levels deep, each object once. The entries of a private mapping in a class
    with ``__getattr__`` count as attributes, as in torch_geometric. The entries of a mapping are in
    the order of their paths: its own order may come from a set, and differ from process to process.
    """
    return _leaves(tree, name, {}, is_whole=is_whole, depth=0)


def is_constant(leaf: Any) -> bool:
    """Return whether a leaf is not compared: None, text or a name of another object."""
    return issubclass(type(leaf), _CONSTANTS)


def _leaves(
    tree: Any, name: str, entered: dict[int, Any], *, is_whole: bool, depth: int
) -> Iterator[tuple[str, Any]]:
    """Yield the leaves; ``entered`` keeps visited objects and enclosing sequences alive,
    so that no id is reused.
    """
    if id(tree) in entered:
        return
    is_leaf = issubclass(type(tree), _LEAVES) or depth == MAX_DEPTH
    children = None if is_leaf else _children(tree, name, is_whole=is_whole)
    if children is None:
        yield name, tree
        return
    entered[id(tree)] = tree
    for child_name, child in children:
        if issubclass(type(child), _LEAVES):  # saves a call
            yield child_name, child
        else:
            yield from _leaves(child, child_name, entered, is_whole=is_whole, depth=depth + 1)
    if issubclass(type(tree), (list, tuple, Mapping)):
        del entered[id(tree)]


def _children(tree: Any, name: str, *, is_whole: bool) -> list[tuple[str, Any]] | None:
    """Return the children of an object with their paths, or None if it is a leaf."""
    kind = type(tree)
    attributes = {} if kind in _CONTAINERS else _attributes(tree)
    store = _store_of(tree, attributes or {})
    if issubclass(kind, tuple):
        fields = getattr(kind, "_fields", ())
        places = [f".{field}" for field in fields] or [
            f"[{index}]" for index in range(tuple.__len__(tree))
        ]
        items = [
            (name + place, value)
            for place, value in zip(places, tuple.__iter__(tree), strict=False)
        ]
    elif issubclass(kind, list):
        items = [(f"{name}[{index}]", value) for index, value in enumerate(list.__iter__(tree))]
    elif store is not None:
        items = sorted(
            [(f"{name}[{shown(key)}]", value) for key, value in _items(store)], key=_path
        )
    elif attributes is None:
        return None
    else:
        # a mapping holds its entries in attributes, often private ones
        return _members(kind, attributes, name, is_whole=is_whole or issubclass(kind, Mapping))
    if not attributes or issubclass(kind, UserDict):
        return items
    # attributes may show what the container holds; small numbers are one object everywhere
    ids_of_items = {
        id(store),
        *(id(value) for _, value in items if not issubclass(type(value), (int, float))),
    }
    members = _members(kind, attributes, name, is_whole=is_whole)
    return items + [member for member in members if id(member[1]) not in ids_of_items]


def _store_of(tree: Any, attributes: Mapping[str, Any]) -> dict[Any, Any] | None:
    """Return the dictionary that holds the entries of a mapping: itself,
    or its only attribute of that kind.
    """
    if issubclass(type(tree), dict):
        own: dict[Any, Any] = tree
        return own
    if type(tree) is MappingProxyType:
        (shown_mapping,) = get_referents(tree)  # its methods run code of the mapping that it shows
        return _store_of(shown_mapping, _attributes(shown_mapping) or {})
    if not issubclass(type(tree), Mapping):
        return None
    stores = [value for value in attributes.values() if issubclass(type(value), dict)]
    return stores[0] if len(stores) == 1 else None


def _items(store: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Return the entries of a dictionary, without a method that its class overrides."""
    return list(OrderedDict.items(store) if isinstance(store, OrderedDict) else dict.items(store))


def shown(key: Any) -> str:
    """Return the text of a key, without the ``__repr__`` of its class unless
    that is Python's own.
    """
    for kind in (bool, int, float, str, bytes):
        if issubclass(type(key), kind):
            return kind.__repr__(key)
    if type(key) is tuple:
        return f"({', '.join(map(shown, key))})"
    return (
        f"{type(key).__qualname__}.{key.name}"
        if issubclass(type(key), Enum)
        else type(key).__qualname__
    )


def _members(
    kind: type, attributes: Mapping[str, Any], name: str, *, is_whole: bool
) -> list[tuple[str, Any]]:
    """Return the attributes of an object with their paths, and the entries of a private mapping
    that its class shows as attributes (see ``leaves``).
    """
    fields = (
        {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else ()
    )
    private = {
        key: value
        for key, value in attributes.items()
        if key[:1] == "_" and issubclass(type(value), Mapping)
    }
    opened = private if len(private) == 1 and hasattr(kind, "__getattr__") else {}
    members: list[tuple[str, Any]] = []
    for key, value in attributes.items():
        store = _store_of(value, _attributes(value) or {}) if key in opened else None
        if store is not None:
            stored: list[tuple[str, Any]] = []
            for inner, item in _items(store):
                is_attribute = (
                    isinstance(inner, str) and inner.isidentifier() and inner not in attributes
                )
                stored.append(
                    (f"{name}.{inner}" if is_attribute else f"{name}[{shown(inner)}]", item)
                )
            members += sorted(stored, key=_path)
        elif is_whole or key in fields or not key.startswith("_"):
            members.append((f"{name}.{key}", value))
    return members


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the instance's attributes, or None if its class has none or,
    written in C, has more state.
    """
    bases = [base for base in type(value).__mro__[:-1] if base not in _CONTAINERS]
    has_attributes = any({"__dict__", "__slots__"} & vars(base).keys() for base in bases)
    if not has_attributes or not all(base.__flags__ & _HEAP_TYPE for base in bases):
        return None
    return attributes_of(value)


def attributes_of(value: Any) -> dict[str, Any]:
    """Return what an instance stores in its ``__dict__`` and in the slots of Python classes."""
    attributes: dict[str, Any] = {}
    slots: dict[str, Any] = {}
    for base in type(value).__mro__[:-1]:
        for key, descriptor in vars(base).items():
            is_own = isinstance(descriptor, GetSetDescriptorType | MemberDescriptorType)
            if key == "__dict__" and is_own:
                attributes.update(descriptor.__get__(value))
            elif is_own and key != "__weakref__" and base.__flags__ & _HEAP_TYPE:
                with suppress(AttributeError):  # not set
                    slots[key] = descriptor.__get__(value)
    return {**attributes, **slots}


class StateWalker:
    """Lists parameters and buffers of a module by qualified name, shared ones once.

    Unlike ``nn.Module.named_parameters``, it builds names only if the tree of modules changed.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._modules: list[tuple[str, nn.Module, tuple[int, ...]]] = []

    def walk(self, *kinds: str) -> list[tuple[str, Tensor]]:
        """Return (name, tensor) pairs from the attributes ``kinds`` of the modules,
        "_parameters" or "_buffers".
        """
        if not self._is_known():
            self._modules = [
                (f"{name}." if name else "", module, _children_of(module))
                for name, module in modules_in(self._root)
            ]
        seen = set()
        entries: list[tuple[str, Tensor]] = []
        for kind in kinds:
            for prefix, module, _ in self._modules:
                for name, value in getattr(module, kind).items():
                    if value is not None and id(value) not in seen:
                        seen.add(id(value))
                        entries.append((prefix + name, value))
        return entries

    def _is_known(self) -> bool:
        for _, module, children in self._modules:  # twice in a step: ``any`` costs more
            if children != _children_of(module):
                return False
        return bool(self._modules)


def _children_of(module: nn.Module) -> tuple[int, ...]:
    return tuple(map(id, getattr(module, CHILDREN).values()))


def states_of_parameters(
    optimizers: Iterable[Optimizer], parameter_names: Mapping[int, str]
) -> list[tuple[Tensor, Entry]]:
    """Return the optimizers' tensors and numbers: (parameter,
    ("exp_avg of net.head.weight", tensor)).
    """
    entries: list[tuple[Tensor, Entry]] = []
    for index, optimizer in enumerate(optimizers):
        for group_index, group in enumerate(optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                owner = (
                    parameter_names.get(id(parameter))
                    or f"optimizer {index} group {group_index} [{number}]"
                )
                for key, value in (optimizer.state.get(parameter) or {}).items():
                    is_leaf = isinstance(value, Tensor | bool | int | float)
                    for path, item in ((key, value),) if is_leaf else flatten(value, str(key)):
                        entries.append((parameter, (f"{path} of {owner}", item)))
    return entries
