"""What a model calls: one check and nothing else without an active observer.

Inside a compiled function an observation is an op of its graph with an ordered effect, so that it is no
dead code. Rejected: a clone whose result is used (it changes what is fused), and an op that declares
its argument as mutated (torch 2.13 allows no autograd through it).
"""

import ast
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor, library

from det_callbacks.internals.dynamo import OBSERVE_IN_ORDER
from det_callbacks.internals.torch import keep_version
from det_callbacks.observers.observations import REGISTRY, Leaves, Observations
from det_callbacks.observers.values import check_name, leaves_of, rebuild
from det_callbacks.trace.dispatch import breaks_graph

_Tree = TypeVar("_Tree")


def observe(name: str, tree: _Tree) -> _Tree:
    """Record a value by name in the active run; return it as it is.

    Inside a ``torch.compile``'d function it is an op of the graph, which is compiled once more when an
    observer becomes active.

    Args:
        name: any text of 1 to 1,000 characters. Its occurrences are counted in each step.
        tree: a tensor, a plain value (None, bool, int, float, complex, str), or a nested structure of
            them. Each leaf becomes a site, named ``name["key"][0]``.

    Raises:
        TypeError, ValueError: the name is no such text, or something in the structure is neither tensor
            nor plain value.

    Example:
        >>> import torch
        >>> observe("input", torch.ones(2))
        tensor([1., 1.])
    """
    sink = REGISTRY.sink
    return tree if sink is None else _observe(sink, name, tree, is_replayed=False)


def observe_non_deterministic(name: str, tree: _Tree) -> _Tree:
    """Save a value while recording, and put the saved bits in its place while verifying.

    Tensors are changed in place: aliases, views and what autograd saved have the saved bits, too. Plain
    values change only in the structure that is returned. Name and structure are recorded as by
    ``observe``; the coverage counts how often the live bits differed (``replayed``).

    Returns:
        The structure itself; a new one where plain values differed.

    Raises:
        TypeError, ValueError: as ``observe`` does.
        ReplayError: the budget does not suffice (recording).
        ReferenceFormatError: what was saved is damaged or missing, or does not fit and the step is no
            other one.
    """
    sink = REGISTRY.sink
    return tree if sink is None else _observe(sink, name, tree, is_replayed=True)


def observe_grad(name: str, tensor: Tensor) -> Tensor:
    """Record the gradient of a tensor, "grad of <name>", when a backward pass has computed it; return the tensor.

    For a parameter it is what each backward pass adds. A tensor without a gradient in its step is
    recorded as a site without value, with a warning. A compiled function breaks its graph here; there
    it must be called before the tensor is used.

    Raises:
        TypeError, ValueError: the name is no such text as ``observe`` takes, or the value is no tensor.
    """
    if (sink := REGISTRY.sink) is not None:
        _gradient(sink, name, tensor, is_replayed=False, is_compiled=torch.compiler.is_compiling())
    return tensor


def observe_non_deterministic_grad(name: str, tensor: Tensor) -> Tensor:
    """Save the gradient of a tensor while recording, and replace it by the saved one while verifying.

    Otherwise as ``observe_grad``; the errors of ``observe_non_deterministic`` are raised in the
    backward pass.
    """
    if (sink := REGISTRY.sink) is not None:
        _gradient(sink, name, tensor, is_replayed=True, is_compiled=torch.compiler.is_compiling())
    return tensor


@breaks_graph("det_callbacks: a region begins or ends outside a compiled function")
def enable_hash_mode() -> ExitStack:
    """Open a region in which every op is recorded; ``disable_hash_mode`` or the end of a ``with`` block closes it.

    Regions nest. Without an active observer nothing happens.
    """
    if REGISTRY.sink is not None:
        REGISTRY.sink.enable_ops()
    region = ExitStack()
    region.callback(disable_hash_mode)
    return region


@breaks_graph("det_callbacks: a region begins or ends outside a compiled function")
def disable_hash_mode() -> None:
    """End the region that ``enable_hash_mode`` began last.

    Raises:
        TraceError: there is none.
    """
    if REGISTRY.sink is not None:
        REGISTRY.sink.region.leave()


@breaks_graph("det_callbacks: a gradient is observed by a hook, which a compiled graph cannot hold")
def _gradient(sink: Observations, name: str, tensor: Tensor, *, is_replayed: bool, is_compiled: bool) -> None:
    check_name(name)
    if not isinstance(tensor, Tensor):
        raise TypeError(f"the gradient {name!r} is observed on a tensor; got a {type(tensor).__qualname__}")
    sink.observe_gradient(name, tensor, is_replayed=is_replayed, is_compiled=is_compiled)


def _observe(sink: Observations, name: str, tree: _Tree, *, is_replayed: bool) -> _Tree:
    check_name(name)
    leaves = leaves_of(tree, name)
    if not leaves:
        raise ValueError(f"the observation {name!r} is an empty {type(tree).__name__}: there is nothing to record")
    if torch.compiler.is_compiling():
        _observe_in_graph(name, leaves, is_replayed=is_replayed)
        return tree
    values = sink.observe(name, leaves, is_replayed=is_replayed)
    return rebuild(tree, name, values) if values else tree


def _observe_in_graph(name: str, leaves: Leaves, *, is_replayed: bool) -> None:
    """Make the op that records an observation when the graph runs, or saves its tensors and puts them back.

    Autograd does not see the copy back, so it saves the same bits as when recording. Plain values are
    constants of the graph.
    """
    tensors = [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]
    integers = [leaf for _, leaf in leaves if _is_integer(leaf)]
    entries = "\0".join([text for path, leaf in leaves for text in (path[len(name) :], _kind(leaf))])
    with torch.no_grad():
        saved = observe_leaves(name, entries, [tensor.detach() for tensor in tensors], integers, is_replayed)
        if keep_version is None:
            return
        for tensor, copy in zip(tensors, saved, strict=False):
            with keep_version(tensor):
                tensor.copy_(copy)


def _kind(leaf: Any) -> str:
    return "tensor" if isinstance(leaf, Tensor) else "int" if _is_integer(leaf) else repr(leaf)


def _is_integer(leaf: Any) -> bool:
    """Return whether a leaf may be a size that is only known when the graph runs."""
    return isinstance(leaf, int) and not isinstance(leaf, bool)


@library.custom_op("det_callbacks::observe_leaves", mutates_args=())
def observe_leaves(
    name: str, entries: str, tensors: Sequence[Tensor], integers: Sequence[int], is_replayed: bool
) -> list[Tensor]:
    """Record an observation; if ``is_replayed`` return copies of its tensors, with the saved bits when verifying."""
    copies = [tensor.clone() for tensor in tensors] if is_replayed else []
    if REGISTRY.sink is not None:
        found = _leaves(name, entries, copies if is_replayed else tensors, integers)
        REGISTRY.sink.observe(name, found, is_replayed=is_replayed)
    return copies


observe_leaves.register_fake(lambda *given: [tensor.clone() for tensor in given[2]] if given[4] else [])
if OBSERVE_IN_ORDER is not None:
    observe_leaves.register_effect(OBSERVE_IN_ORDER)


def _leaves(name: str, entries: str, tensors: Sequence[Tensor], integers: Sequence[int]) -> list[tuple[str, Any]]:
    sources = {"tensor": iter(tensors), "int": iter(integers)}
    texts = entries.split("\0")
    return [
        (name + path, next(sources[kind]) if kind in sources else _plain(kind))
        for path, kind in zip(texts[::2], texts[1::2], strict=True)
    ]


def _plain(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:  # nan and inf are no literals
        return complex(text) if "j" in text else float(text)
