"""Bytes that come piece by piece -> 64 bits, without keeping them."""

from typing import TYPE_CHECKING

from xxhash import xxh3_64, xxh3_64_intdigest

from det_callbacks.host_digest import BLOCK_BYTES, LEAF_BYTES, _join_leaves

if TYPE_CHECKING:
    from typing_extensions import Buffer  # collections.abc has it from Python 3.12 on


class DigestStream:
    """The digest of ``digest_bytes``, of bytes that are handed over one buffer after the other.

    Runs at memory speed in the calling thread; keeps 8 bytes for every 256 KiB it has seen.

    Attributes:
        num_bytes: how many bytes it has seen.

    Example:
        >>> from det_callbacks.digest import digest_bytes
        >>> stream = DigestStream()
        >>> stream.update(b"det_")
        >>> stream.update(b"callbacks")
        >>> stream.value() == digest_bytes(b"det_callbacks")
        True
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._leaf = xxh3_64()
        self._in_leaf = 0
        self._hashes: list[int] = []

    def update(self, buffer: "Buffer") -> None:
        """Take the next bytes.

        Raises:
            TypeError: if it is no buffer, or not a C-contiguous one.
        """
        view = memoryview(buffer).cast("B")
        self.num_bytes += len(view)
        start = 0
        while start < len(view):
            end = min(len(view), start + LEAF_BYTES - self._in_leaf)
            if end - start == LEAF_BYTES:
                self._hashes.append(xxh3_64_intdigest(view[start:end]))
            else:
                self._leaf.update(view[start:end])
                self._in_leaf += end - start
                if self._in_leaf == LEAF_BYTES:
                    self._hashes.append(self._leaf.intdigest())
                    self._leaf = xxh3_64()
                    self._in_leaf = 0
            start = end

    def value(self) -> int:
        """Return the digest of the bytes so far; more may follow."""
        hashes = self._hashes
        if self._in_leaf or not hashes:
            last = self._leaf.copy()
            last.update(bytes(-self._in_leaf % BLOCK_BYTES))
            hashes = [*hashes, last.intdigest()]
        return _join_leaves(hashes)
