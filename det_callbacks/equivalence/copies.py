"""Copies of the arguments that an op writes, for a second run: strides, offsets, overlap and alignment are kept.

Every storage that a written argument lies in is copied once, and each tensor argument on it is rebuilt there, written
or not; so two arguments that view the same bytes still do.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage

# looked at in torch 2.13; _data_address is where the storage begins, and materialises no copy-on-write storage
from torch._C import _data_address, _set_conj, _set_neg  # type: ignore[attr-defined]  # not in torch's stubs

from det_callbacks.trace.components import has_parts, parts_of

_ALIGNMENT = 64
"""Bytes that torch aligns host memory to; kernels may sum in another order where memory is aligned otherwise."""
_WHOLE_BYTES = 1 << 20
"""Storages up to here are copied whole; of larger ones only the stretch that the arguments span."""


class AliasedError(Exception):
    """An argument that is made of parts shares memory with another: no copy keeps that."""


class Copies:
    """Copies made for one call.

    Args:
        args: of the call.
        kwargs: of the call.
        written: those among the arguments that it writes.

    Raises:
        AliasedError: if a sparse, quantised or nested tensor shares memory with another argument.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], written: Sequence[Tensor]) -> None:
        tensors = [*_tensors((*args, *kwargs.values()))]
        addresses: set[int] = set()
        self._special: dict[int, Tensor] = {}
        for tensor in written:
            if is_special(tensor):
                self._special[id(tensor)] = tensor.detach().clone()
            else:
                addresses.add(tensor.untyped_storage()._cdata)
        self._by_id: dict[int, Tensor] = {}
        shared = [tensor for tensor in tensors if not is_special(tensor)]
        specials = [tensor for tensor in tensors if is_special(tensor)]
        if specials and (addresses or self._special):
            _refuse_aliases(specials, shared, addresses)
        on_storage: dict[int, list[Tensor]] = {}
        for tensor in shared:
            if not torch._is_zerotensor(tensor) and (address := tensor.untyped_storage()._cdata) in addresses:
                on_storage.setdefault(address, []).append(tensor)
        for group in on_storage.values():
            storage, shift = _copied(group)
            for tensor in group:
                if id(tensor) not in self._by_id:
                    self._by_id[id(tensor)] = _rebuilt(tensor, storage, shift)
        self.args: tuple[Any, ...] = tuple(self._replaced(value) for value in args)
        self.kwargs: dict[str, Any] = {name: self._replaced(value) for name, value in kwargs.items()}

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._by_id.get(id(value), self._special.get(id(value), value))
        if type(value) in (list, tuple):
            return type(value)(self._replaced(item) for item in value)
        return value


def is_special(tensor: Tensor) -> bool:
    """Return whether a tensor is more than strided elements on a storage."""
    return has_parts(tensor) or tensor.is_quantized or tensor.is_nested


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _refuse_aliases(specials: list[Tensor], shared: list[Tensor], written: set[int]) -> None:
    seen = {tensor.untyped_storage()._cdata for tensor in shared} | written
    known: set[int] = set()
    for tensor in specials:
        if id(tensor) in known:
            continue
        known.add(id(tensor))
        parts = [*parts_of(tensor)] if has_parts(tensor) else [tensor]
        addresses = {part.untyped_storage()._cdata for part in parts if not has_parts(part)}
        if addresses & seen:
            raise AliasedError
        seen |= addresses


def _copied(tensors: list[Tensor]) -> tuple[UntypedStorage, int]:
    """Return a copy of the storage that tensors lie in, and by how many bytes its content lies further on."""
    storage = tensors[0].untyped_storage()
    num_bytes = storage.nbytes()
    shift = _data_address(tensors[0]) % _ALIGNMENT
    if any(shift % tensor.element_size() for tensor in tensors):
        shift = 0
    low, high = 0, num_bytes
    if num_bytes > _WHOLE_BYTES:
        low = min(int(tensor.storage_offset()) * tensor.element_size() for tensor in tensors)
        high = min(max(map(_end, tensors)), num_bytes)
    if not shift and 2 * (high - low) >= num_bytes:
        return storage.clone(), 0
    copy = UntypedStorage(num_bytes + shift, device=storage.device)
    if low < high:
        _bytes_of(copy, low + shift, high + shift).copy_(_bytes_of(storage, low, high))
    return copy, shift


def _end(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + last + 1) * tensor.element_size()


def _bytes_of(storage: UntypedStorage, start: int, end: int) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (end - start,), (1,))


def _rebuilt(tensor: Tensor, storage: UntypedStorage, shift: int) -> Tensor:
    offset = tensor.storage_offset() + shift // tensor.element_size()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(storage, offset, tensor.shape, tensor.stride())
    if tensor.is_conj():
        _set_conj(copy, True)
    if tensor.is_neg():
        _set_neg(copy, True)
    if tensor.requires_grad:
        copy.requires_grad_()
    return copy
