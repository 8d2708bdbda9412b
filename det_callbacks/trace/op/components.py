"""Tensors that consist of other tensors: sparse tensors, shards and wrapper subclasses."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from det_callbacks.digest.components import SPARSE_PARTS
from det_callbacks.internals.torch import (
    FakeTensor,
    FunctionalTensor,
    is_transformed,
    memory_address,
    untransformed,
    without_dispatch,
)

PLAIN = frozenset({Tensor, nn.Parameter})  # classes that compute no attribute in Python
STRIDED = torch.strided
address_of: Callable[[Tensor], int] = Tensor.data_ptr  # bypasses a subclass's method


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor inside the wrappers that ``torch.func`` puts around it, or the tensor itself."""
    while is_transformed(tensor):
        tensor = untransformed(tensor)
    return tensor


def has_parts(tensor: Tensor) -> bool:
    """Return whether other tensors hold the bytes of a tensor, or no storage that can be read does."""
    if tensor.layout is not STRIDED:
        return True
    return tensor.__class__ not in PLAIN and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def holds_data(tensor: Any) -> bool:
    """Return whether a tensor has data to digest; fake, functional, meta and lazy tensors have none."""
    if tensor.__class__ in PLAIN:
        return not tensor.is_meta
    if not isinstance(tensor, Tensor):
        return True
    if isinstance(tensor, FakeTensor | FunctionalTensor) or is_lazy(tensor):
        return False
    if hasattr(tensor, "__tensor_flatten__"):
        return all(holds_data(part) for part in parts_of(tensor))
    return not tensor.is_meta and not is_hidden(tensor)


def is_hidden(tensor: Any) -> bool:
    """Return whether a class hides the tensors that hold its data: no storage, and no ``__tensor_flatten__``."""
    if not isinstance(tensor, Tensor) or tensor.layout is not STRIDED or not has_parts(tensor):
        return False
    if hasattr(tensor, "__tensor_flatten__") or isinstance(tensor, FakeTensor | FunctionalTensor) or tensor.is_meta:
        return False
    return bool(tensor.nbytes) and not memory_address(tensor)


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the ordinary tensors that hold the bytes of a tensor that ``has_parts``; none if they cannot be reached.

    A subclass that has memory and only overrides ``__torch_dispatch__`` is its only part.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        for attribute in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, attribute)
            if isinstance(part, Tensor):  # a DeviceMesh may be among them
                yield from parts_of(part) if has_parts(part) else (part,)
        return
    if tensor.layout is STRIDED:
        if not isinstance(tensor, FakeTensor | FunctionalTensor) and not tensor.is_meta and not is_hidden(tensor):
            yield tensor
        return
    with without_dispatch():  # a user's dispatch mode must not see us read the parts
        parts = [getattr(tensor, name)() for name in SPARSE_PARTS.get(tensor.layout, ())]
    yield from parts


def parts_with_memory(tensor: Tensor) -> Sequence[Tensor]:
    """Return the ordinary tensors that a tensor consists of: itself, or its parts."""
    return list(parts_of(tensor)) if has_parts(tensor) else (tensor,)
