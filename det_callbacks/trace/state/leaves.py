"""Lists the leaves of a nested structure by path: ``batch['image'][0]``, ``batch.edge_index``."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

MAX_DEPTH = 20

_VALUES = (Tensor, float, int)
_CONSTANTS = (type(None), str, bytes, type, Enum, torch.dtype, torch.device)
_LEAVES = (*_VALUES, *_CONSTANTS)
_path = itemgetter(0)
_HEAP_TYPE = 1 << 9
"""Flag of classes defined in Python (Py_TPFLAGS_HEAPTYPE), whose instances hold only attributes."""


def flatten(tree: Any, name: str, *, is_whole: bool = False) -> Iterator[tuple[str, Tensor | int | float | bool]]:
    """Yield the tensors and numbers in a nested structure with their paths, see ``leaves``."""
    return (entry for entry in leaves(tree, name, is_whole=is_whole) if isinstance(entry[1], _VALUES))


def leaves(tree: Any, name: str, *, is_whole: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested structure with their paths.

    It enters mappings, lists, tuples and attributes of other objects (private ones only if ``is_whole``),
    20 levels deep, each object once, without running code of its class. The entries of a private mapping
    in a class with ``__getattr__`` count as attributes, as in torch_geometric. The entries of a mapping are in
    the order of their paths: its own order may come from a set, and differ from process to process.
    """
    return _leaves(tree, name, {}, is_whole=is_whole, depth=0)


def entries(tree: Any, path: str) -> list[tuple[str, Any]] | None:
    if type(tree) is not list and type(tree) is not tuple and isinstance(tree, Mapping):
        return [(f"{path}[{key!r}]", value) for key, value in tree.items()]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(f"{path}.{field}", value) for field, value in zip(tree._fields, tree, strict=True)]
    if isinstance(tree, list | tuple):
        return [(f"{path}[{index}]", value) for index, value in enumerate(tree)]
    return None


def is_constant(leaf: Any) -> bool:
    """Return whether a leaf is not compared: None, text or a name of another object."""
    return isinstance(leaf, _CONSTANTS)


def _leaves(tree: Any, name: str, entered: dict[int, Any], *, is_whole: bool, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the leaves; ``entered`` keeps visited objects and enclosing sequences alive, so that no id is reused."""
    if id(tree) in entered:
        return
    is_leaf = isinstance(tree, _LEAVES) or depth == MAX_DEPTH
    children = None if is_leaf else _children(tree, name, is_whole=is_whole)
    if children is None:
        yield name, tree
        return
    entered[id(tree)] = tree
    for child_name, child in children:
        if isinstance(child, _LEAVES):  # saves a call
            yield child_name, child
        else:
            yield from _leaves(child, child_name, entered, is_whole=is_whole, depth=depth + 1)
    if isinstance(tree, (list, tuple, Mapping)):
        del entered[id(tree)]


def _children(tree: Any, name: str, *, is_whole: bool) -> Iterable[tuple[str, Any]] | None:
    if (found := entries(tree, name)) is not None:
        return sorted(found, key=_path) if isinstance(tree, Mapping) else found
    attributes = _attributes(tree)
    if attributes is None:
        return None
    fields = {field.name for field in dataclasses.fields(tree)} if dataclasses.is_dataclass(tree) else ()
    private = [key for key, value in attributes.items() if key.startswith("_") and isinstance(value, Mapping)]
    shown = private if len(private) == 1 and hasattr(type(tree), "__getattr__") else []
    members: list[tuple[str, Any]] = []
    for key, value in attributes.items():
        if key in shown:
            shown_members: list[tuple[str, Any]] = []
            for inner, item in value.items():
                is_attribute = isinstance(inner, str) and inner.isidentifier() and inner not in attributes
                shown_members.append((f"{name}.{inner}" if is_attribute else f"{name}[{inner!r}]", item))
            members += sorted(shown_members, key=_path)
        elif is_whole or key in fields or not key.startswith("_"):
            members.append((f"{name}.{key}", value))
    return members


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the instance's attributes, or None if its class, written in C, has more state."""
    bases = type(value).__mro__[:-1]
    has_attributes = any({"__dict__", "__slots__"} & vars(base).keys() for base in bases)
    if not has_attributes or not all(base.__flags__ & _HEAP_TYPE for base in bases):
        return None
    state = object.__getstate__(value)  # pickle's default
    attributes, slots = state if isinstance(state, tuple) else (state, {})
    return {**(attributes or {}), **slots}
