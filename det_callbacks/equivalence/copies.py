"""What a second run of an op starts from: copies of what it writes, and the generators as they were.

Every storage that a written argument lies in is copied, and each tensor argument on it is rebuilt there, written or
not; strides, offsets, overlap and alignment are kept, and two arguments that view the same bytes still do.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, UntypedStorage

# looked at in torch 2.13; _data_address is where the storage begins, and materialises no copy-on-write storage
from torch._C import _data_address, _set_conj, _set_neg  # type: ignore[attr-defined]  # not in torch's stubs

from det_callbacks.rng import RewindPoint
from det_callbacks.trace.components import has_parts, parts_of

_ALIGNMENT = 64
"""Bytes that torch aligns host memory to; kernels may sum in another order where memory is aligned otherwise."""


class AliasedError(Exception):
    """An argument that is made of parts shares memory with another: no copy keeps that."""


class Copies:
    """The arguments of one call with copies of what it writes.

    Args:
        args: of the call.
        kwargs: of the call.
        written: those among the arguments that it writes.

    Raises:
        AliasedError: if a sparse, quantised or nested tensor shares memory with another argument.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], written: Sequence[Tensor]) -> None:
        tensors = {id(tensor): tensor for tensor in _tensors((*args, *kwargs.values()))}
        specials = [tensor for tensor in tensors.values() if is_special(tensor)]
        addresses = {tensor.untyped_storage()._cdata for tensor in written if not is_special(tensor)}
        if specials and written:
            shared = {one.untyped_storage()._cdata for one in tensors.values() if not is_special(one)}
            _refuse_aliases(specials, shared | addresses)
        self._copies = {id(tensor): tensor.detach().clone() for tensor in written if is_special(tensor)}
        on_storage: dict[int, list[Tensor]] = {}
        for tensor in tensors.values():
            if not is_special(tensor) and not torch._is_zerotensor(tensor):
                address = tensor.untyped_storage()._cdata
                if address in addresses:
                    on_storage.setdefault(address, []).append(tensor)
        for group in on_storage.values():
            storage, shift = _copied(group)
            self._copies.update((id(tensor), _rebuilt(tensor, storage, shift)) for tensor in group)
        self.args: tuple[Any, ...] = tuple(self._replaced(value) for value in args)
        self.kwargs: dict[str, Any] = {name: self._replaced(value) for name, value in kwargs.items()}

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copies.get(id(value), value)
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


def _refuse_aliases(specials: list[Tensor], seen: set[int]) -> None:
    for tensor in specials:
        parts = [*parts_of(tensor)] if has_parts(tensor) else [tensor]
        addresses = {part.untyped_storage()._cdata for part in parts if not has_parts(part)}
        if addresses & seen:
            raise AliasedError
        seen |= addresses


def _copied(tensors: list[Tensor]) -> tuple[UntypedStorage, int]:
    """Return a copy of the storage that tensors lie in, and by how many bytes its content lies further on."""
    storage = tensors[0].untyped_storage()
    shift = _data_address(tensors[0]) % _ALIGNMENT
    if not shift or any(shift % tensor.element_size() for tensor in tensors):
        return storage.clone(), 0
    copy = UntypedStorage(storage.nbytes() + shift, device=storage.device)
    _bytes_of(copy, shift).copy_(_bytes_of(storage, 0))
    return copy, shift


def _bytes_of(storage: UntypedStorage, start: int) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, start, (storage.nbytes() - start,), (1,))


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


class GeneratorStates:
    """The states of the process's generators, and of those passed to an op.

    Args:
        args: of the op.
        kwargs: of the op.
        with_python: take those of Python and NumPy as well, for code that is not torch's.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, with_python: bool) -> None:
        passed = [value for value in (*args, *kwargs.values()) if isinstance(value, Generator)]
        self._point = partial(RewindPoint, passed, with_python=with_python)
        self._before = self._after = self._point()

    def rewind(self) -> None:
        """Remember where the first run left the generators, and put them back to where it began."""
        self._after = self._point()
        self._before.put_back()

    def forward(self) -> None:
        """Put the generators where the first run left them."""
        self._after.put_back()
