"""Tensors that are made of other tensors: sparse ones, shards and wrapper subclasses."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch._C import _functorch  # looked at in torch 2.13
from torch.distributed.tensor import DTensor

_PLAIN = frozenset({Tensor, nn.Parameter})
_STRIDED = torch.strided


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor inside the wrappers that ``torch.func`` puts around it, or the tensor itself."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def has_parts(tensor: Tensor) -> bool:
    """Return whether a tensor's bytes lie in other tensors, or nowhere that a storage could tell."""
    if tensor.layout is not _STRIDED:
        return True
    return tensor.__class__ not in _PLAIN and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the ordinary tensors that hold the bytes of one that ``has_parts``; none where they cannot be reached."""
    if isinstance(tensor, DTensor):
        yield tensor._local_tensor
        return
    if hasattr(tensor, "__tensor_flatten__"):
        for attribute in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, attribute)
            yield from parts_of(part) if has_parts(part) else (part,)
        return
    with torch._C._DisableTorchDispatch():  # asking for the parts dispatches, which no mode of the user should see
        if tensor.layout is torch.sparse_coo:
            parts = [tensor._indices(), tensor._values()]
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
        else:
            parts = []
    yield from parts
