"""Functions for models to call, which only check for an observer if none is active.

Inside a compiled function an observation is an op of the graph with an ordered effect, so it is not
dead code. Rejected: a clone whose result is used (it changes the fusion), and an op that declares
its argument as mutated (torch 2.13 allows no autograd through it).
"""

import ast
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor, library

from det_callbacks.internals.dynamo import OBSERVE_IN_ORDER
from det_callbacks.internals.torch import TORCH, keep_version
from det_callbacks.observers.observations import REGISTRY, Leaves, Observations
from det_callbacks.trace.dispatch import breaks_graph
from det_callbacks.trace.leaves import MAX_DEPTH

MAX_NAME = 1000
"""Maximal length of an observation's name, in characters."""

_PLAIN = (bool, int, float, complex, str)

_Tree = TypeVar("_Tree")


def check_name(name: object) -> None:
    """Raise TypeError or ValueError if an observation cannot have this name."""
    if not isinstance(name, str):
        raise TypeError(f"the name of an observation must be a string; got {name!r}")
    if not 0 < len(name) <= MAX_NAME or name != name.encode(errors="replace").decode():
        raise ValueError(
            f"the name of an observation must be Unicode text of 1 to {MAX_NAME} characters; got "
            f"{len(name)}: {name[:40]!r}"
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
                f"the observation {path[:80]!r}... is nested more than {MAX_DEPTH} levels deep; "
                "does it contain itself?"
            )
        return [
            leaf
            for suffix, value in found
            for leaf in leaves_of(value, path + suffix, depth=depth + 1)
        ]
    if isinstance(tree, Tensor) or tree is None or isinstance(tree, _PLAIN):
        return [(path, tree)]
    raise TypeError(
        f"{path!r} is a {type(tree).__qualname__}; an observation is a tensor, a plain value, or a "
        "structure of them: convert NumPy arrays with torch.as_tensor, modules with state_dict(), "
        "sets with sorted"
    )


def rebuild(tree: Any, path: str, values: Mapping[str, Any]) -> Any:
    """Return a structure with plain values replaced at some paths;
    unchanged parts are the same objects.
    """
    if path in values:
        return values[path]
    found = _entries(tree) if any(known.startswith(path) for known in values) else None
    if found is None:
        return tree
    changed = [rebuild(value, path + suffix, values) for suffix, value in found]
    if isinstance(tree, Mapping):
        # also the user's own class
        return type(tree)(dict(zip(tree, changed, strict=True)))  # type: ignore[call-arg]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*changed)
    if isinstance(tree, list | tuple):
        return type(tree)(changed)
    fields = [suffix.removeprefix(".") for suffix, _ in found]
    return dataclasses.replace(tree, **dict(zip(fields, changed, strict=True)))


def _entries(tree: Any) -> list[tuple[str, Any]] | None:
    """Return the entries of a structure with their suffixes to its path,
    or None for other objects.
    """
    if tree is None:  # Dynamo of torch 2.11 cannot check whether it is a dataclass
        return None
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(f".{entry.name}", getattr(tree, entry.name)) for entry in dataclasses.fields(tree)]
    if type(tree) is not list and type(tree) is not tuple and isinstance(tree, Mapping):
        return [(f"[{key!r}]", value) for key, value in tree.items()]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(f".{field}", value) for field, value in zip(tree._fields, tree, strict=True)]
    return (
        [(f"[{index}]", value) for index, value in enumerate(tree)]
        if isinstance(tree, list | tuple)
        else None
    )


def observe(name: str, tree: _Tree) -> _Tree:
    """Record a value by name in the active run, and return it unchanged.

    Inside a ``torch.compile``'d function it is an op of the graph, which is recompiled when an
    observer becomes active.

    Args:
        name: text of 1 to 1,000 characters; a step numbers its occurrences.
        tree: a tensor, a plain value (None, bool, int, float, complex, str), or a nested structure
            of them. Each leaf becomes a site, with a name such as ``name["key"][0]``.

    Raises:
        TypeError, ValueError: the name is not such text, or a leaf is neither a tensor nor a plain
            value.

    Examples:
        >>> with ObserverContext("runs", "first"):
        ...     _ = observe("input", {"ids": torch.tensor([1, 2])})
        >>> observe("input", torch.ones(2))  # no observer is active: does nothing
        tensor([1., 1.])
    """
    sink = REGISTRY.sink
    return tree if sink is None else _observe(sink, name, tree, is_replayed=False)


def observe_non_deterministic(name: str, tree: _Tree) -> _Tree:
    """Save a value when recording, and restore the saved bits when verifying.

    It changes tensors in place, so aliases, views and tensors saved by autograd also get the saved
    bits. Plain values change only in the returned structure. It records name and structure like
    ``observe``; the coverage counts how often the bits differed (``replayed``).

    Args:
        name: see ``observe``.
        tree: see ``observe``. Recording copies its tensors to the host.

    Returns:
        The structure itself, or a new one if plain values differed.

    Raises:
        TypeError, ValueError: as for ``observe``.
        ReplayError: the value exceeds the budget (when recording).
        ReferenceFormatError: the saved value is damaged or missing, or does not fit although the
            step did not differ.

    Examples:
        >>> with ObserverContext("runs", "first"):
        ...     recorded = observe_non_deterministic("noise", torch.rand(2))
        >>> with ObserverContext("runs", "second", reference="runs/first"):
        ...     assert torch.equal(recorded, observe_non_deterministic("noise", torch.rand(2)))
    """
    sink = REGISTRY.sink
    return tree if sink is None else _observe(sink, name, tree, is_replayed=True)


def observe_grad(name: str, tensor: Tensor) -> Tensor:
    """Record the gradient of a tensor as "grad of <name>" when a backward pass
    computes it; return the tensor.

    For a parameter it records what each backward pass adds. A tensor without a gradient in its step
    is recorded as a site without a value, with a warning. In a compiled function this breaks the
    graph; call it there before you use the tensor.

    Args:
        name: see ``observe``.
        tensor: a tensor of any shape that requires a gradient.

    Raises:
        TypeError, ValueError: the name is invalid, see ``observe``, or the value is not a tensor.

    Examples:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> with ObserverContext("runs", "first"):
        ...     observe_grad("weight", weight).square().sum().backward()
    """
    if (sink := REGISTRY.sink) is not None:
        _gradient(sink, name, tensor, is_replayed=False, is_compiled=torch.compiler.is_compiling())
    return tensor


def observe_non_deterministic_grad(name: str, tensor: Tensor) -> Tensor:
    """Save the gradient of a tensor when recording, and replace it with the
    saved one when verifying.

    Otherwise like ``observe_grad``. The backward pass raises the errors of
    ``observe_non_deterministic``.

    Args:
        name: see ``observe``.
        tensor: a tensor of any shape that requires a gradient.

    Raises:
        TypeError, ValueError: the name is invalid, see ``observe``, or the value is not a tensor.

    Examples:
        >>> def gradient(factor):
        ...     x = torch.ones(2, requires_grad=True)
        ...     observe_non_deterministic_grad("x", x * 1).mul(factor).sum().backward()
        ...     return x.grad
        >>> with ObserverContext("runs", "first"):
        ...     gradient(torch.tensor(2.0))
        tensor([2., 2.])
        >>> with ObserverContext("runs", "second", reference="runs/first"):
        ...     gradient(torch.tensor(3.0))
        tensor([2., 2.])
    """
    if (sink := REGISTRY.sink) is not None:
        _gradient(sink, name, tensor, is_replayed=True, is_compiled=torch.compiler.is_compiling())
    return tensor


@breaks_graph("det_callbacks: a region begins or ends outside a compiled function")
def enable_hash_mode() -> ExitStack:
    """Open a region that records every op; close it with ``disable_hash_mode`` or a ``with`` block.

    Regions nest. Without an active observer this does nothing.

    Returns:
        A context manager that closes the region.

    Examples:
        >>> with ObserverContext("runs", "first"):
        ...     with enable_hash_mode():
        ...         _ = torch.ones(2) + 1
    """
    if REGISTRY.sink is not None:
        REGISTRY.sink.enable_ops()
    region = ExitStack()
    region.callback(disable_hash_mode)
    return region


@breaks_graph("det_callbacks: a region begins or ends outside a compiled function")
def disable_hash_mode() -> None:
    """Close the region that ``enable_hash_mode`` opened last.

    Raises:
        TraceError: no region is open.

    Examples:
        >>> with ObserverContext("runs", "first"):
        ...     _ = enable_hash_mode()
        ...     _ = torch.ones(2) + 1
        ...     disable_hash_mode()
    """
    if REGISTRY.sink is not None:
        REGISTRY.sink.region.leave()


@breaks_graph("det_callbacks: a gradient is observed by a hook, which a compiled graph cannot hold")
def _gradient(
    sink: Observations, name: str, tensor: Tensor, *, is_replayed: bool, is_compiled: bool
) -> None:
    check_name(name)
    if not isinstance(tensor, Tensor):
        raise TypeError(f"the gradient {name!r} needs a tensor; got a {type(tensor).__qualname__}")
    sink.observe_gradient(name, tensor, is_replayed=is_replayed, is_compiled=is_compiled)


def _observe(sink: Observations, name: str, tree: _Tree, *, is_replayed: bool) -> _Tree:
    check_name(name)
    leaves = leaves_of(tree, name)
    if not leaves:
        raise ValueError(
            f"the observation {name!r} is an empty {type(tree).__name__}: there is nothing to "
            "record"
        )
    if torch.compiler.is_compiling():
        _observe_in_graph(name, leaves, is_replayed=is_replayed)
        return tree
    values = sink.observe(name, leaves, is_replayed=is_replayed)
    return rebuild(tree, name, values) if values else tree


def _observe_in_graph(name: str, leaves: Leaves, *, is_replayed: bool) -> None:
    """Add the op that, when the graph runs, records an observation,
    or saves its tensors and restores them.

    The restoring copy is hidden from autograd, which saves the same bits as when recording. Plain
    values are constants of the graph.
    """
    tensors = [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]
    integers = [leaf for _, leaf in leaves if _is_integer(leaf)]
    entries = "\0".join(
        [text for path, leaf in leaves for text in (path[len(name) :], _kind(leaf))]
    )
    with torch.no_grad():
        saved = observe_leaves(
            name, entries, [tensor.detach() for tensor in tensors], integers, is_replayed
        )
        for tensor, copy in zip(tensors, saved, strict=False):
            with keep_version(tensor):
                tensor.copy_(copy)


def _kind(leaf: Any) -> str:
    return "tensor" if isinstance(leaf, Tensor) else "int" if _is_integer(leaf) else repr(leaf)


def _is_integer(leaf: Any) -> bool:
    """Return whether a leaf may be a size that is known only when the graph runs."""
    return isinstance(leaf, int) and not isinstance(leaf, bool)


@library.custom_op("det_callbacks::observe_leaves", mutates_args=())
def observe_leaves(
    name: str, entries: str, tensors: Sequence[Tensor], integers: Sequence[int], is_replayed: bool
) -> list[Tensor]:
    """Record an observation; if ``is_replayed``, return copies of its tensors,
    when verifying with the saved bits.
    """
    copies = [tensor.clone() for tensor in tensors] if is_replayed else []
    if REGISTRY.sink is not None:
        found = _leaves(name, entries, copies if is_replayed else tensors, integers)
        REGISTRY.sink.observe(name, found, is_replayed=is_replayed)
    return copies


observe_leaves.register_fake(
    lambda *given: [tensor.clone() for tensor in given[2]] if given[4] else []
)
if not TORCH.missing:
    observe_leaves.register_effect(OBSERVE_IN_ORDER)


def _leaves(
    name: str, entries: str, tensors: Sequence[Tensor], integers: Sequence[int]
) -> list[tuple[str, Any]]:
    sources = {"tensor": iter(tensors), "int": iter(integers)}
    texts = entries.split("\0")
    return [
        (name + path, next(sources[kind]) if kind in sources else _plain(kind))
        for path, kind in zip(texts[::2], texts[1::2], strict=True)
    ]


def _plain(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:  # nan and inf are not literals
        return complex(text) if "j" in text else float(text)
