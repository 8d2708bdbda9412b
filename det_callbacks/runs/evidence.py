"""The evidence of a process, which explains differences, in a file next to the steps."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from det_callbacks.digest.host import digest_bytes, format_digest
from det_callbacks.errors import ReferenceFormatError
from det_callbacks.runs.files import (
    FORMAT_VERSION,
    MAX_BYTES,
    MAX_VALUES,
    READ_ERRORS,
    AppendedFile,
    damaged,
    opened,
    require_at_most,
)
from det_callbacks.runs.program import in_module
from det_callbacks.runs.steps import END_OF_STREAM, has_regular_end, read_metadata

EVIDENCE_SCHEMA = pa.schema(
    {
        "step": pa.int64(),
        **dict.fromkeys(("moment", "kind", "of", "part"), pa.string()),
        "value": pa.uint64(),
        "text": pa.string(),
    }
)

EvidenceKind = Literal[
    "generator",  # the state of a generator at a moment
    "seed",  # the seed of a generator of torch
    "start",  # the state of a generator when the fit begins; the text is the same digest
    "loader",  # a setting of a loader: of "train_dataloader", part "num_workers"
    "indices",  # what a loader's sampler drew for the batch of a step, as JSON
    "sorted_indices",  # the digest of the same numbers, sorted
    "sample",  # the digest of a sample of the batch; its number is the part
    # a tensor of the batch as its loader returned it, if something changed it until the step
    "loaded",
    # of an optimizer, when an update first uses this value: of "0", part "lr",
    # as JSON list by group
    "option",
    # name -> whether in train mode, as a JSON object: of the model (""), and of each module whose
    # mode is not that of the module around it
    "modes",
    "constants",  # the names of initial tensors that are constant, as JSON
    "scripted",  # the names of modules that are, or contain, TorchScript, as JSON
    # the callbacks with a hook, in the text: called before ours, or after, as the part says
    "hook",
    "trained",  # names of the parameters that an optimizer trains, as JSON
    "untrained",  # of the parameters that require gradients and are in no optimizer
    # of the untrained parameters that had a gradient by the end of a step
    "untrained_with_gradient",
    "large_gradient",  # of those with a gradient beyond rounding, in one of the first updates
    "unseen_write",  # a value of ``StepView.unseen_writes``
    "checked",  # ``StepView.checked`` as JSON, if it is not None
    "number",  # digest and JSON text of numbers among an op's arguments
]
"""What kind of thing a row of evidence is about."""

NAMES = frozenset(
    {"constants", "scripted", "trained", "untrained", "untrained_with_gradient", "large_gradient"}
)
"""The kinds whose text is a JSON list of names."""

OF_BATCH = frozenset({"indices", "sorted_indices", "sample", "loaded"})
"""The kinds that describe the batch of a step."""

LASTING = NAMES | {"start", "loader", "option", "modes", "hook"}
"""The kinds of which a row holds until the next one of the same thing."""

BEFORE, AFTER = "before", "after"  # parts of hooks
# in the class of a sampler, before the class of torch that it derives from
KIND_OF_SAMPLER = ", a "

# Moments of a step and before it.
LOADER = "before the loader starts"
DRAWING = "before a batch is drawn"
BATCH_START, AFTER_FORWARD, AFTER_BACKWARD, BATCH_END = (
    "batch start",
    "after forward",
    "after backward",
    "batch end",
)

ROWS_PER_BATCH = 512  # after which a record batch is written

_DIGEST = b"digest"
_RECORD_BATCH = 3  # kind of a message

Filter = Callable[[pa.RecordBatch], np.ndarray]


class EvidenceRow(NamedTuple):
    """A value, usually a digest, or a text; at a moment of a step, such as "batch start",
    or "" for the whole step.
    """

    step: int
    moment: str
    kind: EvidenceKind
    of: str = ""
    part: str = ""
    value: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NondeterministicOp:
    """Calls of an op without a deterministic implementation, at one place."""

    op: str
    phase: str
    module: str
    source: tuple[str, ...]
    message: str
    is_allowed: bool
    num_calls: int = 1

    @property
    def place(self) -> str:
        """Where it was called, in words."""
        module = in_module(self.module, self.op)
        line = f" at {self.source[0]}" if self.source else ""
        return f"{self.op}{module}{line} ({self.phase})"


def evidence_path(stream: Path) -> Path:
    return stream.with_name(f"{stream.name.removesuffix('.arrows')}.evidence.arrows")


class EvidenceWriter:
    """Writes the evidence of one fit to a new file."""

    def __init__(self, path: Path, *, run_id: str) -> None:
        self._rows: list[EvidenceRow] = []
        self._file = AppendedFile(path, is_new=True)
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        self._stream = pa.ipc.new_stream(self._file, _schema_of(run_id), options=options)

    def append(self, rows: Sequence[EvidenceRow]) -> None:
        self._rows.extend(rows)
        if len(self._rows) >= ROWS_PER_BATCH:
            self.flush()

    def flush(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            batch = pa.record_batch([*map(list, zip(*rows, strict=True))], schema=EVIDENCE_SCHEMA)
            self._stream.write_batch(batch, custom_metadata={_DIGEST: _digest_batch(batch)})

    def close(self) -> None:
        with self._file:
            if not self._file.is_broken:
                self.flush()
                self._stream.close()


def read_values(stream: Path, run_id: str) -> dict[int, str]:
    """Return the JSON text of arguments by digest, or {} if the evidence
    cannot be read or is too large.
    """
    texts, num_bytes = dict[int, str](), 0
    try:
        for row in read_evidence(
            evidence_path(stream), run_id=run_id, keep=lambda batch: _is(batch, "kind", "number")
        ):
            texts[row.value] = row.text
            num_bytes += len(row.text)
            if num_bytes > MAX_BYTES:  # a recorder keeps far less, MAX_TEXT in trace/call_graph.py
                return {}
    except ReferenceFormatError:
        return {}
    return texts


def read_checked(
    stream: Path, run_id: str, step: int, num_sites: int
) -> tuple[frozenset[int], frozenset[int] | None]:
    """Return ``unseen_writes`` and ``checked`` of a step's view; if the evidence cannot
    be read, no site is proven.
    """
    try:
        rows = [
            *read_evidence(
                evidence_path(stream), run_id=run_id, keep=lambda batch: _is(batch, "step", step)
            )
        ]
    except ReferenceFormatError:
        return frozenset(range(num_sites)), None
    checked = next(
        (frozenset[int](json.loads(row.text)) for row in rows if row.kind == "checked"), None
    )
    return frozenset(row.value for row in rows if row.kind == "unseen_write"), checked


def _is(batch: pa.RecordBatch, column: str, value: object) -> np.ndarray:
    return np.asarray(batch.column(column).to_numpy(zero_copy_only=False) == value)


def read_evidence(path: Path, *, run_id: str, keep: Filter | None = None) -> Iterator[EvidenceRow]:
    """Yield the rows that ``keep`` selects; after a kill, up to the last whole batch;
    none if there is no file.
    """
    if not os.path.lexists(path):
        return
    with opened(path) as file:
        try:
            header = read_metadata(file)
            schema = pa.ipc.read_schema(pa.py_buffer(header))
        except READ_ERRORS as error:
            if _was_killed_in_header(path, run_id):
                return
            raise damaged(path, f"it does not begin like evidence ({error})") from error
        if not schema.equals(_schema_of(run_id), check_metadata=True):
            raise damaged(path, f"it is from a different run, version or kind ({schema.metadata})")
        while True:
            try:
                message = _read_message(file)
                if message is None:
                    break
                # one message alone has no custom metadata
                stream = pa.ipc.open_stream(header + message)
                batch, metadata = stream.read_next_batch_with_custom_metadata()
                batch.validate(full=True)
            except READ_ERRORS as error:
                if file.read(1) or has_regular_end(path):
                    raise damaged(
                        path, f"a record batch in its middle cannot be read ({error})"
                    ) from error
                break  # a kill interrupted the write
            digest = dict(metadata or {}).get(_DIGEST)
            if any(column.null_count for column in batch.columns) or digest != _digest_batch(batch):
                raise damaged(path, "a record batch does not match its digest")
            kept = batch if keep is None else batch.filter(pa.array(keep(batch)))
            for row in map(EvidenceRow, *(column.to_pylist() for column in kept.columns)):
                _require_list(path, row)
                yield row
    if not has_regular_end(path) and _is_fit_complete(path):
        raise damaged(path, "its end is missing, although the steps of its fit are complete")


def _require_list(path: Path, row: EvidenceRow) -> None:
    """Raise ReferenceFormatError if the text of a row is not the JSON list that it has to be."""
    if row.kind == "checked":
        kind: type[object] = int
    elif row.kind in NAMES:
        kind = str
    elif row.kind in ("indices", "number", "option"):
        kind = object
    else:
        return
    try:
        content = json.loads(row.text or "[]")
        if not isinstance(content, list) or not all(isinstance(item, kind) for item in content):
            raise TypeError(f"it is {row.text[:40]!r}")
    except READ_ERRORS as error:
        raise damaged(
            path, f"{row.kind} {row.of!r} of step {row.step} is not a list ({error})"
        ) from error


def _read_message(file: BinaryIO) -> bytes | None:
    """Return the next record batch, or None at the regular end; EOFError if it is cut,
    ValueError if it is too large.

    Compressed buffers begin with their size, so that a few bytes may stand for any number of rows.
    """
    metadata = read_metadata(file)
    if metadata in (END_OF_STREAM, b""):
        return None
    table = 8 + _number(metadata, 8, 4)  # Message.fbs of the Arrow columnar format
    kind, batch = _field(metadata, table, 1), _field(metadata, table, 2)
    if metadata[kind] != _RECORD_BATCH:
        raise ValueError("it is not a record batch")
    batch += _number(metadata, batch, 4)
    num_rows = _number(metadata, _field(metadata, batch, 0), 8)
    require_at_most(MAX_VALUES, num_rows * len(EVIDENCE_SCHEMA), "values in a record batch")
    num_bytes = _number(metadata, _field(metadata, table, 3), 8)
    require_at_most(MAX_BYTES, num_bytes, "bytes in a record batch")
    body = file.read(num_bytes)
    if len(body) < num_bytes:
        raise EOFError("it ends early")
    buffers = _field(metadata, batch, 2)
    buffers += _number(metadata, buffers, 4) + 4
    places = range(
        buffers, buffers + 16 * min(_number(metadata, buffers - 4, 4), len(metadata) // 16), 16
    )
    starts = (_number(metadata, place, 8) for place in places if _number(metadata, place + 8, 8))
    if _field(metadata, batch, 3):
        sizes = [_number(body, start, 8) for start in starts]  # -1 if it was not compressed
        require_at_most(MAX_BYTES, sum(max(0, size) for size in sizes), "bytes in a record batch")
    return metadata + body


def _field(content: bytes, table: int, number: int) -> int:
    """Return where the field of a FlatBuffer's table is, or 0 if it has its default."""
    fields = table - _number(content, table, 4)
    is_known = 4 + 2 * number < _number(content, fields, 2)
    offset = _number(content, fields + 4 + 2 * number, 2) if is_known else 0
    return table + offset if offset else 0


def _number(content: bytes, start: int, num_bytes: int) -> int:
    """Return a little-endian number in a message, 0 for a place before its beginning."""
    return (
        int.from_bytes(content[start : start + num_bytes], "little", signed=True)
        if start > 0
        else 0
    )


def _was_killed_in_header(path: Path, run_id: str) -> bool:
    """Return whether a kill came before the first rows: Arrow writes the header only with them."""
    header = _schema_of(run_id).serialize().to_pybytes()
    with opened(path) as file:
        return header.startswith(file.read(len(header) + 1)) and not _is_fit_complete(path)


def _is_fit_complete(path: Path) -> bool:
    """Return whether the steps have their regular end; the evidence is closed before them."""
    steps = path.with_name(path.name.replace(".evidence.", "."))
    return os.path.lexists(steps) and has_regular_end(steps)


def _schema_of(run_id: str) -> pa.Schema:
    return EVIDENCE_SCHEMA.with_metadata({"format_version": str(FORMAT_VERSION), "run_id": run_id})


def _digest_batch(batch: pa.RecordBatch) -> bytes:
    """Return the digest of a record batch's values, for any layout of its buffers."""
    parts: list[bytes] = []
    for column in batch.columns:
        if pa.types.is_string(column.type):
            _, offsets, data = column.buffers()
            ends = np.frombuffer(offsets, dtype="<i4")[
                column.offset : column.offset + len(column) + 1
            ]
            parts += [
                np.diff(ends).tobytes(),
                b"" if data is None else data[ends[0] : ends[-1]].to_pybytes(),
            ]
        else:
            parts.append(column.to_numpy().tobytes())
    return format_digest(digest_bytes(b"".join(parts))).encode()
