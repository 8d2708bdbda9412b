"""What a model calls: one check and nothing else without an active observer."""

from contextlib import ExitStack
from typing import TypeVar

import torch
from torch import Tensor

from det_callbacks.observers.observations import REGISTRY
from det_callbacks.observers.values import check_name, observed_leaves, rebuild
from det_callbacks.trace.dispatch import breaks_graph

_Tree = TypeVar("_Tree")


def observe(name: str, tree: _Tree) -> _Tree:
    """Record a value by name in the active run; return it as it is.

    Without an active observer it costs one check. In a compiled function it then breaks the graph, and says so once;
    the function is compiled once more when an observer becomes active.

    Args:
        name: any text of 1 to 1,000 characters. Its occurrences are counted in each step.
        tree: a tensor, a plain value (None, bool, int, float, complex, str), or a nested structure of them. Each leaf
            becomes a site, named ``name["key"][0]``.

    Raises:
        TypeError, ValueError: the name is no such text, or something in the structure is no tensor and no plain value.
        DivergenceError: it is not what the reference has, where the observer raises on mismatches.

    Example:
        >>> import torch
        >>> observe("input", torch.ones(2))
        tensor([1., 1.])
    """
    if REGISTRY.sink is None:
        return tree
    return _observe(name, tree, is_replayed=False, is_compiled=torch.compiler.is_compiling())


def observe_non_deterministic(name: str, tree: _Tree) -> _Tree:
    """Save a value while recording, and put the saved bits in its place while verifying.

    Tensors are changed in place, so the return value may be ignored: aliases, views and what autograd saved for the
    backward pass see the saved bits. Plain values can only be exchanged in the structure that is returned. It is
    recorded like an observation, and how often the live bits differed stands in the coverage (``replayed``).

    Args:
        name: as for ``observe``.
        tree: likewise.

    Returns:
        The structure itself; a new one where plain values differed.

    Raises:
        TypeError, ValueError: as ``observe`` does.
        ReplayError: the budget does not suffice (recording).
        ReferenceFormatError: the reference has no such value, one of another shape, or a damaged one.
    """
    if REGISTRY.sink is None:
        return tree
    return _observe(name, tree, is_replayed=True, is_compiled=torch.compiler.is_compiling())


def observe_grad(name: str, tensor: Tensor) -> Tensor:
    """Record the gradient of a tensor, "grad of <name>", when a backward pass has computed it; return the tensor.

    It may be called after the tensor was used. For a parameter it is what each backward pass adds. A tensor that gets
    no gradient in its step is reported: as a site without value, and by a warning. In a compiled function it breaks
    the graph, says so once, and has to come before the tensor is used: what an earlier graph computes, it cannot see.

    Raises:
        TypeError, ValueError: the name is no such text as ``observe`` takes, or the value is no tensor.
    """
    if REGISTRY.sink is not None:
        _gradient(name, tensor, is_replayed=False, is_compiled=torch.compiler.is_compiling())
    return tensor


def observe_non_deterministic_grad(name: str, tensor: Tensor) -> Tensor:
    """Save the gradient of a tensor while recording, and replace it by the saved one while verifying.

    Otherwise as ``observe_grad``; the errors of ``observe_non_deterministic`` come in the backward pass.
    """
    if REGISTRY.sink is not None:
        _gradient(name, tensor, is_replayed=True, is_compiled=torch.compiler.is_compiling())
    return tensor


@breaks_graph("det_callbacks: a region begins or ends outside a compiled function")
def enable_hash_mode() -> ExitStack:
    """Open a region in which every op is recorded; ``disable_hash_mode`` or the end of a ``with`` block closes it.

    Regions nest and may be repeated. Without an active observer nothing happens.
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
        REGISTRY.sink.disable_ops()


@breaks_graph("det_callbacks: a value is recorded when it is there, outside a compiled function")
def _observe(name: str, tree: _Tree, *, is_replayed: bool, is_compiled: bool) -> _Tree:
    leaves = observed_leaves(name, tree)
    assert REGISTRY.sink is not None, "the caller asked"
    values = REGISTRY.sink.observe(name, leaves, is_replayed=is_replayed, is_compiled=is_compiled)
    changed: _Tree = rebuild(tree, name, values) if values else tree
    return changed


@breaks_graph("det_callbacks: a gradient is observed by a hook, which a compiled graph cannot hold")
def _gradient(name: str, tensor: Tensor, *, is_replayed: bool, is_compiled: bool) -> None:
    check_name(name)
    if not isinstance(tensor, Tensor):
        raise TypeError(f"the gradient {name!r} is observed on a tensor; got a {type(tensor).__qualname__}")
    assert REGISTRY.sink is not None, "the caller asked"
    REGISTRY.sink.observe_gradient(name, tensor, is_replayed=is_replayed, is_compiled=is_compiled)
