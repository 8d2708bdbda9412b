"""One file of steps: an Arrow IPC stream with one record batch a step."""

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from det_callbacks.digest import DIGEST_VERSION
from det_callbacks.errors import ReferenceFormatError
from det_callbacks.trace.program import StepRecord, chain_digest
from det_callbacks.trace.run_files import FORMAT_VERSION, damaged

STREAM_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("epoch", pa.int32()),
        ("program_id", pa.uint64()),
        ("layout_id", pa.uint64()),
        ("chain", pa.uint64()),
        ("digests", pa.list_(pa.field("item", pa.uint64(), nullable=False))),
    ]
)

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"

_CONTINUATION = b"\xff\xff\xff\xff"
_HEAD_BYTES = 16
"""How much of a step's message is the same throughout a file: marker, length of the metadata, its first 8 bytes."""
_HEAD_WORDS = 6
"""What lies before the digests in the body of a step, 8 bytes each: five numbers, and the offsets of the list."""
_HEAD_TYPES = (pa.int64(), pa.int32(), pa.uint64(), pa.uint64(), pa.uint64())
_DIGESTS_TYPE = STREAM_SCHEMA.field("digests").type


def encode_header(*, run_id: str, rank: int, attempt: int, segment: int) -> bytes:
    """Return what a file begins with: its columns, the versions and where it belongs."""
    metadata = {
        "format_version": FORMAT_VERSION,
        "digest_version": DIGEST_VERSION,
        "run_id": run_id,
        "rank": rank,
        "attempt": attempt,
        "segment": segment,
    }
    schema = STREAM_SCHEMA.with_metadata({key: str(value) for key, value in metadata.items()})
    return bytes(schema.serialize().to_pybytes())


def encode_step(step: int, epoch: int, program_id: int, layout_id: int, chain: int, digests: np.ndarray) -> bytes:
    """Return the message of one step: 480 bytes and 8 bytes a digest; 2 microseconds.

    Up to the values, all messages with as many digests are the same: Arrow makes the first one.
    """
    return b"".join(
        (
            _head_of_step(len(digests)),
            struct.pack("<5Q2i", step, epoch, program_id, layout_id, chain, 0, len(digests)),
            np.ascontiguousarray(digests, dtype="<u8").tobytes(),
        )
    )


@lru_cache(maxsize=256)
def _head_of_step(num_digests: int) -> bytes:
    """Return what lies before the values in the message of a step: marker and metadata."""
    head = pa.py_buffer(bytes(8 * len(_HEAD_TYPES)))
    columns = [
        pa.Array.from_buffers(kind, 1, [None, head.slice(8 * index, kind.bit_width // 8)])
        for index, kind in enumerate(_HEAD_TYPES)
    ]
    values = pa.Array.from_buffers(pa.uint64(), num_digests, [None, pa.py_buffer(bytes(8 * num_digests))])
    offsets = pa.py_buffer(struct.pack("<2i", 0, num_digests))
    columns.append(pa.Array.from_buffers(_DIGESTS_TYPE, 1, [None, offsets], children=[values]))
    message = bytes(pa.RecordBatch.from_arrays(columns, schema=STREAM_SCHEMA).serialize())
    return message[: len(message) - 8 * (_HEAD_WORDS + num_digests)]


class StreamFile:
    """The steps in one file, by position; headers are kept in memory, digests are read when asked for.

    The file is opened for each read and never mapped: mapped pages count as memory of the process, and a mapped file
    that someone cuts off kills it.

    Args:
        path: of the file.
        run_id: of the run that it must belong to.
        rank: likewise.
        attempt: likewise.
        segment: which fit it must hold.

    Attributes:
        segment: which fit it holds.
        steps: int64, ascending.
        chains: uint64.
        chain_start: the chain before the first step.
        unfinished: None, or why the file does not end as it should.

    Raises:
        ReferenceFormatError: it is missing, empty, of another run or version, or damaged inside.
    """

    def __init__(self, path: Path, *, run_id: str, rank: int, attempt: int, segment: int) -> None:
        self.path = path
        self.attempt = attempt
        self.segment = segment
        self.chain_start = 0
        self.unfinished: str | None = None
        with self._opened() as file:
            self._size = os.fstat(file.fileno()).st_size
            if self._size == 0:
                raise damaged(path, "it is empty")
            wanted = {"run_id": run_id, "rank": str(rank), "attempt": str(attempt), "segment": str(segment)}
            self._check_schema(self._next_message(file, 0), wanted)
            self._read_headers(file)

    def continue_from(self, chain: int) -> None:
        """Say what the chain was before the first step of this file.

        Raises:
            ReferenceFormatError: the first step does not continue that chain.
        """
        self.chain_start = chain
        if len(self.steps):
            self.read(0)

    def read(self, position: int) -> StepRecord:
        """Return the step at a position, checked against the chains.

        Raises:
            ReferenceFormatError: its bytes are not those that were written.
        """
        start, end = int(self._offsets[position]), int(self._offsets[position + 1])
        with self._opened() as file:
            file.seek(start)
            content = file.read(end - start)
        record = self._decode(content, start)
        self._check_chain(record, int(self.chains[position - 1]) if position else self.chain_start)
        if record.step != self.steps[position] or record.chain != self.chains[position]:
            raise damaged(self.path, f"the step at byte {start} is another one than when the run was opened")
        return record

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        try:
            with self.path.open("rb") as file:
                yield file
        except FileNotFoundError as error:
            raise damaged(self.path, "it is missing, although run.json tells of it") from error
        except OSError as error:
            raise damaged(self.path, f"it cannot be read ({error})") from error

    def _check_schema(self, message: bytes | None, wanted: Mapping[str, str]) -> None:
        if not message:
            raise damaged(self.path, "its header is incomplete")
        try:
            schema = pa.ipc.read_schema(pa.ipc.read_message(message))
            metadata = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
        except (pa.ArrowException, OSError, ValueError) as error:
            raise damaged(self.path, f"its header cannot be read ({error})") from error
        versions = (metadata.get("format_version"), metadata.get("digest_version"))
        if versions != (str(FORMAT_VERSION), str(DIGEST_VERSION)):
            raise ReferenceFormatError(
                f"{self.path} has format and digest version {versions}, and this version of det_callbacks reads "
                f"{(FORMAT_VERSION, DIGEST_VERSION)}. Use the version that recorded it, or record the run again.",
                str(self.path),
            )
        found = {key: metadata.get(key) for key in wanted}
        if found != wanted:
            raise damaged(self.path, f"it belongs to another place: {found} instead of {wanted}")
        if not schema.equals(STREAM_SCHEMA):
            raise damaged(self.path, "its columns are others than a run's")

    def _read_headers(self, file: BinaryIO) -> None:
        offsets = [file.tell()]
        steps: list[int] = []
        chains: list[int] = []
        head = b""
        message: bytes | None = None
        while offsets[-1] < self._size and (message := self._next_message(file, offsets[-1])):
            record = self._decode(message, offsets[-1])
            if chains:
                self._check_chain(record, chains[-1])
                if record.step <= steps[-1]:
                    raise damaged(self.path, f"step {record.step} follows step {steps[-1]}")
            head = head or message[:_HEAD_BYTES]
            steps.append(record.step)
            chains.append(record.chain)
            offsets.append(offsets[-1] + len(message))
        self._offsets = np.array(offsets, dtype=np.int64)
        self.steps = np.array(steps, dtype=np.int64)
        self.chains = np.array(chains, dtype=np.uint64)
        if message == b"":
            if file.tell() != self._size:
                raise damaged(self.path, "bytes follow its end-of-stream marker")
            return
        file.seek(offsets[-1])
        self._check_torn_tail(file.read(), head, offsets[-1])
        where = f"{steps[-1]} is the last whole step" if steps else "it holds no whole step"
        torn = "its tail is torn" if offsets[-1] < self._size else "its end-of-stream marker is missing"
        self.unfinished = f"{self.path}: {torn}, the process did not end as it should; {where}."

    def _check_torn_tail(self, tail: bytes, head: bytes, offset: int) -> None:
        # A killed writer leaves the beginning of one message. All messages of a file begin alike, so what begins
        # otherwise, has another message in it, or ends as a whole file does, has a wrong length in the middle.
        is_beginning = END_OF_STREAM.startswith(tail) or not head or tail[:_HEAD_BYTES] == head[: len(tail)]
        if not is_beginning or (head and head in tail[1:]) or tail.endswith(END_OF_STREAM):
            raise damaged(self.path, f"the message at byte {offset} has no sensible length")

    def _decode(self, message: bytes, offset: int) -> StepRecord:
        try:
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(message), STREAM_SCHEMA)
            batch.validate(full=True)
            if batch.num_rows != 1 or any(column.null_count for column in batch.columns):
                raise ValueError("not one row")
            step, epoch, program_id, layout_id, chain = (batch.column(index)[0].as_py() for index in range(5))
            if step < 0 or epoch < 0:
                raise ValueError(f"step {step}, epoch {epoch}")
            digests = batch.column(5).flatten().to_numpy(zero_copy_only=True)
            # a body that is too long would have swallowed what follows it
            (length,) = struct.unpack_from("<i", message, 4)
            if len(message) - 8 - length != 8 * (_HEAD_WORDS + len(digests)):
                raise ValueError("its length is not that of its digests")
        except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError) as error:
            raise damaged(self.path, f"the step at byte {offset} cannot be read ({error})") from error
        return StepRecord(
            step=step,
            epoch=epoch,
            program_id=program_id,
            layout_id=layout_id,
            digests=digests,
            chain=chain,
            segment=self.segment,
        )

    def _check_chain(self, record: StepRecord, previous: int) -> None:
        chain = chain_digest(
            previous,
            step=record.step,
            epoch=record.epoch,
            program_id=record.program_id,
            layout_id=record.layout_id,
            digests=record.digests,
        )
        if chain != record.chain:
            raise damaged(self.path, f"step {record.step} is not what its chain says")

    def _next_message(self, file: BinaryIO, offset: int) -> bytes | None:
        """Return the message that begins here: nothing at the end-of-stream marker, None if it runs past the end.

        The length of a message's body is a field of its metadata, a FlatBuffer (Arrow columnar format, Message.fbs:
        field 3).
        """
        head = file.read(8)
        if head[:4] != _CONTINUATION[: len(head)]:
            raise damaged(self.path, f"there is no message at byte {offset}")
        if len(head) < 8:
            return None
        (length,) = struct.unpack("<i", head[4:])
        if length == 0:
            return b""
        if length < 0 or length % 8:
            raise damaged(self.path, f"the message at byte {offset} has no sensible length")
        if offset + 8 + length > self._size:
            return None
        metadata = file.read(length)
        try:
            (table,) = struct.unpack_from("<I", metadata, 0)
            vtable = table - struct.unpack_from("<i", metadata, table)[0]
            (vtable_size,) = struct.unpack_from("<H", metadata, vtable)
            at = 4 + 2 * 3
            (field,) = struct.unpack_from("<H", metadata, vtable + at) if vtable_size > at else (0,)
            (body,) = struct.unpack_from("<q", metadata, table + field) if field else (0,)
        except struct.error as error:
            raise damaged(self.path, f"the message at byte {offset} cannot be read ({error})") from error
        if body < 0 or body % 8:
            raise damaged(self.path, f"the message at byte {offset} has no sensible length")
        if offset + 8 + length + body > self._size:
            return None
        return head + metadata + file.read(body)
