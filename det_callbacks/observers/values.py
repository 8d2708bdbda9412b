"""Nested structures of tensors and plain values: lists their leaves by path, and replaces values."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from det_callbacks.trace.state.leaves import MAX_DEPTH

MAX_NAME = 1000
"""Maximal length of an observation's name, in characters."""

_PLAIN = (bool, int, float, complex, str)


def check_name(name: object) -> None:
    """Raise TypeError or ValueError if an observation cannot have this name."""
    if not isinstance(name, str):
        raise TypeError(f"the name of an observation must be a string; got {name!r}")
    if not 0 < len(name) <= MAX_NAME or name != name.encode(errors="replace").decode():
        raise ValueError(
            f"the name of an observation must be Unicode text of 1 to {MAX_NAME} characters; got {len(name)}: "
            f"{name[:40]!r}"
        )


def leaves_of(tree: Any, path: str, *, depth: int = 0) -> list[tuple[str, Any]]:
    """Return the tensors and plain values in a nested structure with their paths: ``name["k"][0]``.

    It enters mappings, lists, tuples, named tuples and dataclasses, at most 20 levels deep; other
    objects raise TypeError or ValueError.
    """
    found = _entries(tree)
    if found is not None:
        if depth == MAX_DEPTH:
            raise ValueError(
                f"the observation {path[:80]!r}... is nested more than {MAX_DEPTH} levels deep; does it contain itself?"
            )
        return [leaf for suffix, value in found for leaf in leaves_of(value, path + suffix, depth=depth + 1)]
    if isinstance(tree, Tensor) or tree is None or isinstance(tree, _PLAIN):
        return [(path, tree)]
    raise TypeError(
        f"{path!r} is a {type(tree).__qualname__}; an observation is a tensor, a plain value, or a structure of them: "
        "convert NumPy arrays with torch.as_tensor, modules with state_dict(), sets with sorted"
    )


def rebuild(tree: Any, path: str, values: Mapping[str, Any]) -> Any:
    """Return a structure with plain values replaced at some paths; unchanged parts are the same objects."""
    if path in values:
        return values[path]
    found = _entries(tree) if any(known.startswith(path) for known in values) else None
    if found is None:
        return tree
    changed = [rebuild(value, path + suffix, values) for suffix, value in found]
    if isinstance(tree, Mapping):
        return type(tree)(dict(zip(tree, changed, strict=True)))  # type: ignore[call-arg]  # also the user's own class
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*changed)
    if isinstance(tree, list | tuple):
        return type(tree)(changed)
    fields = [suffix.removeprefix(".") for suffix, _ in found]
    return dataclasses.replace(tree, **dict(zip(fields, changed, strict=True)))


def _entries(tree: Any) -> list[tuple[str, Any]] | None:
    """Return the entries of a structure with their suffixes to its path, or None for other objects."""
    if tree is None:  # Dynamo of torch 2.11 cannot check whether it is a dataclass
        return None
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(f".{entry.name}", getattr(tree, entry.name)) for entry in dataclasses.fields(tree)]
    if type(tree) is not list and type(tree) is not tuple and isinstance(tree, Mapping):
        return [(f"[{key!r}]", value) for key, value in tree.items()]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(f".{field}", value) for field, value in zip(tree._fields, tree, strict=True)]
    return [(f"[{index}]", value) for index, value in enumerate(tree)] if isinstance(tree, list | tuple) else None
