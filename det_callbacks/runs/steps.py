"""The steps of a run: one in memory, and the file of all.

This module makes and parses messages without Arrow, which takes ten times as long; a different form
counts as damage. A step is one ``write`` without fsync, so a kill leaves whole
steps and at most a torn tail.
"""

import os
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import pyarrow as pa

from det_callbacks.digest.host import DIGEST_VERSION
from det_callbacks.errors import TraceError
from det_callbacks.runs.files import (
    FORMAT_VERSION,
    MAX_ROWS,
    READ_ERRORS,
    damaged,
    opened,
    require_at_most,
)
from det_callbacks.runs.program import Layout, Program, StepRecord, StepView, chain_digest

STREAM_SCHEMA = pa.schema(
    {
        **{"step": pa.int64(), "epoch": pa.int32()},
        **dict.fromkeys(("program_id", "layout_id", "chain"), pa.uint64()),
        "digests": pa.list_(pa.field("item", pa.uint64(), nullable=False)),
    }
)

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"

_ROW = np.dtype(
    [(name, "<i8") for name in ("steps", "num_digests", "starts", "files", "positions")]
    + [(name, "<u8") for name in ("program_ids", "layout_ids", "chains")]
)

Fit: TypeAlias = np.recarray[Any, Any]
"""The steps of a fit, ascending, without their digests: the file of each (of several attempts, the
last), its position there, and where it starts.
"""

# A message is its length, a FlatBuffer (Arrow columnar format, Message.fbs) and the body. The
# FlatBuffer holds the length of the body, 14 pairs of offset and length (the buffers of the
# columns; those of the bitmaps are empty), and 7 pairs of the number of values and of nulls (of the
# columns, and of the items of the list).
_START = bytes.fromhex(
    "ffffffffa801000014000000000000000c0016000600050008000c000c0000000003040018000000"
)
_TABLES = bytes.fromhex(
    "00000a0018000c00040008000a000000fc000000100000000100000000000000000000000e000000"
)
_BUFFERS = (  # of each column the bitmap and the values
    *(0, 0, 0, 8),  # step
    *(8, 0, 8, 4),  # epoch
    *(16, 0, 16, 8),  # program
    *(24, 0, 24, 8),  # layout
    *(32, 0, 32, 8),  # chain
    *(40, 0, 40, 8),  # offsets of the list
    *(48, 0, 48),  # its items, the digests: their length follows
)
_ARRAYS = (7 << 32, *(1, 0) * 6)
_VALUES = struct.Struct("<qi4xQQQ2i")
"""The body before the digests: step, epoch, program, layout, chain and the offsets of the list."""
_HEAD_BYTES = 432
_MAX_METADATA_BYTES = 1 << 16
_PREFIX_BYTES = _HEAD_BYTES + _VALUES.size

MAX_INPUT_CHECKS = 32  # ops a step whose inputs are digested again


def encode_header(**place: object) -> bytes:
    """Return the beginning of a file: columns, versions and place
    (run_id, rank, attempt, segment).
    """
    about = {"format_version": FORMAT_VERSION, "digest_version": DIGEST_VERSION, **place}
    schema = STREAM_SCHEMA.with_metadata({name: str(value) for name, value in about.items()})
    return bytes(schema.serialize().to_pybytes())


def encode_step(
    step: int, epoch: int, program_id: int, layout_id: int, chain: int, digests: np.ndarray
) -> bytes:
    """Return the message of one step: 480 bytes and 8 for each digest; 2 microseconds."""
    num = len(digests)
    values = _VALUES.pack(step, epoch, program_id, layout_id, chain, 0, num)
    return b"".join(
        (_head_of_step(num), values, np.ascontiguousarray(digests, dtype="<u8").tobytes())
    )


@lru_cache(maxsize=256)
def _head_of_step(num_digests: int) -> bytes:
    """Return the message of a step up to its body."""
    body_bytes = struct.pack("<q", _VALUES.size + 8 * num_digests)
    words = struct.pack("<43q", *_BUFFERS, 8 * num_digests, *_ARRAYS, num_digests, 0)
    return b"".join((_START, body_bytes, _TABLES, words))


def has_regular_end(path: Path) -> bool:
    """Return whether a file of steps ends with the marker of a fit that ended as it should."""
    with opened(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(END_OF_STREAM)))
        return file.read() == END_OF_STREAM


def read_metadata(file: BinaryIO) -> bytes:
    """Return the next message of an Arrow IPC stream without its body;
    less at the end of the file.
    """
    start = file.read(8)
    num_bytes = int.from_bytes(start[4:], "little")
    require_at_most(_MAX_METADATA_BYTES, num_bytes, "bytes before the body of a message")
    return start + file.read(num_bytes)


def make_fit(rows: Sequence[tuple[int, ...]] = ()) -> Fit:
    return np.array(list(rows), dtype=_ROW).view(np.recarray)


class StreamFile:
    """The steps in one file, which continue from ``chain_start``;
    ``unfinished`` is why its end is not regular.

    Each read opens the file: a mapped file that another process truncates would kill this process.
    """

    def __init__(self, path: Path, *, run_id: str, rank: int, attempt: int, segment: int) -> None:
        self.path = path
        self.attempt = attempt
        self.segment = segment
        self.unfinished: str | None = None
        self.chain_start = 0
        with opened(path) as file:
            self.num_bytes = os.fstat(file.fileno()).st_size
            self._check_header(
                file, encode_header(run_id=run_id, rank=rank, attempt=attempt, segment=segment)
            )
            self.rows = self._read_rows(file)
            self.unfinished = self._read_end(file)

    def check_steps(self) -> None:
        """Check every step against the chains."""
        with opened(self.path) as file:
            for position in range(len(self.rows)):
                self._read(file, position)

    def read(self, position: int) -> StepRecord:
        """Return the step at a position, checked against the chains."""
        with opened(self.path) as file:
            return self._read(file, position)

    def _read(self, file: BinaryIO, position: int) -> StepRecord:
        # as one tuple: an attribute of a record takes a microsecond
        step_of_row, num_digests, start, _, _, *ids_of_row = self.rows.item(position)
        file.seek(start)
        message = file.read(_PREFIX_BYTES + 8 * num_digests)
        values = self._values(message, start)
        row = [step_of_row, *ids_of_row, num_digests]
        if values is None or [values[0], *values[2:5], values[6]] != row:
            raise damaged(
                self.path, f"the step at byte {start} has changed since the run was opened"
            )
        step, epoch, program_id, layout_id, chain, *_ = values
        digests = np.frombuffer(message, dtype="<u8", offset=_PREFIX_BYTES)
        previous = self.rows.item(position - 1)[-1] if position else self.chain_start
        if chain != chain_digest(previous, step, epoch, program_id, layout_id, digests):
            raise damaged(self.path, f"step {step} does not match its chain")
        return StepRecord(step, epoch, program_id, layout_id, digests, chain, self.segment)

    def _check_header(self, file: BinaryIO, wanted: bytes) -> None:
        try:
            schema = pa.ipc.read_schema(pa.py_buffer(read_metadata(file)))
        except READ_ERRORS as error:
            raise damaged(self.path, f"its header cannot be read ({error})") from error
        if not schema.equals(pa.ipc.read_schema(pa.py_buffer(wanted)), check_metadata=True):
            raise damaged(
                self.path, f"it is from a different run, place, version or kind ({schema.metadata})"
            )

    def _read_rows(self, file: BinaryIO) -> Fit:
        """Return the rows of the whole steps, and leave the file at their end."""
        rows: list[tuple[int, ...]] = []
        start = file.tell()
        while (values := self._values(file.read(_PREFIX_BYTES), start)) is not None:
            step, _, program_id, layout_id, chain, _, num_digests = values
            if rows and step <= rows[-1][0]:
                raise damaged(self.path, f"step {step} follows step {rows[-1][0]}")
            rows.append((step, num_digests, start, 0, len(rows), program_id, layout_id, chain))
            start += _PREFIX_BYTES + 8 * num_digests
            file.seek(start)
        file.seek(start)
        return make_fit(rows)

    def _values(self, message: bytes, start: int) -> tuple[int, ...] | None:
        """Return the fields before the digests of a message, or None without a whole message."""
        if len(message) < _PREFIX_BYTES:
            return None
        values: tuple[int, ...] = _VALUES.unpack_from(message, _HEAD_BYTES)
        step, epoch, *_, first, num_digests = values
        ends_inside = (
            0 <= 8 * num_digests <= self.num_bytes - start - _PREFIX_BYTES
            and num_digests <= MAX_ROWS
        )
        is_sensible = ends_inside and step >= 0 and epoch >= 0 and first == 0
        return values if is_sensible and message.startswith(_head_of_step(num_digests)) else None

    def _read_end(self, file: BinaryIO) -> str | None:
        """Return why the end of the file is not regular, or None if it is."""
        start = file.tell()
        num_bytes = self.num_bytes - start
        rest = file.read(min(_PREFIX_BYTES, num_bytes))
        if rest == END_OF_STREAM:
            return None
        file.seek(max(start, self.num_bytes - len(END_OF_STREAM)))
        # A killed writer leaves the beginning of a message, and all messages of a file
        # begin with the same bytes.
        is_beginning = END_OF_STREAM.startswith(rest) or self._is_torn_step(rest, num_bytes)
        if not is_beginning or file.read(len(END_OF_STREAM)) == END_OF_STREAM:
            raise damaged(self.path, f"what comes at byte {start} cannot be read")
        where = (
            f"{self.rows.steps[-1]} is the last whole step"
            if len(self.rows)
            else "it holds no whole step"
        )
        torn = "its tail is torn" if rest else "its end-of-stream marker is missing"
        return f"{self.path}: {torn}, the process did not end as it should; {where}."

    @staticmethod
    def _is_torn_step(rest: bytes, num_bytes: int) -> bool:
        at = len(_START)
        if len(rest) < at + 8:
            return _START.startswith(rest[:at])
        num_digests, remainder = divmod(struct.unpack_from("<q", rest, at)[0] - _VALUES.size, 8)
        if (
            not 0 <= num_digests <= MAX_ROWS
            or remainder
            or num_bytes >= _PREFIX_BYTES + 8 * num_digests
        ):
            return False
        return _head_of_step(num_digests).startswith(rest[:_HEAD_BYTES])


@dataclass(frozen=True, slots=True, eq=False)
class StepTrace:
    """One recorded step; ``values`` has the JSON text of arguments by digest."""

    program: Program
    digests: np.ndarray
    layout_id: int
    unseen_writes: frozenset[int]
    values: Mapping[int, str]
    _make_layout: Callable[[], Layout]
    checked: frozenset[int] | None = None  # see ``StepView``

    @property
    def layout(self) -> Layout:
        """The layout of each site, built on demand until the next step begins."""
        return self._make_layout()

    def view(
        self, *, rank: int = 0, step: int = 0, epoch: int = 0, chain: int = 0, segment: int = 0
    ) -> StepView:
        record = StepRecord(
            step, epoch, self.program.id, self.layout_id, self.digests, chain, segment
        )
        return StepView(
            rank,
            record,
            self.program,
            self.layout,
            self.unseen_writes,
            lambda: self.values,
            checked=self.checked,
        )


def require_whole(program: Program, digests: "array[int]") -> None:
    """Raise TraceError if a step has different numbers of sites and digests."""
    if len(program) != len(digests):
        raise TraceError(
            f"The step has {len(program)} sites and {len(digests)} digests: an exception (out of "
            "memory, Ctrl-C) interrupted the recording of an op, and the program continued the "
            "step. The training is intact, but this step was not recorded. Let the exception end "
            "the step; if memory ran out, leave the device more."
        )


@dataclass(slots=True, eq=False)
class Expectation:
    """The reference's digests of the current step; the inputs of differing
    sites are digested again.
    """

    digests: "array[int]"
    program_id: int | None = None
    unseen_writes: set[int] = field(default_factory=set)
    checks_left: int = MAX_INPUT_CHECKS
    checked_sites: set[int] = field(default_factory=set)  # their inputs were digested again
    # whether an op that differs without reading a difference was not checked
    is_incomplete: bool = False
    _all: frozenset[int] | None = None  # all digests, when first needed

    @classmethod
    def of(cls, digests: np.ndarray, program_id: int | None = None) -> "Expectation":
        return cls(array("Q", np.ascontiguousarray(digests, dtype=np.uint64).tobytes()), program_id)

    def differs(self, position: int, digest: int) -> bool:
        """Return whether the reference has a different digest at this position."""
        return position >= len(self.digests) or self.digests[position] != digest

    def is_new(self, digest: int) -> bool:
        """Return whether the reference has this digest nowhere: its site differs,
        whatever it is compared with.
        """
        if self._all is None:
            self._all = frozenset(self.digests)
        return digest not in self._all

    def spend_check(self, digests: Sequence[int]) -> bool:
        """Use up a check for the differing outputs of a call; return whether there was one.

        An op whose digests the reference has elsewhere has probably only moved:
        half of the checks are for the others.
        """
        kept = 0 if any(map(self.is_new, digests)) else MAX_INPUT_CHECKS // 2
        if self.checks_left <= kept:
            self.is_incomplete = True
            return False
        self.checks_left -= 1
        return True

    def checked(self, program_id: int) -> frozenset[int] | None:
        """Return the sites whose ops were checked for unseen writes,
        or None if all origins of the step were.

        In another program, the comparison may find differences at other sites than ``differs``.
        """
        is_exact = program_id == self.program_id and not self.is_incomplete
        return None if is_exact else frozenset(self.checked_sites)
