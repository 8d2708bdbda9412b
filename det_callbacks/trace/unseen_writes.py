"""Finds writes that the trace did not see (a raw kernel, NumPy,
another thread) where an output differs.

If an output of a verify run differs, the check digests the op's inputs again and compares them with
the digests of the sites that wrote them; if one changed, ``is_origin`` is null. Inputs of a site
with a deferred digest are checked at the step's end if their memory still exists.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from torch import Tensor

from det_callbacks.digest.components import digest_output, digest_tensor
from det_callbacks.digest.deferred import Bits, DeferredDigests, value_of
from det_callbacks.digest.host import digest_memory
from det_callbacks.internals.torch import storage_address, storage_at
from det_callbacks.runs.program import Program
from det_callbacks.runs.steps import Expectation
from det_callbacks.trace.components import has_parts
from det_callbacks.trace.overloads import OpPlan, tensors_in
from det_callbacks.trace.step import Step
from det_callbacks.trace.storages import ByteRange, region_of


class UnseenWriteCheck:
    """Checks the inputs of ops whose outputs differ from the reference."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._update = 0
        # storage address -> number of sites when the check found it changed
        self._changed_at: dict[int, int] = {}

    def begin_update(self) -> None:
        """Record that an optimizer's update begins: no user code runs until it ends."""
        self._update = self._step.num_sites

    def begin(self) -> None:
        self._changed_at.clear()

    def check_before_write(
        self,
        plan: OpPlan,
        written: list[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mark: int,
        phase: str,
    ) -> bool:
        """Return whether an unseen write changed an argument that an op is about to write.

        After the op these bits are gone. The check skips memory that the call has just read, that
        the optimizer's update under way has read or written,
        and that the op overwrites completely without reading it.
        """
        looked_at = _ordinary(written)
        if plan.is_overwrite:
            given = Counter(map(_address, _ordinary(tensors_in((*args, *kwargs.values())))))
            # torch.mul(a, 2, out=a) reads what it overwrites
            looked_at = [one for one in looked_at if given[_address(one)] > 1 or _is_part(one)]
        trusted = self._update if phase == "optimizer" else mark
        changed = [one for one in looked_at if self._is_changed(one, trusted)]
        # the op may not overwrite all of it: later reads find the changed rest
        self._changed_at.update((_address(one), mark) for one in changed)
        return bool(changed)

    def check_after_call(
        self,
        expected: Expectation,
        mark: int,
        first: int,
        tensors: Callable[[], list[Tensor]],
        reads: list[int],
        *,
        was_changed: bool,
    ) -> None:
        """Add to ``expected.unseen_writes`` the differing sites of a call whose
        inputs an unseen write changed.

        ``tensors`` returns what the call reads and does not write. Sites with deferred digests are
        added whether they differ or not; see also ``check_deferred``. A call that reads a
        difference is not an origin, so it is not checked.
        """
        digests, deferred = self._step.digests, self._step.deferred.bits
        positions = range(first, len(digests))
        waiting = [at for at in positions if at in deferred]
        differing = [
            digests[at]
            for at in positions
            if at not in deferred and expected.differs(at, digests[at])
        ]
        if differing and any(expected.is_new(digests[at]) for at in reads if at not in deferred):
            return
        if differing and expected.spend_check(differing):
            expected.looked_at.update(positions)
            if was_changed or any(map(self._is_changed, _ordinary(tensors()))):
                expected.unseen_writes.update(positions)
        elif waiting:
            read = _ordinary(tensors())
            if any(self._is_changed(tensor, mark) for tensor in read if tensor.is_cpu):
                expected.unseen_writes.update(waiting)

    def check_deferred(
        self, expected: Expectation, program: Program, deferred: frozenset[int]
    ) -> None:
        """Compare the sites with deferred digests, at the end of a step.

        Checks the memory that they read if it still exists and no recorded
        site has written it since.
        """
        rows, digests = program.rows, self._step.digests
        outputs = (at for at in sorted(deferred) if rows[at].site.role == "output")
        differing = [at for at in outputs if expected.differs(at, digests[at])]
        if not differing:
            return
        is_new = np.fromiter(map(expected.is_new, digests), dtype=bool, count=len(digests))
        readers, read_sites = program.edges
        fed = frozenset(readers[is_new[read_sites]].tolist())
        checked = [at for at in differing if at not in fed and expected.spend_check([digests[at]])]
        expected.looked_at.update(checked)
        step, read = self._step, {at: program.read_by(at) for at in checked}
        wanted = {writer for writers in read.values() for writer in writers}
        queues = DeferredDigests()
        found: list[tuple[int, Bits]] = []
        for address, writer in step.ledger.writers.items() if wanted else ():
            if not isinstance(writer, int) or writer not in wanted:
                continue
            left = step.layout_of(writer)
            # the ledger's reference is weak: None if the storage is gone
            storage = storage_at(address)
            if storage is not None and left.is_raw and storage.nbytes() == left.num_bytes:
                bits = queues.add(storage, 0, left.num_bytes)
                if bits is not None:
                    found.append((writer, bits))
        known = queues.finish()
        changed = {writer for writer, bits in found if value_of(bits, known) != digests[writer]}
        expected.unseen_writes.update(
            at for at, writers in read.items() if not changed.isdisjoint(writers)
        )

    def _is_changed(self, tensor: Tensor, trusted: int | None = None) -> bool:
        """Return whether bytes that a site before ``trusted`` wrote have changed;
        False for tensors with holes.
        """
        step, storage = self._step, tensor.untyped_storage()
        writer = step.ledger.writers.get(storage_address(storage))
        if trusted is not None and isinstance(writer, int) and writer >= trusted:
            return False
        if (found := self._changed_at.get(storage_address(storage))) is not None:
            return not isinstance(writer, int) or writer < found
        if writer is None or not (address := storage.data_ptr()):
            return False
        end = storage.nbytes()
        left_alone = (
            [(ByteRange(0, end), writer)]
            if isinstance(writer, int)
            else writer.untouched(region_of(tensor))
        )
        for region, at in left_alone:
            left, digest = step.layout_of(at), step.digests[at]
            is_known = (
                left.is_raw and left.num_bytes == region.high - region.low and region.high <= end
            )
            is_whole = step.layouts.of(tensor).is_raw and tensor.nbytes == left.num_bytes
            if not is_known or at in step.deferred.bits or not (tensor.is_cpu or is_whole):
                continue
            now = (
                digest_memory(address + region.low, left.num_bytes)
                if tensor.is_cpu
                else digest_output(tensor)
            )
            # named tensors are digested in row-major order, whatever their strides
            if now != digest and (
                left.is_row_major or (is_whole and digest_tensor(tensor) != digest)
            ):
                return True
        return False


def _ordinary(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors without parts, which have a storage."""
    return [tensor for tensor in tensors if not has_parts(tensor)]


def _address(tensor: Tensor) -> int:
    return storage_address(tensor.untyped_storage())


def _is_part(tensor: Tensor) -> bool:
    """Return whether a tensor covers only part of its storage."""
    num_bytes = 0 if tensor.is_nested else tensor.untyped_storage().nbytes()
    return num_bytes > tensor.numel() * tensor.itemsize > 0 and bool(
        tensor.untyped_storage().data_ptr()
    )
