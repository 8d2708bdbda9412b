"""Interned layouts of digested tensors; in the forward pass also which part of its storage each argument covers."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from det_callbacks.digest.components import is_dense
from det_callbacks.internals.torch import without_dispatch
from det_callbacks.runs.program import READS, Layout, TensorLayout, entry_digest, layout_id
from det_callbacks.trace.op.components import PLAIN, STRIDED, has_parts

MAX_ENTRIES = 100_000

_QUANTISED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})

Parts = tuple[tuple[int, int, tuple[int, ...]], ...]
"""For each tensor argument that covers part of its storage: index, offset in elements, and strides."""


def parts_of_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], offset_of: Callable[[Tensor], int]) -> Parts:
    """Return which part of its storage each argument covers; only this distinguishes ops on two halves of a tensor."""
    found: list[tuple[int, int, tuple[int, ...]]] = []
    at = 0
    for value in (*args, *kwargs.values()) if kwargs else args:
        for item in value if value.__class__ in (list, tuple) else (value,):
            if item.__class__ in PLAIN and item.layout is STRIDED and not item.is_nested:
                is_whole = item.is_contiguous()
                if (item.storage_offset() or not is_whole) and ((offset := offset_of(item)) or not is_whole):
                    found.append((at, offset, item.stride()))
            at += 1
    return tuple(found)


def describe_parts(parts: Parts = ()) -> str:
    """Return the ``detail`` of a ``TensorLayout`` for these parts; "" for none."""
    texts = [
        f"argument {at} from element {offset} by {list(stride)}" if at >= 0 else f"from element {offset}"
        for at, offset, stride in parts
    ]
    return f"{READS}{'; '.join(texts)}" if texts else ""


@dataclass(slots=True, kw_only=True, eq=False)
class LayoutSlot:
    index: int
    entry: TensorLayout | None
    is_dense: bool = False  # no holes and no overlap in memory
    is_raw: bool = False  # dense, and its bytes are its values: a complex tensor may be lazily conjugated
    is_row_major: bool = False  # raw, and in row-major order
    num_bytes: int = 0


class LayoutTable:
    """Maps (dtype, shape, stride) to a slot; the key also has the parts if an argument covers part of its storage."""

    def __init__(self) -> None:
        self.slots: dict[Any, LayoutSlot] = {}  # public because the recorder reads it once per tensor
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
        self._known: list[tuple[list[int], int]] = []
        self.none = self._add(None, None)
        self.tags = {tag: self.special(tag) for tag in ("float", "int", "bool", "digest")}

    def add_strided(self, key: tuple[Any, ...]) -> LayoutSlot:
        """Intern the layout of an ordinary tensor: dtype, shape, stride, and the parts that its op reads."""
        dtype, shape, stride, *parts = key
        name, detail = str(dtype).removeprefix("torch."), describe_parts(*parts)
        entry = TensorLayout(dtype=name, shape=tuple(shape), stride=tuple(stride), detail=detail)
        return self._add(key, entry, dtype)

    def of_numbers(
        self, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], parts: tuple[int, ...]
    ) -> LayoutSlot:
        """Return the slot of an ordinary tensor for the native recorder, which has ``Parts`` as one list of numbers.

        Each part is an index, an offset, the number of strides, and the strides.
        """
        key: tuple[Any, ...] = (dtype, shape, stride)
        found: list[tuple[int, int, tuple[int, ...]]] = []
        while parts:
            at, offset, num_strides, *rest = parts
            found.append((at, offset, tuple(rest[:num_strides])))
            parts = tuple(rest[num_strides:])
        if found:
            key = (*key, tuple(found))
        return self.slots.get(key) or self.add_strided(key)

    def special(self, dtype: str, shape: tuple[int, ...] = (), detail: str = "") -> LayoutSlot:
        """Return the slot of a number, a sparse tensor or a shard: anything but a strided tensor."""
        key = (dtype, shape, detail)
        return self.slots.get(key) or self._add(key, TensorLayout(dtype=dtype, shape=shape, detail=detail))

    def without_bits(self, tensor: Tensor, detail: str) -> LayoutSlot:
        """Return the slot of a tensor without a digest; ``detail`` names the reason."""
        return self.special(str(tensor.dtype).removeprefix("torch."), tuple(map(int, tensor.shape)), detail)

    def of(self, tensor: Tensor, offset: int = 0) -> LayoutSlot:
        """Return the slot of any tensor; an ordinary one may begin at ``offset`` in a larger tensor."""
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
        detail = str(tensor.layout).removeprefix("torch.") if placements is None else f"DTensor{list(placements)}"
        # the ragged size is a symbol that torch numbers anew for each nested tensor
        shape = tuple(size if isinstance(size, int) else -1 for size in tensor.shape)
        return self.special(dtype, shape, detail)

    def _add(self, key: Any, entry: TensorLayout | None, dtype: torch.dtype | None = None) -> LayoutSlot:
        slot = self.slots[key] = LayoutSlot(index=len(self.order), entry=entry)
        if entry is not None and dtype is not None:
            slot.is_dense = is_dense(entry.shape, entry.stride)
            slot.num_bytes = dtype.itemsize * prod(entry.shape)
            slot.is_raw = slot.is_dense and slot.num_bytes > 0 and not dtype.is_complex and dtype not in _QUANTISED
            strides = [stride for stride, length in zip(entry.stride, entry.shape, strict=True) if length != 1]
            slot.is_row_major = slot.is_raw and strides == sorted(strides, reverse=True)
        self.order.append(slot)
        self._digests.append(entry_digest(entry))
        return slot

    def layout_id(self, indices: list[int]) -> int:
        for known, identity in self._known:
            if known == indices:
                return identity
        identity = layout_id(np.asarray(self._digests, dtype="<u8")[indices])
        self._known = [(indices, identity), *self._known[:3]]
        return identity

    def layout(self, indices: list[int]) -> Layout:
        return Layout(entries=tuple(self.order[index].entry for index in indices))
