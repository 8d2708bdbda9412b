"""Writers that the trace did not see, looked for in a verify run where an output differs.

An op whose output differs while everything it read agrees would be called the origin. But a raw kernel, NumPy or
another thread may have written what it read, unseen. So when an output differs from the reference, the inputs that are
still alive are digested again and compared with what their writers had left; a difference makes ``is_origin`` null.
Where digests are known at the step's end only, so is what differs: then what is still alive of the inputs is looked at.
"""

from collections.abc import Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from det_callbacks.digest import Bits, LateDigests, digest_memory, digest_output, value_of
from det_callbacks.trace.calls import written_arguments
from det_callbacks.trace.components import has_parts
from det_callbacks.trace.overloads import OpPlan
from det_callbacks.trace.program import Program
from det_callbacks.trace.steps import Expectation
from det_callbacks.trace.storages import PartialWrites, region_of

if TYPE_CHECKING:
    from det_callbacks.trace.recorder import Recorder


class Witness:
    """Looks at the inputs of ops whose output is not what the reference had.

    Args:
        recorder: whose sites and storages are looked at.
    """

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder

    def has_changed(self, tensors: list[Tensor]) -> bool:
        """Return whether one of them is not what the recorded site that wrote it had left."""
        return any(self._is_changed(tensor) for tensor in tensors)

    def compare(
        self,
        expected: Expectation,
        first: int,
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        was_changed: bool,
    ) -> None:
        """Note the sites of a call that differ and read something that nobody recorded wrote.

        Args:
            expected: the reference's digests; the finding is noted in it.
            first: position of the call's first output.
            plan: of the op.
            args: of the call.
            kwargs: of the call.
            was_changed: what ``has_changed`` said, before the call, of the arguments that it wrote.
        """
        digests, late = self._recorder.digests, self._recorder.late.bits
        positions = range(first, len(digests))
        if not expected.checks_left or not any(
            position not in late and expected.differs(position, digests[position]) for position in positions
        ):
            return
        expected.checks_left -= 1
        written = {id(tensor) for tensor in written_arguments(plan, args, kwargs)}
        read: list[Tensor] = []
        for value in (*args, *kwargs.values()):
            items = value if isinstance(value, list | tuple) else (value,)
            read.extend(item for item in items if isinstance(item, Tensor) and id(item) not in written)
        if was_changed or self.has_changed(read):
            expected.unseen_writes.update(positions)

    def look_back(self, expected: Expectation, program: Program, late: frozenset[int]) -> None:
        """Do the same at the end of a step for the sites whose digests are known only then.

        What they read is looked at where it is alive still, and no recorded site has written it since.

        Args:
            expected: the reference's digests; the finding is noted in it.
            program: of the step.
            late: positions of these sites.
        """
        recorder = self._recorder
        differing = [at for at in sorted(late) if expected.differs(at, recorder.digests[at])][: expected.checks_left]
        inputs = {at: program.sites[at].inputs for at in differing if program.sites[at].role == "output"}
        changed = self._changed_since({writer for writers in inputs.values() for writer in writers})
        expected.unseen_writes.update(at for at, writers in inputs.items() if not changed.isdisjoint(writers))

    def _changed_since(self, wanted: Set[int]) -> set[int]:
        """Return the sites among these whose bytes, as far as they are alive, are others now."""
        recorder = self._recorder
        queues = LateDigests()
        found: list[tuple[int, Bits]] = []
        for address, writer in recorder.ledger.writers.items():
            if writer.__class__ is not int or writer not in wanted:
                continue
            left = recorder.layouts.at(recorder.layout_indices[writer])
            # the ledger holds a weak reference to it; torch 2.13: None where it is gone
            storage = torch.UntypedStorage._new_with_weak_ptr(address)
            if storage is not None and left.is_raw and storage.nbytes() == left.num_bytes:
                bits = queues.add(storage, 0, left.num_bytes)
                if bits is not None:
                    found.append((writer, bits))
        known = queues.finish()
        return {writer for writer, bits in found if value_of(bits, known) != recorder.digests[writer]}

    def _is_changed(self, tensor: Tensor) -> bool:
        recorder = self._recorder
        if has_parts(tensor):
            return False
        writer = recorder.ledger.writers.get(tensor.untyped_storage()._cdata)
        if isinstance(writer, PartialWrites):
            return self._is_part_changed(tensor, writer)
        if writer is None or writer in recorder.late.bits:
            return False
        slot = recorder.layouts.of(tensor)
        left = recorder.layouts.at(recorder.layout_indices[writer])
        if not slot.is_raw or not left.is_raw or slot.num_bytes != left.num_bytes:
            return False
        return digest_output(tensor) != recorder.digests[writer]

    def _is_part_changed(self, tensor: Tensor, known: PartialWrites) -> bool:
        """Return whether bytes without holes, which one site wrote, are others now; the rest cannot be told."""
        recorder = self._recorder
        storage = tensor.untyped_storage()
        if not tensor.is_cpu:
            return False
        for region, writer in known.untouched(region_of(tensor)):
            left = recorder.layouts.at(recorder.layout_indices[writer])
            is_same_extent = left.is_raw and left.num_bytes == region.high - region.low
            if is_same_extent and region.high <= storage.nbytes():
                now = digest_memory(storage.data_ptr() + region.low, left.num_bytes)
                if now != recorder.digests[writer]:
                    return True
        return False
