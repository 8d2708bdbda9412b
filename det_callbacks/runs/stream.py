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

from det_callbacks.errors import ReferenceFormatError
from det_callbacks.host_digest import DIGEST_VERSION
from det_callbacks.runs.files import FORMAT_VERSION, damaged
from det_callbacks.runs.program import StepRecord, chain_digest

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
_VALUES = struct.Struct("<qi4xQQQ2i")
"""The same six words as the columns hold them."""
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


_NUM_HEAD_BYTES = len(_head_of_step(0))
_CHAIN = 3
"""Where the chain stands among what is kept of a step: step, program, layout, chain, number of digests."""


class StreamFile:
    """The steps in one file, by position; what stands before their digests is kept in memory, some 60 bytes a step.

    Opening it reads what stands before the digests of each step, and the first step of each length whole: 5
    microseconds a step. Digests are read, and checked against the chains, when asked for: by ``read``, and for all
    steps by ``check_steps``. The file is opened for each read and never mapped: mapped pages count as memory of the
    process, and a mapped file that someone cuts off kills it.

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
        program_ids: uint64.
        layout_ids: uint64.
        num_digests: int64, of each step.
        chain_start: the chain before the first step.
        num_bytes: size of the file when it was opened.
        unfinished: None, or why the file does not end as it should.

    Raises:
        ReferenceFormatError: it is missing, empty, of another run or version, or damaged outside the digests.
    """

    def __init__(self, path: Path, *, run_id: str, rank: int, attempt: int, segment: int) -> None:
        self.path = path
        self.attempt = attempt
        self.segment = segment
        self.chain_start = 0
        self.unfinished: str | None = None
        with self._opened() as file:
            self.num_bytes = os.fstat(file.fileno()).st_size
            if self.num_bytes == 0:
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

    def check_steps(self) -> None:
        """Read every step and check it against the chains, at memory speed and some 15 microseconds a step.

        Raises:
            ReferenceFormatError: the bytes of a step are not those that were written.
        """
        with self._opened() as file:
            for position in range(len(self.steps)):
                self._read(file, position)

    def read(self, position: int) -> StepRecord:
        """Return the step at a position, checked against the chains.

        Raises:
            ReferenceFormatError: its bytes are not those that were written.
        """
        with self._opened() as file:
            return self._read(file, position)

    def _read(self, file: BinaryIO, position: int) -> StepRecord:
        start, end = int(self._offsets[position]), int(self._offsets[position + 1])
        file.seek(start)
        record = self._decode(file.read(end - start), start)
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
        rows: list[tuple[int, ...]] = []
        known: dict[bytes, int] = {}
        head = b""
        message: bytes | None = None
        while offsets[-1] < self.num_bytes:
            row, end = self._peek(file, offsets[-1], known)
            if row is None:
                file.seek(offsets[-1])
                message = self._next_message(file, offsets[-1])
                if not message:
                    break
                record = self._decode(message, offsets[-1])
                if rows:
                    self._check_chain(record, rows[-1][_CHAIN])
                head = head or message[:_HEAD_BYTES]
                num_digests = len(record.digests)
                prefix = _head_of_step(num_digests)
                if message.startswith(prefix):
                    known[prefix] = num_digests
                row = (record.step, record.program_id, record.layout_id, record.chain, num_digests)
                end = offsets[-1] + len(message)
            if rows and row[0] <= rows[-1][0]:
                raise damaged(self.path, f"step {row[0]} follows step {rows[-1][0]}")
            rows.append(row)
            offsets.append(end)
        self._offsets = np.array(offsets, dtype=np.int64)
        self._keep(rows)
        if message == b"":
            if file.tell() != self.num_bytes:
                raise damaged(self.path, "bytes follow its end-of-stream marker")
            return
        file.seek(offsets[-1])
        self._check_torn_tail(file.read(), head, offsets[-1])
        where = f"{rows[-1][0]} is the last whole step" if rows else "it holds no whole step"
        torn = "its tail is torn" if offsets[-1] < self.num_bytes else "its end-of-stream marker is missing"
        self.unfinished = f"{self.path}: {torn}, the process did not end as it should; {where}."

    def _peek(self, file: BinaryIO, offset: int, known: Mapping[bytes, int]) -> tuple[tuple[int, ...] | None, int]:
        """Return what stands before the digests of the step here, and where it ends; None when it is to be decoded.

        Where the bytes up to the values are those that we write for so many digests, the values lie where we put them.
        """
        if not known:
            return None, offset
        file.seek(offset)
        start = file.read(_NUM_HEAD_BYTES + 8 * _HEAD_WORDS)
        num_digests = known.get(start[:_NUM_HEAD_BYTES])
        end = offset + _NUM_HEAD_BYTES + 8 * (_HEAD_WORDS + (num_digests or 0))
        if num_digests is None or end > self.num_bytes:
            return None, offset
        step, epoch, program_id, layout_id, chain, first, last = _VALUES.unpack_from(start, _NUM_HEAD_BYTES)
        if step < 0 or epoch < 0 or first or last != num_digests:
            return None, offset
        return (step, program_id, layout_id, chain, num_digests), end

    def _keep(self, rows: list[tuple[int, ...]]) -> None:
        columns: list[tuple[int, ...]] = list(zip(*rows, strict=True)) if rows else [()] * 5
        self.steps = np.array(columns[0], dtype=np.int64)
        self.program_ids = np.array(columns[1], dtype=np.uint64)
        self.layout_ids = np.array(columns[2], dtype=np.uint64)
        self.chains = np.array(columns[_CHAIN], dtype=np.uint64)
        self.num_digests = np.array(columns[4], dtype=np.int64)

    def _check_torn_tail(self, tail: bytes, head: bytes, offset: int) -> None:
        # A killed writer leaves the beginning of one message. All messages of a file begin alike, so what begins
        # otherwise, has another message in it, or ends as a whole file does, has a wrong length in the middle.
        is_beginning = END_OF_STREAM.startswith(tail) or not head or tail[:_HEAD_BYTES] == head[: len(tail)]
        if not is_beginning or (head and head in tail[1:]) or tail.endswith(END_OF_STREAM):
            raise damaged(self.path, f"the message at byte {offset} has no sensible length")

    def _decode(self, message: bytes, offset: int) -> StepRecord:
        # What begins as we write it for so many digests is laid out as we write it; Arrow takes ten times as long.
        num_digests = (len(message) - _NUM_HEAD_BYTES) // 8 - _HEAD_WORDS
        if num_digests >= 0 and not len(message) % 8 and message.startswith(_head_of_step(num_digests)):
            step, epoch, program_id, layout_id, chain, first, last = _VALUES.unpack_from(message, _NUM_HEAD_BYTES)
            if step >= 0 and epoch >= 0 and first == 0 and last == num_digests:
                return StepRecord(
                    step=step,
                    epoch=epoch,
                    program_id=program_id,
                    layout_id=layout_id,
                    digests=np.frombuffer(message, dtype="<u8", offset=_NUM_HEAD_BYTES + 8 * _HEAD_WORDS),
                    chain=chain,
                    segment=self.segment,
                )
        return self._decode_with_arrow(message, offset)

    def _decode_with_arrow(self, message: bytes, offset: int) -> StepRecord:
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
        if offset + 8 + length > self.num_bytes:
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
        if offset + 8 + length + body > self.num_bytes:
            return None
        return head + metadata + file.read(body)
