"""Tensors of devices that compute digests, saved and put back in the order of the device's work.

Nothing here waits for the device: bits are copied to the host, and from there, with pinned memory between, and what
they were is known once the step is settled. Tensors of the host, and of devices whose digests are taken on the host,
are dealt with at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # torch 2.13

from det_callbacks.digest import digest_tensor
from det_callbacks.errors import TraceError
from det_callbacks.replay.counts import ReplayCounts
from det_callbacks.replay.parts import (
    SavedTensor,
    copy_bits,
    gather,
    new_tensor,
    put_back,
    require_fit,
    write_parts,
)
from det_callbacks.trace.components import unwrapped
from det_callbacks.trace.late_sites import LateSites


class LateCopy:
    """A copy under way: its size is known, its bits and digest are when the step is settled.

    Attributes:
        num_bytes: of all parts.
    """

    __slots__ = ("_is_settled", "_saved", "num_bytes")

    def __init__(self, saved: SavedTensor) -> None:
        self.num_bytes = saved.num_bytes
        self._saved = saved
        self._is_settled = False

    def settle(self, digests: Sequence[int]) -> None:
        """Take the digest."""
        self._saved = replace(self._saved, digest=digests[0])
        self._is_settled = True

    def saved(self) -> SavedTensor:
        """Return the copy; raise ``TraceError`` as long as its step is not settled."""
        if not self._is_settled:
            raise TraceError(
                f"A copy of {self.num_bytes} bytes of a device's tensor was asked for before its step came to its end, "
                "so its bits may not have arrived. Nothing of it was written. End the step first."
            )
        return self._saved


Copy = SavedTensor | LateCopy


def settled(copy: Copy) -> SavedTensor:
    """Return the bits of a copy whose step is settled."""
    return copy.saved() if isinstance(copy, LateCopy) else copy


def copy_in_order(tensor: Tensor, late: LateSites | None) -> Copy:
    """Return what ``copy_bits`` does, late where a device computes digests.

    Args:
        tensor: any with data.
        late: of the step; None copies at once.

    Raises:
        TypeError: as ``copy_bits`` does.
        ReplayError: likewise.
    """
    tensor = unwrapped(tensor) if isinstance(tensor, Tensor) else tensor
    if late is None or not isinstance(tensor, Tensor) or not late.is_late(tensor):
        return copy_bits(tensor)
    digest = late.tensor_bits(tensor)
    copy = LateCopy(gather(tensor, digest=0, fetch=late.fetch))
    late.ask((digest,), copy.settle)
    return copy


def replay(saved: SavedTensor, live: Tensor, *, late: LateSites | None, counts: ReplayCounts, op: str) -> None:
    """Put saved bits into a live tensor, see ``put_back``, and count it.

    On a device that computes digests they are written in any case, and whether others were there is counted when the
    step is settled.

    Args:
        saved: the bits.
        live: of the same dtype, shape and layout.
        late: of the step; None does it at once.
        counts: where it is counted.
        op: what it is counted as.

    Raises:
        ReplayError: as ``put_back`` does.
    """
    live = unwrapped(live)
    note = _counting(saved, counts, op)
    if late is None or not late.is_late(live):
        note(put_back(saved, live))
        return
    require_fit(saved, live)
    digest = late.tensor_bits(live)
    write_parts(saved, live, late)
    late.ask((digest,), lambda digests: note(digests[0] != saved.digest))


def replay_apart(
    saved: SavedTensor, live: Tensor, *, late: LateSites | None, counts: ReplayCounts, op: str, has_history: bool
) -> Tensor | None:
    """Return a tensor with saved bits in the place of a live one, which stays as it is, and count it.

    Args:
        saved: the bits.
        live: of the same dtype, shape and layout.
        late: as for ``replay``.
        counts: likewise.
        op: likewise.
        has_history: the new tensor is to have the live one's history.

    Returns:
        None where the live tensor is known to have these bits.

    Raises:
        ReplayError: as ``put_back`` does.
    """
    note = _counting(saved, counts, op)
    if late is not None and late.is_late(unwrapped(live)):
        require_fit(saved, live)
        digest = late.tensor_bits(unwrapped(live))
        late.ask((digest,), lambda digests: note(digests[0] != saved.digest))
    else:
        late = None
        differs = digest_tensor(live) != saved.digest
        note(differs)
        if not differs:
            return None
    if not has_history:
        return new_tensor(saved, live, late)
    with _disable_current_modes():  # the reference has no such op
        copy = live.clone()
    write_parts(saved, unwrapped(copy), late)
    return copy


def _counting(saved: SavedTensor, counts: ReplayCounts, op: str) -> Callable[[bool], None]:
    return lambda differs: counts.add(op, differs=differs, num_bytes=saved.num_bytes)
