"""Exports a run as a Parquet data set: one row per site and step, partitioned by rank."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from det_callbacks.errors import ExportError
from det_callbacks.runs.disk import list_folder, writing
from det_callbacks.runs.store import Run

_TEXT = pa.dictionary(pa.int32(), pa.string())
_OF_STEP = {
    **{"attempt": pa.int32(), "segment": pa.int32(), "step": pa.int64(), "epoch": pa.int32()},
    **dict.fromkeys(("chain", "program", "layout"), pa.uint64()),
}
_OF_SITE = {
    **dict.fromkeys(("phase", "module", "op"), _TEXT),
    **dict.fromkeys(("occurrence", "output"), pa.int32()),
    **dict.fromkeys(("role", "name", "arguments"), _TEXT),
    **{"recomputed": pa.bool_(), "source": pa.list_(pa.string())},
}
_OF_LAYOUT = {"dtype": _TEXT, "shape": pa.list_(pa.int64()), "stride": pa.list_(pa.int64())}

# ``rank`` is in the path, ``rank=0/part-0.parquet``
EXPORT_SCHEMA = pa.schema(_OF_STEP | {"position": pa.int32()} | _OF_SITE | _OF_LAYOUT | {"digest": pa.uint64()})
GROUP_ROWS = 250_000  # per row group: some 25 MB in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    path: Path
    num_rows: int
    num_bytes: int
    incomplete_reason: str | None


def export_run(run_folder: str | Path, to: str | Path) -> Export:
    """Write a run to a new or empty folder, which appears when it is complete."""
    to = Path(os.path.abspath(to))  # "." has no name
    instead = "pass another folder (--to of det-callbacks export)"
    if os.path.exists(to) and not (to.is_dir() and not list_folder(to, instead=instead)):
        what = "is not empty" if to.is_dir() else "is a file, but a data set is a folder"
        raise ExportError(f"{to} {what}. Nothing was changed. Pass a new or empty folder.", str(to))
    run = Run.open(run_folder, check_steps=False)
    ranks = [rank for rank in run.ranks if run.rank(rank).num_steps]
    if not ranks:
        raise ExportError(f"{run_folder} holds no step, so there is nothing to export. {to} was not created.", str(to))
    temporary = to.with_name(f".{to.name}.{os.getpid()}.tmp")
    try:
        with writing(to, instead=instead):
            for rank in ranks:
                (temporary / f"rank={rank}").mkdir(parents=True)
            num_rows = sum(_write_rank(run, rank, temporary / f"rank={rank}" / "part-0.parquet") for rank in ranks)
            num_bytes = sum(file.stat().st_size for file in temporary.rglob("*.parquet"))
            temporary.replace(to)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Export(path=to, num_rows=num_rows, num_bytes=num_bytes, incomplete_reason=run.incomplete_reason)


def _write_rank(run: Run, rank: int, path: Path) -> int:
    # pyarrow.dataset.write_dataset would hold all rows in memory, at a third of the speed
    num_rows, pending = 0, list[pa.RecordBatch]()
    with pq.ParquetWriter(path, EXPORT_SCHEMA, compression="zstd") as file:

        def flush() -> None:
            table = pa.Table.from_batches(pending, EXPORT_SCHEMA).unify_dictionaries()
            file.write_table(table, row_group_size=max(1, len(table)))
            pending.clear()

        for batch in _batches(run, rank):
            pending.append(batch)
            num_rows += len(batch)
            if sum(map(len, pending)) >= GROUP_ROWS:
                flush()
        flush()
    return num_rows


def _batches(run: Run, rank: int) -> Iterator[pa.RecordBatch]:
    steps = run.rank(rank)

    @lru_cache(maxsize=16)
    def of_program(program_id: int, layout_id: int) -> list[pa.Array]:
        sites, entries = run.program(program_id).sites, run.layout(layout_id).entries
        columns = [pa.array(range(len(sites)), pa.int32())]
        columns += [_array([getattr(site, name) for site in sites], kind) for name, kind in _OF_SITE.items()]
        for name, kind in _OF_LAYOUT.items():
            columns.append(_array([None if entry is None else getattr(entry, name) for entry in entries], kind))
        return columns

    for segment, step in [(fit, int(step)) for fit in steps.segments for step in steps.steps(fit)]:
        record, attempt = run.view(rank, segment, step).record, steps.file_of(segment, step).attempt
        numbers = (attempt, segment, step, record.epoch, record.chain, record.program_id, record.layout_id)
        columns = [
            pa.array(np.full(len(record.digests), number, dtype=kind.to_pandas_dtype()))
            for number, kind in zip(numbers, _OF_STEP.values(), strict=True)
        ]
        columns += [*of_program(record.program_id, record.layout_id), pa.array(record.digests)]
        yield pa.RecordBatch.from_arrays(columns, schema=EXPORT_SCHEMA)


def _array(values: list[object], kind: pa.DataType) -> pa.Array:
    return pa.array(values, pa.string()).dictionary_encode() if kind == _TEXT else pa.array(values, kind)
