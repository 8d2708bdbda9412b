"""Which named tensor (parameter, buffer, optimizer state) an op reads or writes."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from det_callbacks.trace.components import has_parts, holds_data

_free_weak_ref = torch.UntypedStorage._free_weak_ref

_Key = tuple[int, int]
"""Address of the storage, and of the first element."""


class NameTable:
    """(storage, address of the first element) -> qualified name.

    Names are those at the step's beginning (and of an optimizer's state when it is first seen), whatever happened in
    the steps before: a resumed run gives the same names as one that was never interrupted. State that is made inside
    a step has its names from the next one on. Every storage in the table is pinned by a weak reference, so that
    neither part of a key can come to mean another tensor.

    Attributes:
        list_state: returns the named tensors as they are now.
    """

    def __init__(self) -> None:
        self.list_state: Callable[[], Iterable[tuple[str, object]]] = tuple
        self._names: dict[_Key, str] = {}
        self._pins: list[int] = []

    def refresh(self) -> None:
        """List the named tensors as they are now; 1 microsecond each."""
        names: dict[_Key, str] = {}
        tensors: list[Tensor] = []
        for name, value in self.list_state():
            if isinstance(value, Tensor) and holds_data(value) and not has_parts(value) and value.numel():
                names.setdefault(_key(value), name)
                tensors.append(value)
        if names != self._names:
            self.close()
            self._names = names
            self._pins = [tensor.untyped_storage()._weak_ref() for tensor in tensors]  # type: ignore[misc]

    def of(self, tensor: Tensor) -> str | None:
        """Return the name of an ordinary strided tensor, None when it has none."""
        return self._names.get(_key(tensor))

    def close(self) -> None:
        """Forget everything and let the storages' addresses go."""
        self._names = {}
        for pin in self._pins:
            _free_weak_ref(pin)  # type: ignore[no-untyped-call]
        self._pins = []

    def __del__(self) -> None:
        self.close()


def _key(tensor: Tensor) -> _Key:
    return tensor.untyped_storage()._cdata, tensor.data_ptr()
