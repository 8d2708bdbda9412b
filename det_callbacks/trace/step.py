"""The results of the current step so far: its sites, the writers of memory, and its walk through the programs."""

from array import array
from collections.abc import Sequence
from threading import RLock
from typing import Any

from torch import Tensor

from det_callbacks.runs.program import scalar_bits
from det_callbacks.trace.op.call_graph import CallGraph, OpScope, StepCounts
from det_callbacks.trace.op.components import parts_with_memory
from det_callbacks.trace.op.deferred_sites import DeferredSites
from det_callbacks.trace.op.layouts import LayoutSlot, LayoutTable
from det_callbacks.trace.op.storages import StorageLedger


class Step:
    """The current step; appending bits and a layout makes a site.

    Recording holds ``lock``: the autograd engine runs the backward pass of each device in a separate thread, modules
    may run in a thread pool, and an op lets other threads continue while it runs.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self.graph = CallGraph()
        self.layouts = LayoutTable()
        self.ledger = StorageLedger()
        self.deferred = DeferredSites()
        self.counts = StepCounts()
        self.digests = array("Q")
        self.layout_indices: list[int] = []

    def begin(self) -> None:
        """Start a step."""
        self.deferred.begin()
        self.layouts.trim()
        self.ledger.close()
        self.graph.begin()
        self.digests = array("Q")
        self.layout_indices = []
        self.counts = StepCounts()

    def discard(self) -> None:
        """Release all weak references of the step; may be called more than once."""
        self.deferred.discard()
        self.ledger.close()

    @property
    def num_sites(self) -> int:
        """Number of sites recorded so far."""
        return len(self.digests)

    def append(self, tensor: Tensor, slot: LayoutSlot | None = None) -> LayoutSlot:
        """Digest a tensor as the next site, in memory order if dense; return its layout."""
        slot = slot or self.layouts.of(tensor)
        self.digests.append(self.deferred.digest(len(self.digests), tensor, slot))
        self.layout_indices.append(slot.index)
        self.deferred.end_read()
        return slot

    def append_bits(self, bits: int, slot: LayoutSlot) -> None:
        """Append a site with known 64 bits."""
        self.digests.append(bits)
        self.layout_indices.append(slot.index)

    def append_value(self, value: Any) -> None:
        """Append the bits of a tensor or number."""
        if isinstance(value, Tensor):
            self.append(value)
        else:
            bits, tag = scalar_bits(value)
            self.append_bits(bits, self.layouts.special(tag))

    def append_output(self, tensor: Tensor, writers: Sequence[int]) -> None:
        """Append a tensor; if a single site wrote the same bytes, reuse its digest."""
        slot = self.layouts.of(tensor)
        if len(writers) == 1 and slot.is_raw:
            (writer,) = writers
            written = self.layouts.order[self.layout_indices[writer]]
            is_same = written is slot or (written.is_raw and written.num_bytes == slot.num_bytes)
            if is_same and tensor.untyped_storage().nbytes() == slot.num_bytes:
                bits = self.deferred.bits.get(writer, self.digests[writer])
                self.append_bits(self.deferred.defer(len(self.digests), bits), slot)
                return
        self.append(tensor)

    def layout_of(self, position: int) -> LayoutSlot:
        """Return the layout of a site."""
        return self.layouts.order[self.layout_indices[position]]

    def writers_of(self, tensor: Tensor) -> list[int]:
        """Return the sites in this step that wrote a tensor's bytes."""
        return sorted({writer for part in parts_with_memory(tensor) for writer in self.ledger.writers_of(part)})

    def forget(self, tensor: Tensor) -> None:
        """Note that unrecorded code wrote a tensor, including its inner tensors."""
        for part in parts_with_memory(tensor):
            self.ledger.forget(part)

    def run_unseen(self, label: str, phase: str, scope: OpScope) -> None:
        """Note in the program that code without rows ran, which may have written any memory."""
        self.counts.opaque.add(label)
        self.ledger.invalidate()
        self.graph.step_to((label, phase, scope, [], [], [], 0), lambda node: None)

    def roll_back(self, mark: int) -> None:
        """Drop the sites from a position on."""
        self.deferred.roll_back(mark)
        del self.digests[mark:]
        del self.layout_indices[mark:]
        self.ledger.drop_from(mark)
