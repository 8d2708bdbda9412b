"""What the current step has recorded so far: its sites, the writers of its memory,
and its path in the call graph.
"""

from array import array
from collections.abc import Sequence
from threading import RLock
from typing import Any, Protocol

from torch import Tensor

from det_callbacks.runs.program import scalar_bits
from det_callbacks.trace.call_graph import CallGraph, OpScope, StepCounts
from det_callbacks.trace.components import (
    PLAIN,
    LayoutSlot,
    LayoutTable,
    has_parts,
    holds_data,
    is_hidden,
    parts_of,
    parts_with_memory,
)
from det_callbacks.trace.deferred_sites import DeferredSites
from det_callbacks.trace.overloads import OpPlan, written_by_call
from det_callbacks.trace.storages import StorageWriters


class Step:
    """The current step; appending bits and a layout adds a site.

    Hold ``lock`` while recording: the autograd engine runs each device's part of a backward pass in
    a separate thread, and an op lets other threads continue while it runs.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self.graph = CallGraph()
        self.layouts = LayoutTable()
        self.ledger = StorageWriters()
        self.deferred = DeferredSites()
        self.counts = StepCounts()
        self.digests = array("Q")
        self.layout_indices: list[int] = []

    def begin(self) -> None:
        self.deferred.begin()
        self.layouts.trim()
        self.ledger.close()
        self.digests = array("Q")
        self.layout_indices = []
        self.counts = StepCounts()
        self.graph.begin()  # last: the native recorder sees by its labels that a step has begun

    def discard(self) -> None:
        """Release every weak reference that the step holds; may be called more than once."""
        self.deferred.discard()
        self.ledger.close()

    @property
    def num_sites(self) -> int:
        return len(self.digests)

    def append(self, tensor: Tensor, slot: LayoutSlot | None = None) -> LayoutSlot:
        """Append a tensor's digest, in memory order if it is dense; return its layout."""
        slot = slot or self.layouts.of(tensor)
        self.digests.append(self.deferred.digest(len(self.digests), tensor, slot))
        self.layout_indices.append(slot.index)
        self.deferred.end_read()
        return slot

    def append_bits(self, bits: int, slot: LayoutSlot) -> None:
        self.digests.append(bits)
        self.layout_indices.append(slot.index)

    def append_value(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self.append(value)
        else:
            bits, tag = scalar_bits(value)
            self.append_bits(bits, self.layouts.special(tag))

    def append_output(self, tensor: Tensor, writers: Sequence[int]) -> None:
        """Append a tensor; reuse the digest of its writer if one site wrote the same bytes."""
        slot = self.layouts.of(tensor)
        if len(writers) == 1 and slot.is_raw:
            (writer,) = writers
            written = self.layouts.order[self.layout_indices[writer]]
            is_same = written is slot or (written.is_raw and written.num_bytes == slot.num_bytes)
            if is_same and tensor.untyped_storage().nbytes() == slot.num_bytes:
                bits = self.deferred.bits.get(writer, self.digests[writer])
                self.append_bits(self.deferred.defer(len(self.digests), bits), slot)
                return
        self.append(tensor, slot)

    def holds_data(self, tensor: Any) -> bool:
        """Return whether a tensor has data to digest; the coverage names a
        class that hides its data.
        """
        if tensor.__class__ in PLAIN:
            return not tensor.is_meta
        if is_hidden(tensor):
            self.counts.opaque.add(f"{type(tensor).__module__}.{type(tensor).__qualname__}")
        return holds_data(tensor)

    def layout_of(self, position: int) -> LayoutSlot:
        return self.layouts.order[self.layout_indices[position]]

    def writers_of(self, tensor: Tensor) -> list[int]:
        if not has_parts(tensor):
            return self.ledger.writers_of(tensor)
        return sorted(
            {writer for part in parts_of(tensor) for writer in self.ledger.writers_of(part)}
        )

    def forget(self, tensor: Tensor) -> None:
        """Record an unseen write to a tensor, or to its parts."""
        for part in parts_with_memory(tensor):
            self.ledger.forget(part)

    def add_unseen_writer(self, label: str, phase: str, scope: OpScope) -> None:
        """Add a call without rows to the program, for something that may
        have written any memory.
        """
        self.counts.opaque.add(label)
        self.ledger.invalidate()
        self.graph.step_to(label, phase, scope, [], [], 0, lambda node: None)

    def roll_back(self, mark: int) -> None:
        self.deferred.roll_back(mark)
        del self.digests[mark:]
        del self.layout_indices[mark:]
        self.ledger.drop_from(mark)


class OutputHook(Protocol):
    """Called with the outputs of the ops it selects, before they are digested:
    replay restores tensors there.
    """

    needs_rows: bool  # whether to call it for digested ops only

    def selects(self, phase: str, module: str, op: str) -> bool:
        """Return whether the hook wants the outputs of an op at this place."""

    def exchange(
        self,
        phase: str,
        module: str,
        op: str,
        outputs: Sequence[Any],
        position: int,
        deferred: DeferredSites,
    ) -> Sequence[Any]:
        """Return the outputs to continue with: the same tensors, perhaps with other
        contents, or other numbers.

        The call's sites are the next outputs from ``position`` on.
        """


class OutputHooks:
    """The output hooks of a recording; most recordings have none."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self.every: tuple[OutputHook, ...] = ()

    def call(
        self,
        plan: OpPlan,
        phase: str,
        scope: OpScope,
        out: Any,
        outputs: Sequence[Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, Sequence[Any]]:
        """Call the hooks; return the op's result and outputs.

        ``outputs`` is None for an op without sites.
        """
        written = outputs
        for hook in self.every:
            if (outputs is None and hook.needs_rows) or not hook.selects(
                phase, scope.module, plan.name
            ):
                continue
            written = written_by_call(plan, out, args, kwargs) if written is None else written
            if not written:
                break
            is_number = len(written) == 1 and written[0] is out and not isinstance(out, Tensor)
            written = hook.exchange(
                phase, scope.module, plan.name, written, self._step.num_sites, self._step.deferred
            )
            out = written[0] if is_number else out
        return out, written or ()
