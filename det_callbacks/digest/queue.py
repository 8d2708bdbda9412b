"""Digests that are asked for one by one and computed together, known only at the end."""

from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from det_callbacks.errors import DetCallbacksError

MAX_TENSORS = 1024
MAX_BYTES = 64 * 1024 * 1024
"""Memory that tensors waiting for their digest may hold: what the program would have freed by then."""

_Launched = TypeVar("_Launched")


class DeviceDigest(Protocol[_Launched]):
    """How the digests of tensors on one device are computed.

    Attributes:
        name: for people.
    """

    name: str

    def stream(self) -> Hashable:
        """Return what the device's work is ordered by now; equal for one order."""

    def launch(self, flats: Sequence[torch.Tensor], stream: Hashable) -> _Launched:
        """Enqueue the digests of contiguous tensors of one dimension, behind what that stream has been given."""

    def collect(self, launched: Sequence[_Launched]) -> list[int]:
        """Return the digests of all launches, one after the other; the one place that waits for the device."""


class DigestQueue(Generic[_Launched]):
    """Tensors of one device in the order of their digests, launched together and fetched together.

    A tensor that waits is held, so the program may drop it. Its memory must not change until it is launched: say
    ``before_write`` of whatever is about to be written, resized or freed. Launches happen then, when the budget is
    full, when the stream is another one, and at ``finish``, which alone waits for the device.

    After a launch failed its tensors' digests are lost, and the queue refuses to go on until ``discard``.

    Args:
        method: of the device.
        max_tensors: that wait at most.
        max_bytes: that they hold at most; one that is larger by itself is launched at once.

    Example:
        >>> import torch
        >>> from det_callbacks.digest import digest_tensor
        >>> from det_callbacks.digest.device import IntegerDigest
        >>> queue = DigestQueue(IntegerDigest())
        >>> value = torch.arange(4.0)
        >>> queue.add(value)
        0
        >>> queue.before_write(value[:2])
        >>> value.zero_().sum().item()
        0.0
        >>> queue.finish() == [digest_tensor(torch.arange(4.0))]
        True
    """

    def __init__(
        self, method: DeviceDigest[_Launched], *, max_tensors: int = MAX_TENSORS, max_bytes: int = MAX_BYTES
    ) -> None:
        if max_tensors < 1 or max_bytes < 0:
            raise ValueError(
                f"a queue holds at least one tensor and no negative number of bytes; got max_tensors={max_tensors}, "
                f"max_bytes={max_bytes}"
            )
        self._method = method
        self._max_tensors = max_tensors
        self._max_bytes = max_bytes
        self._pending: list[torch.Tensor] = []
        self._places: set[int] = set()
        self._num_bytes = 0
        self._stream: Hashable = None
        self._launched: list[_Launched] = []
        self._num_added = 0
        self._is_broken = False

    @property
    def num_pending(self) -> int:
        """How many tensors wait for their launch."""
        return len(self._pending)

    @property
    def num_bytes_pending(self) -> int:
        """How many bytes they hold."""
        return self._num_bytes

    def add(self, flat: torch.Tensor) -> int:
        """Take a tensor; return the place of its digest in what ``finish`` returns.

        Args:
            flat: contiguous, of one dimension, on the queue's device, ready on its current stream.

        Raises:
            ValueError: if it is not contiguous or of another number of dimensions.
            DetCallbacksError: if a launch failed before.
        """
        self._require_whole()
        if flat.dim() != 1 or not flat.is_contiguous():
            raise ValueError(f"a contiguous tensor of one dimension is queued; got shape {tuple(flat.shape)}")
        stream = self._method.stream()
        nbytes = flat.nbytes
        if self._pending and (
            stream != self._stream
            or len(self._pending) == self._max_tensors
            or self._num_bytes + nbytes > self._max_bytes
        ):
            self.flush()
        self._stream = stream
        self._pending.append(flat)
        self._places.add(flat.untyped_storage().data_ptr())
        self._num_bytes += nbytes
        self._num_added += 1
        if self._num_bytes > self._max_bytes:
            self.flush()
        return self._num_added - 1

    def before_write(self, tensor: torch.Tensor) -> None:
        """Launch what waits, if any of it shares memory with a tensor that is about to change or to lose its memory."""
        if self._pending and tensor.untyped_storage().data_ptr() in self._places:
            self.flush()

    def flush(self) -> None:
        """Launch what waits, on the stream it was made on.

        Raises:
            DetCallbacksError: if a launch failed before, or the memory of a tensor that waits was freed.
        """
        self._require_whole()
        if not self._pending:
            return
        pending, stream = self._pending, self._stream
        self._forget_pending()
        self._is_broken = True
        for flat in pending:
            if flat.untyped_storage().nbytes() < flat.storage_offset() * flat.element_size() + flat.nbytes:
                raise DetCallbacksError(
                    f"the memory of a tensor of {flat.nbytes} bytes was freed before its digest was taken; the tensors "
                    "before it are intact; say before_write of a storage that is about to be freed or resized"
                )
        self._launched.append(self._method.launch(pending, stream))
        self._is_broken = False

    def finish(self) -> list[int]:
        """Return the digests of all tensors in the order in which they came, and begin anew.

        Raises:
            DetCallbacksError: as ``flush`` does; also if the device gave another number of digests.
        """
        self.flush()
        digests = self._method.collect(self._launched) if self._launched else []
        if len(digests) != self._num_added:
            self._is_broken = True
            raise DetCallbacksError(
                f"{self._num_added} tensors were queued and {self._method.name} gave {len(digests)} digests, so none "
                "can be told from another; the tensors are intact; report this with the device and the versions in use"
            )
        self.discard()
        return digests

    def discard(self) -> None:
        """Begin anew without the digests, after an exception of the program or of a launch."""
        self._forget_pending()
        self._launched = []
        self._num_added = 0
        self._is_broken = False

    def _forget_pending(self) -> None:
        self._pending = []
        self._places = set()
        self._num_bytes = 0
        self._stream = None

    def _require_whole(self) -> None:
        if self._is_broken:
            raise DetCallbacksError(
                "digests of this queue were lost when an earlier launch failed; the tensors are intact; discard the "
                "queue's content and take the digests again"
            )
