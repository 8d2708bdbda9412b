"""Which named tensor (parameter, buffer, optimizer state) an op reads or writes."""

from collections.abc import Callable, Iterable
from typing import TypeGuard

import torch
from torch import Tensor

from det_callbacks.trace.components import has_parts, holds_data

address_of: Callable[[Tensor], int] = torch._C.TensorBase.data_ptr
"""``data_ptr`` without the lookup of a subclass's method."""

_free_weak_ref = torch.UntypedStorage._free_weak_ref

Place = tuple[int, int]
"""Address of a tensor's storage, and of its first element."""


class NameTable:
    """Place of a tensor -> its qualified name.

    Names are those at the step's beginning (and of an optimizer's state when it is first seen), whatever happened in
    the steps before: a resumed run gives the same names as one that was never interrupted. State that is made inside
    a step has its names from the next one on. Every storage in the table is pinned by a weak reference, so that
    neither part of a place can come to mean another tensor.

    Attributes:
        known: the mapping; public because the reads of a step use it once per tensor.
        list_state: returns the named tensors as they are now.
        list_parameters: returns the parameters of a shape, whose gradients have names wherever steps put them.
    """

    def __init__(self) -> None:
        self.list_state: Callable[[], Iterable[tuple[str, object]]] = tuple
        self.list_parameters: Callable[[torch.Size], Iterable[tuple[str, Tensor]]] = lambda shape: ()
        self.known: dict[Place, str] = {}
        self._pins: list[int] = []

    def refresh(self) -> None:
        """List the named tensors as they are now; 1 microsecond each."""
        named: dict[Place, tuple[str, object]] = {}
        for name, value in self.list_state():
            if has_place(value):
                named.setdefault(place_of(value), (name, value))
        self.keep({place: name for place, (name, _) in named.items()}, list(named.values()))

    def keep(self, names: dict[Place, str], entries: Iterable[tuple[str, object]]) -> None:
        """Replace the table.

        Args:
            names: the new one.
            entries: name and tensor, among them those at these places; what is no tensor is passed over.
        """
        if names != self.known:
            self.close()
            self.known = names
            tensors = (value for _, value in entries if has_place(value))
            # addresses; _weak_ref is declared to return a storage
            # declared as storages, and are addresses
            self._pins = [tensor.untyped_storage()._weak_ref() for tensor in tensors]  # type: ignore[misc]

    def of(self, tensor: Tensor) -> str | None:
        """Return the name of an ordinary strided tensor, None when it has none."""
        return self.known.get(place_of(tensor))

    def of_written(self, tensor: Tensor) -> str | None:
        """Return the name of an ordinary strided tensor that an op has written, which may be a gradient.

        0.2 microseconds for each parameter of its shape.
        """
        if (known := self.of(tensor)) is not None or not (address := address_of(tensor)):
            return known
        for name, parameter in self.list_parameters(tensor.shape):
            gradient = parameter.grad
            if gradient.__class__ is Tensor and gradient.layout is torch.strided and address_of(gradient) == address:
                return f"grad of {name}"
        return None

    def close(self) -> None:
        """Forget everything and let the storages' addresses go."""
        self.known = {}
        pins, self._pins = self._pins, []  # each is let go once, also where Ctrl-C ends this and it is called again
        for pin in pins:
            _free_weak_ref(pin)  # type: ignore[no-untyped-call]  # torch's own, unannotated

    def __del__(self) -> None:
        self.close()


def has_place(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a strided tensor with elements in memory."""
    return isinstance(value, Tensor) and holds_data(value) and not has_parts(value) and value.numel() > 0


def place_of(tensor: Tensor) -> Place:
    """Return where an ordinary strided tensor lies."""
    return tensor.untyped_storage()._cdata, address_of(tensor)
