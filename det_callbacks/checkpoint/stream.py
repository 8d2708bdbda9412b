"""A file that takes the digest of what is written into it."""

from typing import IO, TYPE_CHECKING, Any

from det_callbacks.checkpoint.sidecar import FileDigest
from det_callbacks.digest import DigestStream

if TYPE_CHECKING:
    from typing_extensions import Buffer  # collections.abc has it from Python 3.12 on

_PIECE_BYTES = 4 * 1024 * 1024


class DigestingWriter:
    """What ``torch.save`` writes into: passes every byte on and takes the digest of it, so the file is not read again.

    Args:
        file: binary, where the bytes go.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._stream = DigestStream()

    def write(self, buffer: "Buffer") -> int:
        """Write all of the buffer."""
        view = memoryview(buffer).cast("B")
        self._stream.update(view)
        self._file.write(view)
        return len(view)

    def flush(self) -> None:
        """Hand what is buffered to the operating system."""
        self._file.flush()

    def digest(self) -> FileDigest:
        """Return size and digest of what was written so far."""
        return FileDigest(size=self._stream.num_bytes, digest=self._stream.value())


def digest_file(file: IO[Any]) -> FileDigest:
    """Return size and digest of the rest of an open binary file, read in pieces of 4 MiB."""
    stream = DigestStream()
    while piece := file.read(_PIECE_BYTES):
        stream.update(piece)
    return FileDigest(size=stream.num_bytes, digest=stream.value())
