"""Which sites wrote the bytes of a storage in this step: the edges of a program.

A storage is identified by its address. ``StorageWriters``, the ledger of a step, pins every storage
with a weak reference until the step ends: torch frees its memory as usual, but does not reuse the
address.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from torch import Tensor

from det_callbacks.internals.torch import pin_storage, storage_address, unpin_storage

MAX_MASK_BYTES = 1 << 24  # largest region to check byte by byte

UNKNOWN = -1
"""Position of a writer that was not recorded.

Lower values: -2 - n is the n-th delivery of a collective.
"""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The bytes of a storage from the first to the last byte of a strided tensor."""

    low: int
    high: int
    # strides and lengths of a tensor that skips some of these bytes
    holes: tuple[tuple[int, ...], ...] = ()

    def view_of(self, mask: np.ndarray, low: int) -> np.ndarray:
        """Return the part of ``mask`` for the bytes of this region, as a view.

        ``mask`` has a bool for each byte of a storage from ``low`` on.
        """
        if not self.holes:
            return mask[self.low - low : self.high - low]
        itemsize = (self.high - self.low) // (
            1 + sum((length - 1) * step for step, length in self.holes)
        )
        shape = (*(length for _, length in self.holes), itemsize)
        strides = (*(step * itemsize for step, _ in self.holes), 1)
        return np.lib.stride_tricks.as_strided(mask[self.low - low :], shape, strides)

    def overlaps(self, other: "ByteRange") -> bool:
        """Return whether two regions share a byte; also True for some that interleave."""
        return self.low < other.high and other.low < self.high

    def contains(self, other: "ByteRange") -> bool:
        """Return whether this region has every byte of ``other``;
        also False for some regions with holes.
        """
        return self == other if self.holes else self.low <= other.low and other.high <= self.high

    def without(self, other: "ByteRange") -> list["ByteRange"]:
        """Return this region minus ``other``; all of it if either has holes and
        ``other`` does not contain it.
        """
        if other.contains(self):
            return []
        if self.holes or other.holes or not self.overlaps(other):
            return [self]
        ends = [(self.low, min(self.high, other.low)), (max(self.low, other.high), self.high)]
        return [ByteRange(low, high) for low, high in ends if low < high]


@dataclass(slots=True)
class PartialWrites:
    """Writers of parts of a storage in the order of writing: the position of a site,
    ``UNKNOWN`` or less.
    """

    # allocated in this step: unwritten bytes are not worth recording
    is_uninitialised: bool = False
    is_empty: bool = False  # its op wrote nothing (``torch.empty``); otherwise it is a workspace
    writes: list[tuple[ByteRange, int]] = field(default_factory=list)

    def add(self, region: ByteRange, position: int) -> None:
        """Add a write; drop earlier writes inside its region,
        and cut it out of hole-free ones that overlap it.
        """
        self.writes = [
            (rest, writer) for written, writer in self.writes for rest in written.without(region)
        ]
        self.writes.append((region, position))

    def writers(self, region: ByteRange) -> list[int]:
        """Return the sites whose writes are still in a region, ascending, each once."""
        writers = set()
        for written, writer in reversed(self.writes):
            if written.overlaps(region):
                writers.add(writer)
                if written.contains(region):
                    break
        return sorted(writer for writer in writers if writer >= 0)

    def deliveries(self, region: ByteRange) -> list[int]:
        """Return the numbers of the collectives' deliveries that are still
        in a region, ascending.
        """
        return sorted(
            {
                UNKNOWN - 1 - writer
                for written, writer in self.writes
                if writer < UNKNOWN and written.overlaps(region)
            }
        )

    def covers(self, region: ByteRange) -> bool:
        """Return whether recorded sites wrote every byte of a region that is worth recording."""
        for written, writer in reversed(self.writes):
            if written.contains(region):
                return writer >= 0
            if writer < 0 and written.overlaps(region):
                return False
        # writes without holes never overlap each other
        shared_bytes = (
            min(written.high, region.high) - max(written.low, region.low)
            for written, _ in self.writes
            if not written.holes
        )
        return (
            self.is_uninitialised
            or sum(max(num_bytes, 0) for num_bytes in shared_bytes) == region.high - region.low
        )

    def is_filled(self, region: ByteRange) -> bool:
        """Return whether every byte of a region was written;
        may be False for a region beyond ``MAX_MASK_BYTES``.
        """
        written = [each for each, _ in self.writes]
        low = min(each.low for each in (region, *written))
        high = max(each.high for each in (region, *written))
        if high - low > MAX_MASK_BYTES:
            return any(each.contains(region) for each in written)
        mask = np.zeros(high - low, dtype=bool)
        for each in written:
            each.view_of(mask, low)[...] = True
        return bool(region.view_of(mask, low).all())

    def untouched(self, region: ByteRange) -> list[tuple[ByteRange, int]]:
        """Return the writes into a region that have no holes and that no later write overlaps."""
        return [
            (written, writer)
            for index, (written, writer) in enumerate(self.writes)
            if writer >= 0
            and not written.holes
            and written.overlaps(region)
            and not any(later.overlaps(written) for later, _ in self.writes[index + 1 :])
        ]


class StorageWriters:
    """Maps a storage's address to the site that wrote all of it (the common case),
    or to ``PartialWrites``.

    An address is absent if no recorded site of this step wrote it. ``writers`` and ``pins`` (the
    addresses pinned) are public because the recorder uses them once per tensor.
    """

    def __init__(self) -> None:
        self.writers: dict[int, int | PartialWrites] = {}
        self.pins: list[int] = []
        self.is_invalidated = False  # whether ``invalidate`` was called in this step
        self.in_flight: set[int] = set()  # host memory that a device may still be copying into

    def pin(self, tensor: Tensor) -> int:
        """Pin a tensor's storage until the step ends, so that torch does not reuse its
        address; return the address.
        """
        address = pin_storage(tensor.untyped_storage())
        self.pins.append(address)
        return address

    def write(self, tensor: Tensor, position: int) -> None:
        """Set the writer of a tensor, which may be any view: a site, ``UNKNOWN``, or a delivery."""
        storage = tensor.untyped_storage()
        address = storage_address(storage)
        if address not in self.writers:
            self.pin(tensor)
        self._write(address, storage.nbytes(), region_of(tensor), position)

    def write_part(
        self,
        address: int,
        num_bytes: int,
        offset: int,
        itemsize: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        position: int,
    ) -> None:
        """Set the writer of a tensor of a pinned storage, for the native recorder."""
        self._write(address, num_bytes, _region(offset, itemsize, shape, stride), position)

    def _write(self, address: int, num_bytes: int, region: ByteRange, position: int) -> None:
        if position >= 0 and not region.holes and region.low == 0 and region.high >= num_bytes:
            self.writers[address] = position
        elif region.high > region.low:
            partial = self.writers.get(address)
            if not isinstance(partial, PartialWrites):
                earlier = [] if partial is None else [(ByteRange(0, num_bytes), partial)]
                partial = self.writers[address] = PartialWrites(writes=earlier)
            partial.add(region, position)

    def mark_uninitialised(self, tensor: Tensor, *, is_empty: bool = False) -> None:
        """Record that a tensor is uninitialised, or is a workspace,
        whose contents do not matter.
        """
        self.writers[self.pin(tensor)] = PartialWrites(is_uninitialised=True, is_empty=is_empty)

    def forget(self, tensor: Tensor) -> None:
        """Record an unseen write to a tensor: the next recorded read of the
        tensor becomes an input site.
        """
        if storage_address(tensor.untyped_storage()) in self.writers:
            self.write(tensor, UNKNOWN)

    def mark_in_flight(self, tensor: Tensor) -> None:
        """Record that a device copies into a host tensor; do not read the
        tensor before the step's end.
        """
        self.in_flight.add(self.pin(tensor))
        self.write(tensor, UNKNOWN)

    def invalidate(self) -> None:
        """Record a possible unseen write to any memory: the next recorded read of
        each tensor becomes a site.
        """
        self.is_invalidated = True
        for address, writer in list(self.writers.items()):
            # a collective that is still pending writes later than this
            pending = (
                []
                if isinstance(writer, int)
                else [write for write in writer.writes if write[1] < UNKNOWN]
            )
            del self.writers[address]
            if pending:
                self.writers[address] = PartialWrites(writes=pending)

    def deliver(self, tensor: Tensor, number: int) -> None:
        """Record that a collective writes a tensor, now or later;
        the first read of the tensor adds a row.
        """
        self.write(tensor, UNKNOWN - 1 - number)

    def writers_of(self, tensor: Tensor) -> list[int]:
        """Return the recorded sites that wrote a tensor with a storage, ascending."""
        writer = self.writers.get(storage_address(tensor.untyped_storage()))
        if isinstance(writer, PartialWrites):
            return writer.writers(region_of(tensor))
        return [] if writer is None else [writer]

    def drop_from(self, position: int) -> None:
        """Forget the writes of the sites from a position on."""
        for address, writer in list(self.writers.items()):
            if isinstance(writer, PartialWrites):
                writer.writes = [write for write in writer.writes if write[1] < position]
            elif writer >= position:
                del self.writers[address]

    def close(self) -> None:
        self.is_invalidated = False
        self.in_flight.clear()
        self.writers.clear()
        # unpins each once, even if Ctrl-C ends this call and another follows
        pins, self.pins = self.pins, []
        for address in pins:
            unpin_storage(address)


def region_of(tensor: Tensor) -> ByteRange:
    if tensor.is_nested:
        return ByteRange(0, tensor.untyped_storage().nbytes())
    return _region(int(tensor.storage_offset()), tensor.itemsize, tensor.shape, tensor.stride())


def _region(
    offset: int, itemsize: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> ByteRange:
    extent, holes = _extent(shape, stride)
    return ByteRange(offset * itemsize, (offset + extent) * itemsize, holes)


@lru_cache(maxsize=4096)
def _extent(
    shape: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Return the number of elements from the first to the last in memory,
    and ``ByteRange.holes``.
    """
    if 0 in shape:
        return 0, ()
    dimensions = sorted(
        (step, length) for step, length in zip(stride, shape, strict=True) if length > 1 and step
    )
    run = 1
    for step, length in dimensions:
        if step > run:
            return 1 + sum((length - 1) * step for step, length in dimensions), tuple(dimensions)
        run += (length - 1) * step
    return run, ()
