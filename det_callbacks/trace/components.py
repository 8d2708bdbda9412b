"""What tensors consist of: their parts, their layouts, and whether two have the same bits."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from det_callbacks.digest.components import (
    INTEGERS,
    SPARSE_PARTS,
    digest_tensor,
    is_dense,
    measure_tensors,
    require_storage,
)
from det_callbacks.digest.numbers import Measure
from det_callbacks.internals.torch import (
    FakeTensor,
    FunctionalTensor,
    is_transformed,
    is_zero_tensor,
    memory_address,
    untransformed,
    without_dispatch,
)
from det_callbacks.runs.program import (
    READS,
    Layout,
    TensorLayout,
    entry_digest,
    layout_id,
    scalar_bits,
)

PLAIN = frozenset({Tensor, nn.Parameter})  # classes that compute no attribute in Python
STRIDED = torch.strided
address_of: Callable[[Tensor], int] = Tensor.data_ptr  # bypasses a subclass's method

MAX_ENTRIES = 100_000

_QUANTISED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})

ArgumentParts = tuple[tuple[int, int, tuple[int, ...]], ...]
"""For each tensor argument of an op that covers part of its storage: index, offset in elements,
and strides. (``has_parts`` and ``parts_of`` are about the tensors inside a tensor.)
"""


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor inside the wrappers that ``torch.func`` puts around it,
    or the tensor itself.
    """
    while is_transformed(tensor):
        tensor = untransformed(tensor)
    return tensor


def has_parts(tensor: Tensor) -> bool:
    """Return whether other tensors hold the bytes of a tensor,
    or no storage that can be read does.
    """
    if tensor.layout is not STRIDED:
        return True
    return (
        tensor.__class__ not in PLAIN
        and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    )


def holds_data(tensor: Any) -> bool:
    """Return whether a tensor has data to digest; fake, functional,
    meta and lazy tensors have none.
    """
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
    """Return whether a class hides the tensors that hold its data: no storage, and no
    ``__tensor_flatten__``.
    """
    if not isinstance(tensor, Tensor) or tensor.layout is not STRIDED or not has_parts(tensor):
        return False
    if (
        hasattr(tensor, "__tensor_flatten__")
        or isinstance(tensor, FakeTensor | FunctionalTensor)
        or tensor.is_meta
    ):
        return False
    return bool(tensor.nbytes) and not memory_address(tensor)


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the ordinary tensors that hold the bytes of a tensor that ``has_parts``;
    none if they cannot be reached.

    A subclass that has memory and only overrides ``__torch_dispatch__`` is its only part.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        for attribute in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, attribute)
            if isinstance(part, Tensor):  # a DeviceMesh may be among them
                yield from parts_of(part) if has_parts(part) else (part,)
        return
    if tensor.layout is STRIDED:
        if (
            not isinstance(tensor, FakeTensor | FunctionalTensor)
            and not tensor.is_meta
            and not is_hidden(tensor)
        ):
            yield tensor
        return
    with without_dispatch():  # a user's dispatch mode must not see us read the parts
        parts = [getattr(tensor, name)() for name in SPARSE_PARTS.get(tensor.layout, ())]
    yield from parts


def parts_with_memory(tensor: Tensor) -> Sequence[Tensor]:
    """Return the ordinary tensors that a tensor consists of: itself, or its parts."""
    return list(parts_of(tensor)) if has_parts(tensor) else (tensor,)


def has_same_bits(first: Any, second: Any) -> bool:
    """Return whether two outputs have the same bits, whatever their strides; raise as
    ``digest_tensor`` does.
    """
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return type(first) is type(second) and scalar_bits(first) == scalar_bits(second)
    if (
        first.dtype != second.dtype
        or first.layout != second.layout
        or _sizes(first) != _sizes(second)
    ):
        return False
    is_plain = not any(
        is_special(tensor) or tensor.is_conj() or tensor.is_neg() for tensor in (first, second)
    )
    if (
        is_plain
        and first.device == second.device
        and (words := INTEGERS.get(first.element_size())) is not None
    ):
        require_storage(first)
        require_storage(second)
        # compares where the tensors are; a digest would copy them to the host
        return torch.equal(first.view(words), second.view(words))
    return digest_tensor(first) == digest_tensor(second)


def difference_of(first: Any, second: Any) -> dict[str, Any]:
    """Return shape, dtype and numbers for the ``OpMismatch`` of two outputs whose bits differ."""
    if not isinstance(first, Tensor):
        name = type(first).__name__
        return {"shape": (), "dtype": name, "num_elements": 1, "num_differing": 1, "max_ulps": None}
    dtype = str(first.dtype).removeprefix("torch.")
    measured = Measure(num_elements=first.numel(), num_differing=first.numel())
    is_plain = isinstance(second, Tensor) and not is_special(first) and not is_special(second)
    if is_plain and first.shape == second.shape and first.dtype == second.dtype:
        measured = measure_tensors(first, second)
    counts = {
        name: getattr(measured, name) for name in ("num_elements", "num_differing", "max_ulps")
    }
    return {"shape": _sizes(first), "dtype": dtype, **counts}


def is_special(tensor: Tensor) -> bool:
    """Return whether a tensor is anything but strided elements in a storage."""
    return has_parts(tensor) or tensor.is_quantized or tensor.is_nested or is_zero_tensor(tensor)


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape; for a nested tensor, the number of its tensors."""
    return (
        (tensor.size(0),)
        if tensor.is_nested and tensor.layout is torch.strided
        else tuple(tensor.shape)
    )


def parts_of_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], offset_of: Callable[[Tensor], int]
) -> ArgumentParts:
    """Return which part of its storage each argument covers;
    only this distinguishes ops on two halves of a tensor.
    """
    parts: list[tuple[int, int, tuple[int, ...]]] = []
    index = 0
    for value in (*args, *kwargs.values()) if kwargs else args:
        for item in value if value.__class__ in (list, tuple) else (value,):
            if item.__class__ in PLAIN and item.layout is STRIDED and not item.is_nested:
                is_whole = item.is_contiguous()
                if (item.storage_offset() or not is_whole) and (
                    (offset := offset_of(item)) or not is_whole
                ):
                    parts.append((index, offset, item.stride()))
            index += 1
    return tuple(parts)


def describe_parts(parts: ArgumentParts = ()) -> str:
    """Return the ``detail`` of a ``TensorLayout`` for these parts; "" for none."""
    texts = [
        f"argument {index} from element {offset} by {list(stride)}"
        if index >= 0
        else f"from element {offset}"
        for index, offset, stride in parts
    ]
    return f"{READS}{'; '.join(texts)}" if texts else ""


@dataclass(slots=True, kw_only=True, eq=False)
class LayoutSlot:
    index: int
    entry: TensorLayout | None
    is_dense: bool = False  # no holes and no overlap in memory
    # dense, and its bytes are its values: a complex tensor may be lazily conjugated
    is_raw: bool = False
    is_row_major: bool = False  # raw, and in row-major order
    num_bytes: int = 0


class LayoutTable:
    """Maps (dtype, shape, stride) to a slot; the key also has the parts if an argument
    covers part of its storage.
    """

    def __init__(self) -> None:
        # public because the recorder reads it once per tensor
        self.slots: dict[Any, LayoutSlot] = {}
        self.num_forgets = 0  # how often all layouts were forgotten
        self._forget()

    def trim(self) -> None:
        """Forget every layout if there are too many; call between steps."""
        if len(self.order) > MAX_ENTRIES:
            self._forget()

    def _forget(self) -> None:
        self.num_forgets += 1
        self.slots.clear()
        self.order: list[LayoutSlot] = []
        self._digests: list[int] = []
        self._recent: list[tuple[list[int], int]] = []  # indices of whole layouts, with their ids
        self.none = self._add(None, None)
        self.tags = {tag: self.special(tag) for tag in ("float", "int", "bool", "digest")}

    def add_strided(self, key: tuple[Any, ...]) -> LayoutSlot:
        """Intern the layout of an ordinary tensor: dtype, shape, stride,
        and the parts that its op reads.
        """
        dtype, shape, stride, *parts = key
        name, detail = str(dtype).removeprefix("torch."), describe_parts(*parts)
        entry = TensorLayout(dtype=name, shape=tuple(shape), stride=tuple(stride), detail=detail)
        return self._add(key, entry, dtype)

    def of_numbers(
        self,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        parts: tuple[int, ...],
    ) -> LayoutSlot:
        """Return the slot of an ordinary tensor for the native recorder,
        which has ``ArgumentParts`` as one list of numbers.

        Each part is an index, an offset, the number of strides, and the strides.
        """
        key: tuple[Any, ...] = (dtype, shape, stride)
        argument_parts: list[tuple[int, int, tuple[int, ...]]] = []
        while parts:
            index, offset, num_strides, *rest = parts
            argument_parts.append((index, offset, tuple(rest[:num_strides])))
            parts = tuple(rest[num_strides:])
        if argument_parts:
            key = (*key, tuple(argument_parts))
        return self.slots.get(key) or self.add_strided(key)

    def special(self, dtype: str, shape: tuple[int, ...] = (), detail: str = "") -> LayoutSlot:
        """Return the slot of a number, a sparse tensor or a shard:
        anything but a strided tensor.
        """
        key = (dtype, shape, detail)
        return self.slots.get(key) or self._add(
            key, TensorLayout(dtype=dtype, shape=shape, detail=detail)
        )

    def without_bits(self, tensor: Tensor, detail: str) -> LayoutSlot:
        """Return the slot of a tensor without a digest; ``detail`` names the reason."""
        return self.special(
            str(tensor.dtype).removeprefix("torch."), tuple(map(int, tensor.shape)), detail
        )

    def of(self, tensor: Tensor, offset: int = 0) -> LayoutSlot:
        """Return the slot of any tensor; an ordinary one may begin at
        ``offset`` in a larger tensor.
        """
        if tensor.is_nested and tensor.layout is torch.strided:
            with without_dispatch():
                sizes = [list(part.shape) for part in tensor.unbind()]
            return self.special(str(tensor.dtype).removeprefix("torch."), (), f"nested{sizes}")
        if not has_parts(tensor):
            key: tuple[Any, ...] = (tensor.dtype, tensor.shape, tensor.stride())
            if offset:
                key = (*key, ((-1, offset, ()),))
            return self.slots.get(key) or self.add_strided(key)
        dtype = str(tensor.dtype).removeprefix("torch.")
        placements = getattr(tensor, "placements", None)
        detail = (
            str(tensor.layout).removeprefix("torch.")
            if placements is None
            else f"DTensor{list(placements)}"
        )
        # the ragged size is a symbol that torch numbers anew for each nested tensor
        shape = tuple(size if isinstance(size, int) else -1 for size in tensor.shape)
        return self.special(dtype, shape, detail)

    def _add(
        self, key: Any, entry: TensorLayout | None, dtype: torch.dtype | None = None
    ) -> LayoutSlot:
        slot = self.slots[key] = LayoutSlot(index=len(self.order), entry=entry)
        if entry is not None and dtype is not None:
            slot.is_dense = is_dense(entry.shape, entry.stride)
            slot.num_bytes = dtype.itemsize * prod(entry.shape)
            slot.is_raw = (
                slot.is_dense
                and slot.num_bytes > 0
                and not dtype.is_complex
                and dtype not in _QUANTISED
            )
            strides = [
                stride
                for stride, length in zip(entry.stride, entry.shape, strict=True)
                if length != 1
            ]
            slot.is_row_major = slot.is_raw and strides == sorted(strides, reverse=True)
        self.order.append(slot)
        self._digests.append(entry_digest(entry))
        return slot

    def layout_id(self, indices: list[int]) -> int:
        """Return the id of the layout of a step, whose sites have the slots at ``indices``."""
        for recent, identity in self._recent:
            if recent == indices:
                return identity
        identity = layout_id(np.asarray(self._digests, dtype="<u8")[indices])
        self._recent = [(indices, identity), *self._recent[:3]]
        return identity

    def layout(self, indices: list[int]) -> Layout:
        return Layout(entries=tuple(self.order[index].entry for index in indices))
