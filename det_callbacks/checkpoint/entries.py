"""Digests of a checkpoint's entries by name; for opaque objects, only the type."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from det_callbacks.digest.components import digest_tensors
from det_callbacks.digest.host import digest_bytes, format_digest
from det_callbacks.errors import DetCallbacksError

MAX_FLAT = 1000
"""Longer containers of plain values become one entry."""

Entries = Mapping[str, Mapping[str, "Entry"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    kind: str  # "tensor", "value" (plain), "file" (of a folder) or "opaque"
    type: str  # dtype ("float32") or type
    digest: str | None = None  # digest of a row-major tensor or an encoded value, or None if opaque
    shape: tuple[int, ...] | None = None


def entries_of(checkpoint: Mapping[Any, Any]) -> dict[str, dict[str, Entry]]:
    """Return the entries of a checkpoint by section (top-level key) and path; reads every tensor once."""
    leaves = list(walk(checkpoint))
    digests = iter(_digests([value for _, _, value in leaves if isinstance(value, Tensor)]))
    found: dict[str, dict[str, Entry]] = {}
    for section, path, value in leaves:
        found.setdefault(section, {})[path] = _entry(value, digests)
    return found


def walk(checkpoint: Mapping[Any, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield section, path and value of each entry; the path is "" if the section itself is a value."""
    for key, value in checkpoint.items():
        for path, leaf in _leaves(value, (id(checkpoint),)):
            yield _key(key), path, leaf


def _leaves(value: Any, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    if id(value) in above:
        yield "", object()  # a container that holds itself is opaque
        return
    is_walked = False
    if isinstance(value, dict | list | tuple) and value:
        is_named = isinstance(value, dict) or any(isinstance(inner, dict | list | tuple) for inner in value)
        is_walked = (is_named and len(value) <= MAX_FLAT) or encode_plain(value) is None
    if not is_walked:
        yield "", value
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        for path, leaf in _leaves(inner, (*above, id(value))):
            yield (f"{_key(key)}/{path}" if path else _key(key)), leaf


def _key(key: Any) -> str:
    """Return a key as part of a path; text that looks like a number is quoted."""
    if not isinstance(key, str):
        return repr(key) if encode_plain(key) is not None else f"<{type(key).__qualname__}>"
    name = key.replace("~", "~0").replace("/", "~1")
    return repr(name) if name.lstrip("-").isdigit() or not name else name


def _entry(value: Any, digests: Iterator[str | None]) -> Entry:
    if isinstance(value, Tensor):
        digest, name = next(digests), str(value.dtype).removeprefix("torch.")
        if digest is None:
            return Entry(kind="opaque", type=f"{type(value).__qualname__} {name} without data")
        shape = (value.size(0),) if value.is_nested else tuple(value.shape)
        return Entry(kind="tensor", type=name, digest=digest, shape=shape)
    # an empty OrderedDict equals an empty dictionary
    kind, encoded = "dict" if isinstance(value, dict) else type(value).__qualname__, encode_plain(value)
    if encoded is None:
        return Entry(kind="opaque", type=kind)
    return Entry(kind="value", type=kind, digest=format_digest(digest_bytes(encoded)))


def _digests(tensors: list[Tensor]) -> list[str | None]:
    """Return the digests, or None for tensors without data."""
    try:
        return [format_digest(digest) for digest in digest_tensors(tensors)]
    except (TypeError, DetCallbacksError):
        return [None] if len(tensors) == 1 else [digest for tensor in tensors for digest in _digests([tensor])]


_ATOMS = (bool, int, float, complex, str, bytes, bytearray, type(None), torch.dtype, torch.device)


def encode_plain(value: Any) -> bytes | None:
    """Return bytes that identify a plain value and its type, or None for other objects."""
    try:
        return _text(value).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError):  # huge integers raise ValueError
        return None


def _text(value: Any) -> str:
    if type(value) in _ATOMS:
        return repr(value)
    if isinstance(value, dict):
        return f"dict({', '.join(_text(one) for item in value.items() for one in item)})"
    if isinstance(value, set | frozenset):
        return f"set({', '.join(sorted(map(_text, value)))})"
    if not isinstance(value, list | tuple):
        raise TypeError(f"{type(value)} is not a plain value")
    return f"{'list' if isinstance(value, list) else 'tuple'}({', '.join(map(_text, value))})"
