"""Writers that the trace did not see, looked for in a verify run where an output differs.

An op whose output differs while everything it read agrees would be called the origin. But a raw kernel, NumPy or
another thread may have written what it read, unseen. So when an output differs from the reference, the inputs that are
still alive are digested again and compared with what their writers had left; a difference makes ``is_origin`` null.
Where digests are known at the step's end only, so is what differs: then what is still alive of the inputs is looked at.
"""

from collections.abc import Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from det_callbacks.digest import Bits, LateDigests, digest_memory, digest_output, digest_tensor, value_of
from det_callbacks.runs.program import Program
from det_callbacks.runs.steps import Expectation
from det_callbacks.trace.components import has_parts, parts_with_memory
from det_callbacks.trace.overloads import OpPlan, tensors_read
from det_callbacks.trace.storages import PartialWrites, region_of

if TYPE_CHECKING:
    from det_callbacks.trace.recorder import Recorder


@dataclass(slots=True)
class WrittenArguments:
    """What is found of the arguments that an op is about to write, whose bits nobody can read afterwards.

    Attributes:
        is_changed: one of them is not what its recorded writer left; in an optimizer's update: may not be.
        pairs: digests that are known at the step's end, of what lies there and of what the writer left.
    """

    is_changed: bool = False
    pairs: list[tuple[Bits, Bits]] = field(default_factory=list)


class UnseenWriteCheck:
    """Looks at the inputs of ops whose output is not what the reference had."""

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self._update = 0

    def begin_update(self) -> None:
        """Note that an optimizer begins its own update: no code of the user's runs until it ends."""
        self._update = self._recorder.num_sites

    def look_before(self, tensors: list[Tensor], mark: int, *, is_update: bool) -> WrittenArguments:
        """Return what is found of the arguments that an op is about to write.

        What the optimizer's own update has read or written so far is as it left it. The other memory that an optimizer
        writes has to be what its recorded writers left, or nobody can be called the origin of what is there afterwards.

        Args:
            tensors: that the call writes.
            mark: sites that the step had before the call.
            is_update: the call is one of an optimizer's own update.
        """
        found = WrittenArguments()
        trusted = self._update if is_update else mark
        for tensor in tensors:
            writer = None if has_parts(tensor) else self._writer(tensor)
            if writer.__class__ is int and writer >= trusted:
                continue
            if not is_update:
                found.is_changed = found.is_changed or self._is_changed(tensor)
                continue
            for part in parts_with_memory(tensor):
                self._look_before_update(part, found)
        return found

    def compare(
        self,
        expected: Expectation,
        mark: int,
        first: int,
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: WrittenArguments | None,
    ) -> None:
        """Note the sites of a call that differ and read something that nobody recorded wrote.

        Of sites whose digests are known later, that is noted of what they read on the host, whether they differ or not:
        ``look_back`` sees to the rest.

        Args:
            expected: the reference's digests; the finding is noted in it.
            mark: sites that the step had before the call.
            first: position of the call's first output.
            plan: of the op.
            args: of the call.
            kwargs: of the call.
            written: what was found of the arguments that it wrote; None where it wrote none that it read.
        """
        digests, late = self._recorder.digests, self._recorder.late.bits
        positions = range(first, len(digests))
        if written is not None and written.pairs:
            parts = [bits for pair in written.pairs for bits in pair]
            self._recorder.late.ask(parts, lambda known: _note_changed(expected, known, positions))
        waiting = [position for position in positions if position in late]
        differs = expected.checks_left and any(
            position not in late and expected.differs(position, digests[position]) for position in positions
        )
        if differs:
            expected.checks_left -= 1
            is_changed = written is not None and written.is_changed
            if is_changed or any(map(self._is_changed, tensors_read(plan, args, kwargs))):
                expected.unseen_writes.update(positions)
        elif waiting:
            for tensor in tensors_read(plan, args, kwargs):
                if not tensor.is_cpu or has_parts(tensor):
                    continue
                writer = self._writer(tensor)
                is_just_read = isinstance(writer, int) and writer >= mark
                if not is_just_read and self._is_changed(tensor):
                    expected.unseen_writes.update(waiting)

    def look_back(self, expected: Expectation, program: Program, late: frozenset[int]) -> None:
        """Do the same at the end of a step for the sites whose digests are known only then.

        What they read is looked at where it is alive still, and no recorded site has written it since.

        Args:
            expected: the reference's digests; the finding is noted in it.
            program: of the step.
            late: positions of these sites.
        """
        sites, digests = program.sites, self._recorder.digests
        differing = [at for at in sorted(late) if sites[at].role == "output" and expected.differs(at, digests[at])]
        differing = differing[: expected.checks_left]
        expected.checks_left -= len(differing)
        if not differing:
            return
        changed = self._changed({writer for at in differing for writer in sites[at].inputs})
        expected.unseen_writes.update(at for at in differing if not changed.isdisjoint(sites[at].inputs))

    def _look_before_update(self, part: Tensor, found: WrittenArguments) -> None:
        recorder = self._recorder
        known = self._writer(part)
        if not part.numel() or found.is_changed:
            return
        if isinstance(known, PartialWrites):
            region = region_of(part)
            num_known = sum(left.high - left.low for left, _ in known.untouched(region))
            is_known = part.is_cpu and num_known == region.high - region.low
            found.is_changed = not is_known or self._is_part_changed(part, known)
        elif known is not None and known in recorder.late.bits:
            found.pairs.append((recorder.late.output_bits(part), recorder.late.bits[known]))
        else:
            found.is_changed = known is None or not recorder.layouts.of(part).is_raw or self._is_changed(part)

    def _changed(self, wanted: Set[int]) -> set[int]:
        """Return those of some sites whose bytes are still there and others now."""
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

    def _writer(self, tensor: Tensor) -> int | PartialWrites | None:
        return self._recorder.ledger.writers.get(tensor.untyped_storage()._cdata)

    def _is_changed(self, tensor: Tensor) -> bool:
        recorder = self._recorder
        if has_parts(tensor):
            return False
        writer = self._writer(tensor)
        if isinstance(writer, PartialWrites):
            return self._is_part_changed(tensor, writer)
        if writer is None or writer in recorder.late.bits:
            return False
        slot = recorder.layouts.of(tensor)
        left = recorder.layouts.at(recorder.layout_indices[writer])
        if not slot.is_raw or not left.is_raw or slot.num_bytes != left.num_bytes:
            return False
        digest = recorder.digests[writer]
        # a named tensor is digested in row-major order, whatever its strides
        return digest_output(tensor) != digest and (left.is_row_major or digest_tensor(tensor) != digest)

    def _is_part_changed(self, tensor: Tensor, known: PartialWrites) -> bool:
        """Return whether bytes without holes, which one site wrote, are others now; the rest cannot be told."""
        recorder = self._recorder
        storage = tensor.untyped_storage()
        for region, writer in known.untouched(region_of(tensor)) if tensor.is_cpu else ():
            left = recorder.layouts.at(recorder.layout_indices[writer])
            is_same_extent = left.is_raw and left.num_bytes == region.high - region.low
            if is_same_extent and region.high <= storage.nbytes():
                now = digest_memory(storage.data_ptr() + region.low, left.num_bytes)
                if now != recorder.digests[writer]:
                    return True
        return False


def _note_changed(expected: Expectation, known: list[int], positions: range) -> None:
    if known[::2] != known[1::2]:
        expected.unseen_writes.update(positions)
