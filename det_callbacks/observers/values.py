"""Nested structures of tensors and plain values: their leaves by path, and rebuilding them with other plain values."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MAX_NAME = 1000
"""Characters that the name of an observation may have."""

MAX_DEPTH = 20

_PLAIN = (bool, int, float, complex, str)
_EXTENDED = "gG"
"""Type codes of longdouble arrays: more precise than any dtype of torch, so that they would be cut."""


def check_name(name: object) -> None:
    """Raise TypeError or ValueError when an observation cannot have this name."""
    if not isinstance(name, str):
        raise TypeError(f"the name of an observation is a string; got {name!r}")
    if not name or len(name) > MAX_NAME:
        raise ValueError(
            f"the name of an observation has 1 to {MAX_NAME} characters; got {len(name)}"
            + (f", beginning with {name[:40]!r}" if name else "")
        )
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the name of an observation is Unicode text; {name!r} is not ({error.reason})") from error


def observed_leaves(name: str, tree: Any) -> list[tuple[str, Any]]:
    """Return the leaves of an observation; raise TypeError or ValueError where it cannot be one."""
    check_name(name)
    leaves = leaves_of(tree, name)
    if not leaves:
        raise ValueError(f"the observation {name!r} is an empty {type(tree).__name__}: there is nothing to record")
    return leaves


def leaves_of(tree: Any, name: str) -> list[tuple[str, Any]]:
    """Return the tensors and plain values in a nested structure with their paths: ``name["k"][0]``.

    Mappings, lists, tuples, named tuples and dataclasses are entered, at most 20 levels deep. Plain values are None,
    bool, int, float, complex and str; NumPy's arrays and numbers count as tensors and plain values.

    Raises:
        TypeError: something in it is neither, so that a part of it would be left out.
        ValueError: it is nested more deeply (it may contain itself).
    """
    found: list[tuple[str, Any]] = []
    _collect(tree, name, 0, found)
    return found


def rebuild(tree: Any, path: str, values: Mapping[str, Any]) -> Any:
    """Return a structure like another one, with other plain values at some paths; parts without any are the same."""
    if path in values:
        return values[path]
    if not any(known.startswith(path) for known in values):
        return tree
    if isinstance(tree, Mapping):
        changed = {key: rebuild(value, f"{path}[{key!r}]", values) for key, value in tree.items()}
        return changed if type(tree) is dict else type(tree)(changed)  # type: ignore[call-arg]  # the user's own class
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        fields = zip(tree._fields, tree, strict=True)
        return type(tree)(*(rebuild(value, f"{path}.{field}", values) for field, value in fields))
    if isinstance(tree, list | tuple):
        return type(tree)([rebuild(value, f"{path}[{index}]", values) for index, value in enumerate(tree)])
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [entry.name for entry in dataclasses.fields(tree)]
        changes = {item: rebuild(getattr(tree, item), f"{path}.{item}", values) for item in names}
        return dataclasses.replace(tree, **changes)
    return tree


def _collect(tree: Any, path: str, depth: int, found: list[tuple[str, Any]]) -> None:
    if isinstance(tree, Tensor) or tree is None or isinstance(tree, _PLAIN):
        found.append((path, tree))
        return
    if depth == MAX_DEPTH:
        raise ValueError(
            f"the observation {path[:80]!r}... is nested more than {MAX_DEPTH} levels deep; does it contain itself?"
        )
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            _collect(value, f"{path}[{key!r}]", depth + 1, found)
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        for field, value in zip(tree._fields, tree, strict=True):
            _collect(value, f"{path}.{field}", depth + 1, found)
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            _collect(value, f"{path}[{index}]", depth + 1, found)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for entry in dataclasses.fields(tree):
            _collect(getattr(tree, entry.name), f"{path}.{entry.name}", depth + 1, found)
    elif isinstance(tree, np.generic) and isinstance(tree.item(), _PLAIN):
        found.append((path, tree.item()))
    elif type(tree) is np.ndarray and tree.dtype.kind in "biufc" and tree.dtype.char not in _EXTENDED:
        if not tree.flags.writeable or any(step < 0 for step in tree.strides) or not tree.dtype.isnative:
            raise TypeError(
                f"{path!r} is an array that torch cannot read in place (read-only, reversed, or of another byte "
                "order); observe a copy of it: torch.tensor(array.tolist())"
            )
        found.append((path, torch.from_numpy(tree)))
    else:
        raise TypeError(f"{path!r} is {_kind(tree)}; an observation is a tensor, a plain value, or a structure of them")


def _kind(value: object) -> str:
    kind = f"a {type(value).__qualname__}"
    if isinstance(value, np.ndarray | np.generic):
        return f"{kind} of dtype {value.dtype}"
    if isinstance(value, nn.Module):
        return f"{kind}; observe its state_dict()"
    if isinstance(value, set | frozenset):
        return f"{kind}, which has no order; observe a sorted list"
    return kind
