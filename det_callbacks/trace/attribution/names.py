"""The names of tensors: which parameter, buffer or state of an optimizer an op reads or writes."""

from collections.abc import Callable, Iterable
from typing import TypeGuard

import torch
from torch import Tensor

from det_callbacks.internals.torch import pin_storage, storage_address, unpin_storage
from det_callbacks.trace.op.components import STRIDED, address_of, has_parts, holds_data, parts_of

Place = tuple[int, int]
"""Address of a tensor's storage, and of its first element."""


class NameTable:
    """Place of a parameter, a buffer or a state of an optimizer -> its qualified name.

    Names are those at the step's beginning (and of an optimizer's state when it is first seen), so that a resumed run
    gives the same ones as one that was never interrupted. Every storage in the table is pinned by a weak reference, so
    that neither part of a place can come to mean another tensor.
    """

    def __init__(self) -> None:
        self.list_state: Callable[[], Iterable[tuple[str, object]]] = tuple
        self.list_parameters: Callable[[torch.Size], Iterable[tuple[str, Tensor]]] = lambda shape: ()
        self.known: dict[Place, str] = {}  # public because the reads of a step use it once per tensor
        self._pins: list[int] = []
        self._begins: dict[int, list[int]] = {}  # storage -> where its named tensors lie

    def refresh(self) -> None:
        """List the named tensors as they are now; 1 microsecond each."""
        entries = [(name, value) for name, value in self.list_state() if has_place(value)]
        self.keep({place_of(value): name for name, value in reversed(entries)}, entries)

    def keep(self, names: dict[Place, str], entries: Iterable[tuple[str, object]]) -> None:
        """Replace the table; the tensors at these places are among ``entries``."""
        if names != self.known:
            self.close()
            self.known = names
            for storage, address in names:
                self._begins.setdefault(storage, []).append(address)
            # declared as storages, and are addresses
            self._pins = [pin_storage(next(parts_of(one)).untyped_storage()) for _, one in entries if has_place(one)]

    def of(self, tensor: Tensor) -> str | None:
        """Return the name of an ordinary strided tensor, None when it has none."""
        return self.known.get(place_of(tensor))

    def offset_in(self, tensor: Tensor) -> int:
        """Return the element that a tensor begins with, of the named tensor that it is a part of, or of its storage.

        Where a named tensor lies in its storage is no matter of the step: a checkpoint brings back its values only.
        """
        address = address_of(tensor)
        begins = self._begins.get(storage_address(tensor.untyped_storage()), ())
        begin = max((one for one in begins if one <= address), default=None)
        return int(tensor.storage_offset()) if begin is None else (address - begin) // tensor.itemsize

    def of_written(self, tensor: Tensor) -> str | None:
        """Return the name of an ordinary strided tensor that an op has written, which may be a gradient."""
        if (known := self.of(tensor)) is not None or not (address := address_of(tensor)):
            return known
        for name, parameter in self.list_parameters(tensor.shape):
            gradient = parameter.grad
            if gradient.__class__ is Tensor and gradient.layout is STRIDED and address_of(gradient) == address:
                return f"grad of {name}"
        return None

    def close(self) -> None:
        """Forget everything and let the storages' addresses go."""
        self.known, self._begins = {}, {}
        pins, self._pins = self._pins, []  # each is let go once, also where Ctrl-C ends this and it is called again
        for pin in pins:
            unpin_storage(pin)

    def __del__(self) -> None:
        self.close()


def has_place(value: object) -> TypeGuard[Tensor]:
    """Return whether a value has its elements in one strided tensor in memory: itself, or its shard of a DTensor."""
    if not isinstance(value, Tensor) or not holds_data(value):
        return False
    parts = parts_of(value) if has_parts(value) else (value,)
    return [part.numel() > 0 and not has_parts(part) for part in parts] == [True]


def place_of(tensor: Tensor) -> Place:
    """Return where an ordinary strided tensor, or the shard of a DTensor, lies."""
    part = next(parts_of(tensor)) if has_parts(tensor) else tensor
    return storage_address(part.untyped_storage()), address_of(part)
