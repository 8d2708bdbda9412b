"""Sites whose digests a device computes: asked for in the step, known at its end.

A tensor's memory must not change between the op that wrote it and the launch that reads it, so whoever is about to
write, or lets something unseen write, says so first. FSDP frees what it has gathered, which nobody tells: once a
collective has gathered anything, only what an op returned anew waits.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from det_callbacks.digest.components import tensor_bits
from det_callbacks.digest.device.deferred import Bits, DeferredBits, DeferredDigests, value_of
from det_callbacks.digest.host import digest_memory
from det_callbacks.digest.unobserved import unobserved
from det_callbacks.trace.op.components import PLAIN, address_of, parts_with_memory
from det_callbacks.trace.op.layouts import LayoutSlot


class DeferredSites(DeferredDigests):
    """The sites of one step after the other that get their digests later, each with 0 in its place until then."""

    def __init__(self) -> None:
        super().__init__()
        self.is_freed_unseen = False  # whether memory may be freed that no op allocated
        self._sees_writes = False
        self.bits: dict[int, Bits] = {}  # by the position of the site
        self._asked: list[tuple[Sequence[Bits], Callable[[list[int]], None]]] = []

    def see_writes(self, sees_writes: bool) -> None:
        """Note whether every op passes by the recorder; while none does, nothing may wait when a group has ended."""
        self.flush()
        self._sees_writes = sees_writes

    def end_group(self) -> None:
        """Note that what was recorded is left to the program again."""
        if not self._sees_writes:
            self.flush()

    def end_read(self) -> None:
        """Note that a tensor was read or written that the running op did not make."""
        if self.is_freed_unseen:
            self.flush()

    def digest(self, position: int, tensor: Tensor, slot: LayoutSlot) -> int:
        """Return the digest of a tensor, in memory order where it is dense; 0 where it is deferred."""
        bits: Bits | None = None
        if slot.is_raw and tensor.__class__ in PLAIN and not tensor.is_neg():
            storage = tensor.untyped_storage()
            address = address_of(tensor)  # 0 for an efficient zero tensor, which has no memory
            first = tensor.storage_offset() * tensor.itemsize
            if address and storage.nbytes() >= first + slot.num_bytes:
                if tensor.is_cpu:
                    return digest_memory(address, slot.num_bytes)
                bits = self.add(storage, first, slot.num_bytes)
        return self.defer(position, tensor_bits(tensor, self, memory_order=True) if bits is None else bits)

    def defer(self, position: int, bits: Bits) -> int:
        """Return bits that are known; note others for a site, and return 0."""
        if not isinstance(bits, DeferredBits):
            return bits
        self.bits[position] = bits
        return 0

    def is_deferred(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies on a device that computes digests."""
        return not tensor.is_cpu and self.computes_on(tensor.device)

    def tensor_bits(self, tensor: Tensor) -> Bits:
        """Return the digest of a tensor as it is now, in row-major order."""
        bits = tensor_bits(tensor, self)
        self.end_group()
        return bits

    def digest_rows(self, tensor: Tensor) -> list[Bits]:
        """Return the digest of each row (dimension 0) of a tensor of a device that computes digests."""
        with unobserved(), torch.no_grad():
            rows = tensor.detach().resolve_conj().resolve_neg().contiguous()
            return [tensor_bits(row, self) for row in rows]

    def ask(self, parts: Sequence[Bits], then: Callable[[list[int]], None]) -> None:
        """Have a function called with digests when they are known, if the step comes to its end."""
        self._asked.append((parts, then))

    def before_writes(self, tensors: Iterable[Tensor]) -> None:
        """Have the device read what waits, if any of it lies in memory that is about to change."""
        for tensor in tensors:
            for part in parts_with_memory(tensor):
                self.before_write(part.untyped_storage())

    def roll_back(self, mark: int) -> None:
        """Drop the sites from a position on."""
        while self.bits and next(reversed(self.bits)) >= mark:
            self.bits.popitem()

    def settle(self, digests: "array[int]") -> frozenset[int]:
        """Wait for the devices and put the digests in their places; return these."""
        known = self.finish()
        for position, bits in self.bits.items():
            digests[position] = value_of(bits, known)
        for parts, then in self._asked:
            then([value_of(part, known) for part in parts])
        settled = frozenset(self.bits)
        self.bits.clear()
        self._asked.clear()
        return settled

    def begin(self) -> None:
        """Start a step."""
        self.discard()
        self._sees_writes = False

    def discard(self) -> None:
        """Drop what waits, at the end of a step."""
        super().discard()
        self.bits.clear()
        self._asked.clear()
