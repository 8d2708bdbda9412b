"""The evidence of a process, which explains differences, in a file next to the steps."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from det_callbacks.digest.host import digest_bytes, format_digest
from det_callbacks.errors import ReferenceFormatError
from det_callbacks.runs.disk import AppendedFile
from det_callbacks.runs.files import FORMAT_VERSION, READ_ERRORS, damaged, reading_file
from det_callbacks.runs.stream import has_regular_end

EVIDENCE_SCHEMA = pa.schema(
    {"step": pa.int64(), **dict.fromkeys(("point", "name"), pa.string()), "value": pa.uint64(), "text": pa.string()}
)

# Names of rows, or their prefixes.
SEED = "seed of "  # the seed of a torch generator
START = "start of "  # the state of a generator when the fit begins; the text is the same digest
CONSTANTS = "constant initial tensors"  # those that are constant when the fit starts: JSON of names
SCRIPTED = "TorchScript"  # the modules that are, or contain, TorchScript, as JSON
CALLBACKS = "callbacks "  # the callbacks with a hook; followed by BEFORE or AFTER (ours), and the hook
BEFORE, AFTER = "before", "after"
IN_OPTIMIZER = "of optimizer "  # at PARAMETERS: names of the parameters that it trains; followed by its number
IN_NO_OPTIMIZER = "of no optimizer"  # likewise, of those that require gradients and are in none
WITH_GRADIENT = "of no optimizer, with a gradient"  # those of them that had one by the end of a step
WITH_LARGE_GRADIENT = "with a gradient beyond rounding"  # of optimizers, in one of the first updates

# The content of a batch, at BATCH: names of rows, or their prefixes.
INDICES = "indices of "  # the draws of a loader's sampler, as JSON
SAMPLE = "sample "  # the digest of a sample

# Points of a step and before it.
LOADER = "before the loader starts"
DRAWING = "before a batch is drawn"
BATCH_START, AFTER_FORWARD, AFTER_BACKWARD, BATCH_END = "batch start", "after forward", "after backward", "batch end"

# Points of rows without a moment in a step.
BATCH = "batch"
OPTIONS = "optimizer options"  # options of the groups, when an update first uses them: "lr of group 0", as JSON
UNSEEN_WRITE = "unseen write"  # the values are ``StepView.unseen_writes``
CHECKED = "checked for unseen writes"  # ``StepView.checked`` as JSON, if it is not None
VALUES = "arguments"  # digest and JSON text of numbers among an op's arguments
PARAMETERS = "parameters"  # how many, and the JSON text of a list of names

ROWS_PER_BATCH = 512  # after which a record batch is written

_DIGEST = b"digest"

Filter = Callable[[pa.RecordBatch], np.ndarray]


class Row(NamedTuple):
    """A value, usually a digest, at a point of a step, such as "batch start"."""

    step: int
    point: str
    name: str
    value: int
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
        module = {"": "outside any module", "?": "in an unknown module"}.get(self.module, f"in {self.module}")
        line = f" at {self.source[0]}" if self.source else ""
        return f"{self.op} {module}{line} ({self.phase})"


def evidence_path(stream: Path) -> Path:
    return stream.with_name(f"{stream.name.removesuffix('.arrows')}.evidence.arrows")


class EvidenceWriter:
    """Writes the evidence of one fit to a new file."""

    def __init__(self, path: Path, *, run_id: str) -> None:
        self._rows: list[Row] = []
        self._file = AppendedFile(path, is_new=True)
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        self._stream = pa.ipc.new_stream(self._file, _schema_of(run_id), options=options)

    def append(self, rows: Sequence[Row]) -> None:
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
    """Return the JSON text of arguments by digest, without unreadable ones."""
    try:
        rows = read_evidence(evidence_path(stream), run_id=run_id, keep=lambda it: _is(it, "point", VALUES))
        return {row.value: row.text for row in rows}
    except ReferenceFormatError:
        return {}


def read_checked(stream: Path, run_id: str, step: int, num_sites: int) -> tuple[frozenset[int], frozenset[int] | None]:
    """Return ``unseen_writes`` and ``checked`` of a step's view; if the evidence cannot be read, no site is proven."""
    try:
        rows = [*read_evidence(evidence_path(stream), run_id=run_id, keep=lambda it: _is(it, "step", step))]
    except ReferenceFormatError:
        return frozenset(range(num_sites)), None
    checked = next((frozenset[int](json.loads(row.text)) for row in rows if row.point == CHECKED), None)
    return frozenset(row.value for row in rows if row.point == UNSEEN_WRITE), checked


def _is(batch: pa.RecordBatch, column: str, value: object) -> np.ndarray:
    return np.asarray(batch.column(column).to_numpy(zero_copy_only=False) == value)


def read_evidence(path: Path, *, run_id: str, keep: Filter | None = None) -> Iterator[Row]:
    """Yield the rows that ``keep`` selects; after a kill, up to the last whole batch; none if there is no file."""
    with reading_file(path):
        if not path.is_file():
            return
        opened = path.open("rb")
    with opened as file:
        try:
            stream = pa.ipc.open_stream(file)
        except READ_ERRORS as error:
            if _was_killed_in_header(path, run_id):
                return
            raise damaged(path, f"it does not begin like evidence ({error})") from error
        if not stream.schema.equals(_schema_of(run_id), check_metadata=True):
            raise damaged(path, f"it is from a different run, version or kind ({stream.schema.metadata})")
        while True:
            try:
                batch, metadata = stream.read_next_batch_with_custom_metadata()
                batch.validate(full=True)
            except StopIteration:
                break
            except READ_ERRORS:
                with reading_file(path):
                    has_more = bool(file.read(1))
                if has_more:
                    raise damaged(path, "a record batch in its middle cannot be read") from None
                break  # a kill interrupted the write
            digest = dict(metadata or {}).get(_DIGEST)
            if any(column.null_count for column in batch.columns) or digest != _digest_batch(batch):
                raise damaged(path, "a record batch does not match its digest")
            kept = batch if keep is None else batch.filter(pa.array(keep(batch)))
            yield from map(Row, *(column.to_pylist() for column in kept.columns))
    if not has_regular_end(path) and _is_fit_complete(path):
        raise damaged(path, "its end is missing, although the steps of its fit are complete")


def _was_killed_in_header(path: Path, run_id: str) -> bool:
    """Return whether a kill came before the first rows: Arrow writes the header only with them."""
    header = _schema_of(run_id).serialize().to_pybytes()
    with reading_file(path):
        content = path.read_bytes()
    return header.startswith(content) and not _is_fit_complete(path)


def _is_fit_complete(path: Path) -> bool:
    """Return whether the steps have their regular end; the evidence is closed before them."""
    steps = path.with_name(path.name.replace(".evidence.", "."))
    return steps.is_file() and has_regular_end(steps)


def _schema_of(run_id: str) -> pa.Schema:
    return EVIDENCE_SCHEMA.with_metadata({"format_version": str(FORMAT_VERSION), "run_id": run_id})


def _digest_batch(batch: pa.RecordBatch) -> bytes:
    """Return the digest of a record batch's values, for any layout of its buffers."""
    parts: list[bytes] = []
    for column in batch.columns:
        if pa.types.is_string(column.type):
            _, offsets, data = column.buffers()
            ends = np.frombuffer(offsets, dtype="<i4")[column.offset : column.offset + len(column) + 1]
            parts += [np.diff(ends).tobytes(), b"" if data is None else data[ends[0] : ends[-1]].to_pybytes()]
        else:
            parts.append(column.to_numpy().tobytes())
    return format_digest(digest_bytes(b"".join(parts))).encode()
