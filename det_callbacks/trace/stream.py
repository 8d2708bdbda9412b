"""One file of steps: an Arrow IPC stream with one record batch a step."""

import struct
from pathlib import Path
from typing import Any

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
_HEAD_TYPES = (pa.int64(), pa.int32(), pa.uint64(), pa.uint64(), pa.uint64())
_DIGESTS_TYPE = STREAM_SCHEMA.field("digests").type


def encode_step(step: int, epoch: int, program_id: int, layout_id: int, chain: int, digests: np.ndarray) -> pa.Buffer:
    """Return the message of one step: 480 bytes and 8 bytes a digest; 20 microseconds."""
    head = pa.py_buffer(np.array([step, epoch, program_id, layout_id, chain], dtype="<u8"))
    columns = [
        pa.Array.from_buffers(kind, 1, [None, head.slice(8 * index, kind.bit_width // 8)])
        for index, kind in enumerate(_HEAD_TYPES)
    ]
    values = pa.Array.from_buffers(
        pa.uint64(), len(digests), [None, pa.py_buffer(np.ascontiguousarray(digests, dtype="<u8"))]
    )
    offsets = pa.py_buffer(np.array([0, len(digests)], dtype="<i4"))
    columns.append(pa.Array.from_buffers(_DIGESTS_TYPE, 1, [None, offsets], children=[values]))
    return pa.RecordBatch.from_arrays(columns, schema=STREAM_SCHEMA).serialize()


class StreamFile:
    """The steps in one file, by position; headers are kept in memory, digests are read when asked for.

    Args:
        path: of the file.
        run_id: of the run that it must belong to.
        rank: likewise.
        attempt: likewise.

    Attributes:
        segment: which fit it holds.
        steps: int64, ascending.
        chains: uint64.
        chain_start: the chain before the first step.
        unfinished: None, or why the file does not end as it should.

    Raises:
        ReferenceFormatError: it is missing, empty, of another run or version, or damaged inside.
    """

    def __init__(self, path: Path, *, run_id: str, rank: int, attempt: int) -> None:
        self.path = path
        self.attempt = attempt
        self.chain_start = 0
        self.unfinished: str | None = None
        try:
            self._map = pa.memory_map(str(path), "r")
            self._size = self._map.size()
        except FileNotFoundError as error:
            raise damaged(path, "it is missing, although run.json tells of it") from error
        except (OSError, pa.ArrowException) as error:
            raise damaged(path, f"it cannot be read ({error})") from error
        if self._size == 0:
            raise damaged(path, "it is empty")
        offset = self._read_schema(run_id, rank)
        self._read_headers(offset)

    def read(self, position: int) -> StepRecord:
        """Return the step at a position, checked against the chains.

        Raises:
            ReferenceFormatError: its bytes are not those that were written.
        """
        record = self._decode(int(self._offsets[position]))
        previous = int(self.chains[position - 1]) if position else self.chain_start
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
        return record

    def _read_schema(self, run_id: str, rank: int) -> int:
        end = self._message_end(0)
        if end is None or end == 0:
            raise damaged(self.path, "its header is incomplete")
        try:
            self._map.seek(0)
            schema = pa.ipc.read_schema(pa.ipc.read_message(self._map))
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
        wanted = {"run_id": run_id, "rank": str(rank), "attempt": str(self.attempt)}
        found = {key: metadata.get(key) for key in wanted}
        if found != wanted or not schema.equals(STREAM_SCHEMA) or not metadata.get("segment", "").isdecimal():
            raise damaged(self.path, f"it belongs to another place: {found} instead of {wanted}")
        self.segment = int(metadata["segment"])
        return end

    def _read_headers(self, offset: int) -> None:
        offsets: list[int] = []
        steps: list[int] = []
        chains: list[int] = []
        is_ended = False
        while offset < self._size:
            end = self._message_end(offset)
            if end is None:
                break
            if end == offset:
                is_ended = True
                if offset + len(END_OF_STREAM) != self._size:
                    raise damaged(self.path, "bytes follow its end-of-stream marker")
                break
            record = self._decode(offset)
            if steps and record.step <= steps[-1]:
                raise damaged(self.path, f"step {record.step} follows step {steps[-1]}")
            offsets.append(offset)
            steps.append(record.step)
            chains.append(record.chain)
            offset = end
        self._offsets = np.array(offsets, dtype=np.int64)
        self.steps = np.array(steps, dtype=np.int64)
        self.chains = np.array(chains, dtype=np.uint64)
        if not is_ended:
            where = f"{steps[-1]} is the last whole step" if steps else "it holds no whole step"
            torn = "its tail is torn" if offset < self._size else "its end-of-stream marker is missing"
            self.unfinished = f"{self.path}: {torn}, the process did not end as it should; {where}."

    def _decode(self, offset: int) -> StepRecord:
        try:
            self._map.seek(offset)
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(self._map), STREAM_SCHEMA)
            batch.validate(full=True)
            if batch.num_rows != 1 or any(column.null_count for column in batch.columns):
                raise ValueError("not one row")
            step, epoch, program_id, layout_id, chain = (batch.column(index)[0].as_py() for index in range(5))
            digests = batch.column(5).flatten().to_numpy(zero_copy_only=True)
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

    def _message_end(self, offset: int) -> int | None:
        """Return where the message at an offset ends: the offset itself at the end-of-stream marker.

        None when the message runs past the end of the file, which is how a killed writer leaves it. The length of a
        message's body is a field of its metadata, a FlatBuffer (Arrow columnar format, Message.fbs: field 3).
        """
        head = self._bytes(offset, 8)
        if head[:4] != _CONTINUATION[: len(head)]:
            raise damaged(self.path, f"there is no message at byte {offset}")
        if len(head) < 8:
            return None
        (length,) = struct.unpack("<i", head[4:])
        if length == 0:
            return offset
        if length < 0 or length % 8:
            raise damaged(self.path, f"the message at byte {offset} has no sensible length")
        metadata = self._bytes(offset + 8, length)
        if len(metadata) < length:
            return None
        try:
            (table,) = struct.unpack_from("<I", metadata, 0)
            vtable = table - struct.unpack_from("<i", metadata, table)[0]
            (vtable_size,) = struct.unpack_from("<H", metadata, vtable)
            at = 4 + 2 * 3
            (field,) = struct.unpack_from("<H", metadata, vtable + at) if vtable_size > at else (0,)
            (body,) = struct.unpack_from("<q", metadata, table + field) if field else (0,)
        except struct.error as error:
            raise damaged(self.path, f"the message at byte {offset} cannot be read ({error})") from error
        if body < 0:
            raise damaged(self.path, f"the message at byte {offset} has no sensible length")
        end = offset + 8 + length + body
        return end if end <= self._size else None

    def _bytes(self, offset: int, count: int) -> bytes:
        self._map.seek(offset)
        content: Any = self._map.read(count)
        return bytes(content)
