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
        self._update_start = 0  # number of sites when the last update began
        # storage address -> number of sites when the check found it changed
        self._changed_at: dict[int, int] = {}

    def begin_update(self) -> None:
        """Record that an optimizer's update begins: no user code runs until it ends."""
        self._update_start = self._step.num_sites

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
        checked = _ordinary(written)
        if plan.is_overwrite:
            times_passed = Counter(map(_address, _ordinary(tensors_in((*args, *kwargs.values())))))
            # torch.mul(a, 2, out=a) reads what it overwrites
            checked = [
                tensor
                for tensor in checked
                if times_passed[_address(tensor)] > 1 or _is_part(tensor)
            ]
        trusted_from = self._update_start if phase == "optimizer" else mark
        changed = [tensor for tensor in checked if self._is_changed(tensor, trusted_from)]
        # the op may not overwrite all of it: later reads find the changed rest
        self._changed_at.update((_address(tensor), mark) for tensor in changed)
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
        outputs = range(first, len(digests))
        waiting = [site for site in outputs if site in deferred]
        differing = [
            digests[site]
            for site in outputs
            if site not in deferred and expected.differs(site, digests[site])
        ]
        if differing and any(
            expected.is_new(digests[site]) for site in reads if site not in deferred
        ):
            return
        if differing and expected.spend_check(differing):
            expected.checked_sites.update(outputs)
            if was_changed or any(map(self._is_changed, _ordinary(tensors()))):
                expected.unseen_writes.update(outputs)
        elif waiting:
            on_host = [tensor for tensor in _ordinary(tensors()) if tensor.is_cpu]
            if any(self._is_changed(tensor, mark) for tensor in on_host):
                expected.unseen_writes.update(waiting)

    def check_deferred(
        self, expected: Expectation, program: Program, deferred: frozenset[int]
    ) -> None:
        """Compare the sites with deferred digests, at the end of a step.

        Checks the memory that they read if it still exists and no recorded
        site has written it since.
        """
        rows, digests = program.rows, self._step.digests
        outputs = (site for site in sorted(deferred) if rows[site].site.role == "output")
        differing = [site for site in outputs if expected.differs(site, digests[site])]
        if not differing:
            return
        is_new = np.fromiter(map(expected.is_new, digests), dtype=bool, count=len(digests))
        readers, sites_read = program.edges
        reads_difference = frozenset(readers[is_new[sites_read]].tolist())
        checked = [
            site
            for site in differing
            if site not in reads_difference and expected.spend_check([digests[site]])
        ]
        expected.checked_sites.update(checked)
        writers = {site: program.read_by(site) for site in checked}
        changed = self._changed_since_written({at for read in writers.values() for at in read})
        expected.unseen_writes.update(
            site for site, read in writers.items() if not changed.isdisjoint(read)
        )

    def _changed_since_written(self, sites: set[int]) -> set[int]:
        """Return those sites that wrote a whole storage, which still exists, and whose bits have
        changed since.
        """
        step, queues = self._step, DeferredDigests()
        bits_now: list[tuple[int, Bits]] = []
        for address, writer in step.ledger.writers.items() if sites else ():
            if not isinstance(writer, int) or writer not in sites:
                continue
            slot = step.layout_of(writer)
            # the ledger's reference is weak: None if the storage is gone
            storage = storage_at(address)
            if storage is not None and slot.is_raw and storage.nbytes() == slot.num_bytes:
                bits = queues.add(storage, 0, slot.num_bytes)
                if bits is not None:
                    bits_now.append((writer, bits))
        known = queues.finish()
        return {site for site, bits in bits_now if value_of(bits, known) != step.digests[site]}

    def _is_changed(self, tensor: Tensor, trusted_from: int | None = None) -> bool:
        """Return whether bytes that a site before ``trusted_from`` wrote have changed;
        False for tensors with holes.
        """
        step, storage = self._step, tensor.untyped_storage()
        writer = step.ledger.writers.get(storage_address(storage))
        if trusted_from is not None and isinstance(writer, int) and writer >= trusted_from:
            return False
        if (changed_at := self._changed_at.get(storage_address(storage))) is not None:
            return not isinstance(writer, int) or writer < changed_at
        if writer is None or not (address := storage.data_ptr()):
            return False
        end = storage.nbytes()
        writes = (
            [(ByteRange(0, end), writer)]
            if isinstance(writer, int)
            else writer.untouched(region_of(tensor))
        )
        for region, site in writes:
            slot, digest = step.layout_of(site), step.digests[site]
            is_known = (
                slot.is_raw and slot.num_bytes == region.high - region.low and region.high <= end
            )
            is_whole = step.layouts.of(tensor).is_raw and tensor.nbytes == slot.num_bytes
            if not is_known or site in step.deferred.bits or not (tensor.is_cpu or is_whole):
                continue
            digest_now = (
                digest_memory(address + region.low, slot.num_bytes)
                if tensor.is_cpu
                else digest_output(tensor)
            )
            # named tensors are digested in row-major order, whatever their strides
            if digest_now != digest and (
                slot.is_row_major or (is_whole and digest_tensor(tensor) != digest)
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
