"""Sites whose digests a device computes: asked for in the step, known at its end.

A tensor's memory must not change between the op that wrote it and the launch that reads it, so whoever is about to
write, or lets something unseen write, says so first. Nobody tells of a raw kernel that is given an address, nor of
memory that Python frees. FSDP does the latter, with what it has gathered: once a collective has gathered anything, only
what an op returned anew waits.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from det_callbacks.digest import (
    Bits,
    LateBits,
    LateDigests,
    derived,
    digest_memory,
    output_bits,
    tensor_bits,
    unobserved,
    value_of,
)
from det_callbacks.trace.components import has_parts, parts_of
from det_callbacks.trace.layouts import LayoutSlot
from det_callbacks.trace.named_tensors import address_of

_PLAIN = frozenset({Tensor, nn.Parameter})


class LateSites:
    """The sites of one step after the other that get their digests late, each with 0 in its place until then.

    Attributes:
        is_used: whether any device has computed a digest so far; until then nothing has to be said before a write.
        is_freed_unseen: whether memory may be freed that no op allocated.
        bits: position of a site -> what it will be.
    """

    def __init__(self) -> None:
        self.is_used = False
        self.is_freed_unseen = False
        self._sees_writes = False
        self.bits: dict[int, Bits] = {}
        self._digests = LateDigests()
        self._asked: list[tuple[Sequence[Bits], Callable[[list[int]], None]]] = []

    @property
    def sees_writes(self) -> bool:
        """Whether every op passes by the recorder now; while none does, nothing may wait when a group has ended."""
        return self._sees_writes

    @sees_writes.setter
    def sees_writes(self, sees_writes: bool) -> None:
        self.flush()
        self._sees_writes = sees_writes

    def end_group(self) -> None:
        """Note that what was recorded is left to the program again."""
        if not self._sees_writes:
            self.flush()

    def digest(self, position: int, tensor: Tensor, slot: LayoutSlot) -> int:
        """Return the digest of a tensor, in memory order where it is dense; 0 where it is late.

        Args:
            position: of the site that it is for.
            tensor: any with data.
            slot: its layout.
        """
        if slot.is_raw and tensor.__class__ in _PLAIN and not tensor.is_neg():
            storage = tensor.untyped_storage()
            address = address_of(tensor)  # 0 for an efficient zero tensor, which has no memory
            if tensor.is_cpu:
                if storage.nbytes() >= slot.num_bytes and address:
                    return digest_memory(address, slot.num_bytes)
            else:
                first = tensor.storage_offset() * tensor.element_size()
                if storage.nbytes() >= first + slot.num_bytes and address:
                    bits = self._digests.add(storage, first, slot.num_bytes)
                    if bits is not None:
                        return self.later(position, bits)
        return self.later(position, output_bits(tensor, self._digests))

    def digest_row_major(self, position: int, tensor: Tensor) -> int:
        """Return the digest of a tensor in row-major order; 0 where it is late."""
        return self.later(position, tensor_bits(tensor, self._digests))

    def computes_on(self, device: torch.device) -> bool:
        """Return whether a device computes digests."""
        return self._digests.computes_on(device)

    def is_late(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies on a device that computes digests."""
        return not tensor.is_cpu and self.computes_on(tensor.device)

    def tensor_bits(self, tensor: Tensor) -> Bits:
        """Return the digest of a tensor as it is now, in row-major order."""
        self.is_used = True
        bits = tensor_bits(tensor, self._digests)
        self.end_group()
        return bits

    def output_bits(self, tensor: Tensor) -> Bits:
        """Return the digest of a tensor as it is now, in memory order where it is dense."""
        return output_bits(tensor, self._digests)

    def digest_rows(self, tensor: Tensor) -> list[Bits]:
        """Return the digest of each row (dimension 0) of a tensor of a device that computes digests."""
        with unobserved(), torch.no_grad():
            rows = tensor.detach().resolve_conj().resolve_neg().contiguous()
            return [tensor_bits(row, self._digests) for row in rows]

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy on the host that may be read once the step has ended."""
        self.is_used = True
        return self._digests.fetch(tensor)

    def send(self, values: Tensor, target: Tensor) -> None:
        """Write the elements of a host tensor into one of a device; say ``before_write`` of it first."""
        self.is_used = True
        self._digests.send(values, target)

    def ask(self, parts: Sequence[Bits], then: Callable[[list[int]], None]) -> None:
        """Have a function called with digests when they are known, if the step comes to its end."""
        self.is_used = True
        self._asked.append((parts, then))

    def derive(self, position: int, parts: Sequence[Bits], combine: Callable[[list[int]], int]) -> int:
        """Return what is computed from other bits; 0 where some of them are late."""
        known = [part for part in parts if isinstance(part, int)]
        return combine(known) if len(known) == len(parts) else self.later(position, derived(parts, combine))

    def bits_of(self, position: int, digests: "array[int]") -> Bits:
        """Return the digest of a site, late or not."""
        bits = self.bits.get(position)
        return digests[position] if bits is None else bits

    def take_over(self, position: int, other: int, digests: "array[int]") -> int:
        """Return the digest of another site for a new one that holds the same bytes; 0 where it is late."""
        return self.later(position, self.bits_of(other, digests))

    def before_write(self, tensors: Iterable[Tensor]) -> None:
        """Have the device read what waits, if any of it lies in memory that is about to change."""
        for tensor in tensors:
            for part in parts_of(tensor) if has_parts(tensor) else (tensor,):
                self._digests.before_write(part.untyped_storage())

    def before_any_write(self) -> None:
        """Have the device read all that waits, and come to what is enqueued next, on any stream, after that."""
        if self.is_used:
            self._digests.before_any_write()

    def unhold(self, tensors: Iterable[Tensor]) -> None:
        """Leave the memory of tensors to who hands it out, and looks at who holds it."""
        if self.is_used:
            for tensor in tensors:
                self._digests.unhold(tensor.untyped_storage())

    def end_read(self) -> None:
        """Note that a tensor was read, or written, which the running op did not make."""
        if self.is_freed_unseen:
            self.flush()

    def flush(self) -> None:
        """Have the device read all that waits: something may write that says nothing."""
        if self.is_used:
            self._digests.flush()

    def roll_back(self, mark: int) -> None:
        """Drop the sites from a position on."""
        while self.bits and next(reversed(self.bits)) >= mark:
            self.bits.popitem()

    def settle(self, digests: "array[int]") -> frozenset[int]:
        """Wait for the devices and put the digests in their places; return these."""
        if not self.is_used:
            return frozenset()
        known = self._digests.finish()
        for position, bits in self.bits.items():
            digests[position] = value_of(bits, known)
        for parts, then in self._asked:
            then([value_of(part, known) for part in parts])
        settled = frozenset(self.bits)
        self._forget()
        return settled

    def begin(self) -> None:
        """Start a step."""
        self.discard()
        self._sees_writes = False

    def discard(self) -> None:
        """Drop what waits, at the end of a step."""
        if self.is_used:
            self._digests.discard()
        self._forget()

    def later(self, position: int, bits: Bits) -> int:
        """Return bits that are known; note others for a site, and return 0."""
        if not isinstance(bits, LateBits):
            return bits
        self.bits[position] = bits
        self.is_used = True
        return 0

    def _forget(self) -> None:
        self.bits.clear()
        self._asked.clear()
