"""Inputs and outputs as named leaves: copies of inputs for each side, tensors and plain values of outputs."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# torch 2.13 has no public name for its pytrees; read there
from torch.utils import _pytree as pytree

from det_callbacks.equivalence.copies import is_special
from det_callbacks.observers.values import leaves_of
from det_callbacks.trace.components import has_parts, parts_of

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)


def input_of(inputs: Any, iteration: int) -> Call:
    """Return the arguments of an iteration; see ``compare_modules`` for the forms that inputs have."""
    if isinstance(inputs, list):
        inputs = inputs[iteration]
    elif callable(inputs) and not isinstance(inputs, Tensor):
        inputs = inputs(iteration)
    if isinstance(inputs, Mapping):
        return (), _keywords(inputs)
    if not isinstance(inputs, tuple):
        return (inputs,), {}
    if len(inputs) == 2 and isinstance(inputs[0], tuple | list) and isinstance(inputs[1], Mapping):
        return tuple(inputs[0]), _keywords(inputs[1])
    return tuple(inputs), {}


def _keywords(inputs: Mapping[Any, Any]) -> dict[str, Any]:
    if not all(isinstance(name, str) for name in inputs):
        raise TypeError(
            f"a mapping of inputs holds keyword arguments, so its keys are texts; got {list(inputs)[:5]!r}. Pass a "
            "mapping that is itself an argument as ((mapping,), {})."
        )
    return dict(inputs)


class InputCopies:
    """The arguments of a call, for one side: tensors are copied, with their strides and what they share.

    Attributes:
        args: for the call.
        kwargs: for the call.
        leaves: name, tensor that was given, its copy: of the tensors among the arguments.
    """

    def __init__(self, call: Call, device: torch.device | None) -> None:
        paths, spec = pytree.tree_flatten_with_path(call)
        tensors = [leaf for _, leaf in paths if isinstance(leaf, Tensor)]
        copies = dict(zip(map(id, tensors), copies_of(tensors, device), strict=True))
        for tensor in tensors:
            if tensor.requires_grad:
                copies[id(tensor)].requires_grad_()
        values = [
            copies[id(leaf)] if isinstance(leaf, Tensor) else leaf if isinstance(leaf, _PLAIN) else copy.deepcopy(leaf)
            for _, leaf in paths
        ]
        self.args, self.kwargs = pytree.tree_unflatten(values, spec)
        self.leaves = [(_input_name(path), leaf, copies[id(leaf)]) for path, leaf in paths if isinstance(leaf, Tensor)]
        self._versions = [copied._version for _, _, copied in self.leaves]

    def written(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Yield name, given tensor, and the copy if the forward pass has written to it, else None."""
        for version, (name, given, copied) in zip(self._versions, self.leaves, strict=True):
            yield name, given, None if copied._version == version else copied


def _input_name(path: Sequence[Any]) -> str:
    """Return the name of an argument: ``input[0]``, ``input['mask']``."""
    return "input" + pytree.keystr(tuple(path[1:]))


def output_leaves(output: Any, name: str) -> list[tuple[str, Any]]:
    """Return the tensors and plain values of an output with their paths, in their order.

    Raises:
        TypeError: something in it is neither, so that a part of it would not be compared.
    """
    found: list[tuple[str, Any]] = []
    for path, leaf in pytree.tree_leaves_with_path(output):
        full_name = name + pytree.keystr(path)
        if isinstance(leaf, (Tensor, *_PLAIN)):
            found.append((full_name, leaf))
        else:  # a data class, a named tuple, an array of NumPy
            found += leaves_of(leaf, full_name)
    return found


def plain_parts(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Return the ordinary strided tensors that hold the elements of a tensor; itself if it is one.

    Sparse tensors are made dense and quantised ones are dequantised; of a distributed tensor it is the local shard.

    Raises:
        TypeError: there are none to be had.
    """
    if not is_special(tensor):
        return [(name, tensor)]
    if tensor.is_quantized:
        return [(name, tensor.dequantize())]
    if tensor.is_nested and tensor.layout is torch.strided:
        return [(f"{name}[{index}]", part) for index, part in enumerate(tensor.unbind())]
    if not hasattr(tensor, "__tensor_flatten__") and tensor.layout is not torch.strided:
        return [(name, tensor.to_dense())]
    parts = [part for part in parts_of(tensor) if not has_parts(part)]
    if not parts:
        raise TypeError(
            f"{name} is a {type(tensor).__qualname__}, whose elements cannot be read; compare what it holds"
        )
    return [(name if len(parts) == 1 else f"{name}<{index}>", part) for index, part in enumerate(parts)]


def copies_of(tensors: Sequence[Tensor], device: torch.device | None) -> list[Tensor]:
    """Return copies of tensors, on a device or where they are; those that share memory still do.

    Strides and offsets are kept; of each storage the stretch that the tensors span is copied.
    """
    copied: dict[int, Tensor] = {}
    on_storage: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        if is_special(tensor) or torch._is_zerotensor(tensor) or tensor.is_meta:
            copied[id(tensor)] = tensor.detach().clone() if device is None else tensor.detach().to(device, copy=True)
        else:
            on_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    for group in on_storage.values():
        _copy_group(group, device, copied)
    return [copied[id(tensor)] for tensor in tensors]


_ALIGNMENT = 64
"""Bytes that torch aligns memory of the host to."""


def _copy_group(group: list[Tensor], device: torch.device | None, copied: dict[int, Tensor]) -> None:
    storage = group[0].untyped_storage()
    low = min(_start(tensor) for tensor in group) // _ALIGNMENT * _ALIGNMENT
    high = max(map(_end, group), default=low)
    bytes_there = torch.empty(0, dtype=torch.uint8, device=storage.device)
    bytes_there.set_(storage, low, (max(high - low, 0),), (1,))
    bytes_here = bytes_there.clone() if device is None else bytes_there.to(device, copy=True)
    for tensor in group:
        view = torch.empty(0, dtype=tensor.dtype, device=bytes_here.device)
        offset = int(tensor.storage_offset()) - low // tensor.element_size()  # 64 is a multiple of every size
        view.set_(bytes_here.untyped_storage(), offset, tensor.shape, tensor.stride())
        copied[id(tensor)] = _with_bits(view, tensor)


def _with_bits(view: Tensor, tensor: Tensor) -> Tensor:
    """Return a view that is conjugated or negated where a tensor is."""
    if tensor.is_conj():
        view = view.conj()
    return torch._neg_view(view) if tensor.is_neg() else view


def _start(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _end(tensor: Tensor) -> int:
    if not tensor.numel():
        return _start(tensor)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + last + 1) * tensor.element_size()


Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any] | list[Any] | Callable[[int], Any]
