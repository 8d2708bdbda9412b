"""Sites whose digests a device computes: requested during the step, known at its end.

A tensor's memory must not change before the device has read it, so a caller calls ``before_writes``
or ``flush`` before anything writes. FSDP frees gathered memory without a call that we see: after a
collective has gathered anything, only new outputs of ops may wait.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from det_callbacks.digest.components import tensor_bits
from det_callbacks.digest.deferred import Bits, DeferredBits, DeferredDigests, value_of
from det_callbacks.digest.host import digest_memory
from det_callbacks.digest.unobserved import unobserved
from det_callbacks.trace.components import PLAIN, LayoutSlot, address_of, parts_with_memory


class DeferredSites(DeferredDigests):
    """The deferred sites of the current step; each has the digest 0 until ``settle``."""

    def __init__(self) -> None:
        super().__init__()
        self.is_freed_unseen = False  # whether something unseen, such as FSDP, may free memory
        self._sees_writes = False
        self.bits: dict[int, Bits] = {}  # position of a site -> bits
        # digests, and a function to call with them
        self._when_known: list[tuple[Sequence[Bits], Callable[[list[int]], None]]] = []

    def see_writes(self, sees_writes: bool) -> None:
        """Set whether the recorder sees every op; while it does not,
        nothing may wait beyond the end of a group.
        """
        self.flush()
        self._sees_writes = sees_writes

    def end_group(self) -> None:
        """Record that the user's code may now write the recorded tensors."""
        if not self._sees_writes:
            self.flush()

    def end_read(self) -> None:
        """Record that the running op read or wrote a tensor that existed before."""
        if self.is_freed_unseen:
            self.flush()

    def digest(self, position: int, tensor: Tensor, slot: LayoutSlot) -> int:
        """Return the digest of a tensor, in memory order if it is dense;
        0 if the digest is deferred.
        """
        bits: Bits | None = None
        if slot.is_raw and tensor.__class__ in PLAIN and not tensor.is_neg():
            storage = tensor.untyped_storage()
            address = address_of(tensor)  # 0 for an efficient zero tensor, which has no memory
            first = tensor.storage_offset() * tensor.itemsize
            if address and storage.nbytes() >= first + slot.num_bytes:
                if tensor.is_cpu:
                    return digest_memory(address, slot.num_bytes)
                bits = self.add(storage, first, slot.num_bytes)
        return self.defer(
            position, tensor_bits(tensor, self, memory_order=True) if bits is None else bits
        )

    def defer(self, position: int, bits: Bits) -> int:
        """Return known bits; keep deferred ones for the site at ``position`` and return 0."""
        if not isinstance(bits, DeferredBits):
            return bits
        self.bits[position] = bits
        return 0

    def is_deferred(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on a device that computes digests."""
        return not tensor.is_cpu and self.computes_on(tensor.device)

    def tensor_bits(self, tensor: Tensor) -> Bits:
        """Return the digest of the current contents of a tensor, in row-major order."""
        bits = tensor_bits(tensor, self)
        self.end_group()
        return bits

    def digest_rows(self, tensor: Tensor) -> list[Bits]:
        """Return the digest of each row (dimension 0) of a tensor on a
        device that computes digests.
        """
        with unobserved(), torch.no_grad():
            rows = tensor.detach().resolve_conj().resolve_neg().contiguous()
            return [tensor_bits(row, self) for row in rows]

    def when_known(self, parts: Sequence[Bits], then: Callable[[list[int]], None]) -> None:
        """Call a function with the digests once they are known; never if the step is abandoned."""
        self._when_known.append((parts, then))

    def before_writes(self, tensors: Iterable[Tensor]) -> None:
        """Let the device read the waiting tensors first if any of them
        share memory with ``tensors``.
        """
        for tensor in tensors:
            for part in parts_with_memory(tensor):
                self.before_write(part.untyped_storage())

    def roll_back(self, mark: int) -> None:
        """Forget the sites from a position on."""
        while self.bits and next(reversed(self.bits)) >= mark:
            self.bits.popitem()

    def settle(self, digests: "array[int]") -> frozenset[int]:
        """Wait for the devices, fill in the digests, and return the positions filled."""
        known = self.finish()
        for position, bits in self.bits.items():
            digests[position] = value_of(bits, known)
        for parts, then in self._when_known:
            then([value_of(part, known) for part in parts])
        settled = frozenset(self.bits)
        self.bits.clear()
        self._when_known.clear()
        return settled

    def begin(self) -> None:
        self.discard()
        self._sees_writes = False

    def discard(self) -> None:
        super().discard()
        self.bits.clear()
        self._when_known.clear()
