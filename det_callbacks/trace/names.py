"""Which named tensor (parameter, buffer, optimizer state) an op reads or writes."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from det_callbacks.trace.components import has_parts

MAX_UNNAMED = 4096

_free_weak_ref = torch.UntypedStorage._free_weak_ref


class NameTable:
    """(storage, address of the first element) -> qualified name, kept from step to step.

    Every storage in it is pinned by a weak reference, so that neither part of a key can come to mean another tensor.
    Tensors are listed anew only when one is read that the table does not know, at most once a step.

    Attributes:
        list_state: returns the named tensors as they are now.
    """

    def __init__(self) -> None:
        self.list_state: Callable[[], Iterable[tuple[str, object]]] = tuple
        self._names: dict[tuple[int, int], str | None] = {}
        self._pins: list[int] = []
        self._num_unnamed = 0
        self._is_current = False

    def begin(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Start a step; forget everything when a parameter is not where it was."""
        self._is_current = False
        if self._num_unnamed > MAX_UNNAMED or (
            self._names
            and any(self._names.get(_key(tensor)) != name for name, tensor in parameters if _has_key(tensor))
        ):
            self.close()

    def of(self, tensor: Tensor) -> str | None:
        """Return the name of an ordinary strided tensor, None when it has none."""
        key = _key(tensor)
        if key in self._names:
            return self._names[key]
        if not self._is_current:
            self._list()
        if key not in self._names:
            self._add(tensor, None)
            self._num_unnamed += 1
        return self._names[key]

    def close(self) -> None:
        """Forget everything and let the storages' addresses go."""
        self._names.clear()
        self._num_unnamed = 0
        for pin in self._pins:
            _free_weak_ref(pin)  # type: ignore[no-untyped-call]
        self._pins.clear()

    def __del__(self) -> None:
        self.close()

    def _list(self) -> None:
        self.close()
        for name, value in self.list_state():
            if isinstance(value, Tensor) and _has_key(value) and _key(value) not in self._names:
                self._add(value, name)
        self._is_current = True

    def _add(self, tensor: Tensor, name: str | None) -> None:
        self._pins.append(tensor.untyped_storage()._weak_ref())  # type: ignore[arg-type]
        self._names[_key(tensor)] = name


def _has_key(tensor: Tensor) -> bool:
    return not has_parts(tensor) and tensor.numel() > 0


def _key(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, tensor.data_ptr()
