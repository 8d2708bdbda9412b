"""Names the parameter, buffer, optimizer state or gradient that an op reads or writes."""

from collections.abc import Callable, Iterable
from typing import TypeGuard

import torch
from torch import Tensor

from det_callbacks.internals.torch import pin_storage, storage_address, unpin_storage
from det_callbacks.trace.op.components import STRIDED, address_of, has_parts, holds_data, parts_of

Addresses = tuple[int, int]
"""Addresses of a tensor's storage, and of its first element."""


class NameTable:
    """Maps addresses to the qualified names of parameters, buffers and optimizer states.

    ``HashMode`` replaces the names when a step ends. It refreshes them if a parameter has moved when a step begins, and
    for each new optimizer, so a resumed run has the same names. Weak references pin the storages, so that no address
    is reused.
    """

    def __init__(self) -> None:
        self.list_state: Callable[[], Iterable[tuple[str, object]]] = tuple
        self.list_parameters: Callable[[torch.Size], Iterable[tuple[str, Tensor]]] = lambda shape: ()
        self.known: dict[Addresses, str] = {}
        self._pins: list[int] = []
        self._begins: dict[int, list[int]] = {}  # storage -> addresses of its named tensors

    def refresh(self) -> None:
        """Collect the names of the current state."""
        entries = [(name, value) for name, value in self.list_state() if has_address(value)]
        names = {addresses_of(value): name for name, value in reversed(entries)}  # the first name wins
        self.replace(names, (value for _, value in entries))

    def replace(self, names: dict[Addresses, str], tensors: Iterable[Tensor]) -> None:
        """Set the names, and pin the tensors that have them; reads ``tensors`` only if a name changed."""
        if names != self.known:
            self.close()
            self.known = names
            for storage, address in names:
                self._begins.setdefault(storage, []).append(address)
            self._pins = [pin_storage(next(parts_of(tensor)).untyped_storage()) for tensor in tensors]

    def of(self, tensor: Tensor) -> str | None:
        return self.known.get(addresses_of(tensor))

    def offset_in(self, tensor: Tensor) -> int:
        """Return the offset of a tensor inside its named tensor, or inside its storage.

        A checkpoint restores only values, not the position of a named tensor in its storage.
        """
        address = address_of(tensor)
        begins = self._begins.get(storage_address(tensor.untyped_storage()), ())
        begin = max((one for one in begins if one <= address), default=None)
        return int(tensor.storage_offset()) if begin is None else (address - begin) // tensor.itemsize

    def of_written(self, tensor: Tensor) -> str | None:
        """Return the name of an ordinary strided tensor, perhaps a gradient, that an op has written."""
        if (known := self.of(tensor)) is not None:
            return known
        if not (address := address_of(tensor)):  # an efficient zero tensor has no memory
            return None
        for name, parameter in self.list_parameters(tensor.shape):
            gradient = parameter.grad
            if gradient.__class__ is Tensor and gradient.layout is STRIDED and address_of(gradient) == address:
                return f"grad of {name}"
        return None

    def close(self) -> None:
        self.known, self._begins = {}, {}
        pins, self._pins = self._pins, []  # first, so that each is released once even after Ctrl-C
        for pin in pins:
            unpin_storage(pin)

    def __del__(self) -> None:
        self.close()


def has_address(value: object) -> TypeGuard[Tensor]:
    """Return whether a tensor, or its DTensor shard, is one strided tensor in memory."""
    if not isinstance(value, Tensor) or not holds_data(value):
        return False
    parts = parts_of(value) if has_parts(value) else (value,)
    return [part.numel() > 0 and not has_parts(part) for part in parts] == [True]


def addresses_of(tensor: Tensor) -> Addresses:
    part = next(parts_of(tensor)) if has_parts(tensor) else tensor
    return storage_address(part.untyped_storage()), address_of(part)
