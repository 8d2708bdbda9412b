"""A recorded run as a Parquet data set: one row a site of each step, partitioned by rank."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from det_callbacks.errors import ExportError
from det_callbacks.runs.program import StepView
from det_callbacks.runs.store import Run

_TEXT = pa.dictionary(pa.int32(), pa.string())

EXPORT_SCHEMA = pa.schema(
    [
        ("attempt", pa.int32()),
        ("segment", pa.int32()),
        ("step", pa.int64()),
        ("epoch", pa.int32()),
        ("chain", pa.uint64()),
        ("program", pa.uint64()),
        ("layout", pa.uint64()),
        ("position", pa.int32()),
        ("phase", _TEXT),
        ("module", _TEXT),
        ("op", _TEXT),
        ("occurrence", pa.int32()),
        ("output", pa.int32()),
        ("role", _TEXT),
        ("name", _TEXT),
        ("arguments", _TEXT),
        ("recomputed", pa.bool_()),
        ("dtype", _TEXT),
        ("shape", pa.list_(pa.int64())),
        ("stride", pa.list_(pa.int64())),
        ("source", pa.list_(pa.string())),
        ("digest", pa.uint64()),
    ]
)
"""Columns of a file; ``rank`` is in its path (``rank=0/part-00000.parquet``), as data sets have it."""

_OF_STEP = EXPORT_SCHEMA.names[:7]
_OF_SITE = EXPORT_SCHEMA.names[7:-1]
_OF_LAYOUT = ("dtype", "shape", "stride")

GROUP_ROWS = 250_000
"""Rows of a row group: what is held in memory, some 25 MB."""
FILE_ROWS = 4_000_000
"""Rows of a file: some 40 MB, of which the digests are 32."""
_CACHED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What was exported.

    Attributes:
        path: folder of the data set.
        num_ranks: that have steps.
        num_steps: of all ranks together.
        num_rows: sites of all steps.
        num_files: Parquet files.
        num_bytes: size of these.
        incomplete_reason: of a run that did not end as it should; its whole steps are there.
    """

    path: Path
    num_ranks: int
    num_steps: int
    num_rows: int
    num_files: int
    num_bytes: int
    incomplete_reason: str | None


def export_run(run_folder: str | Path, to: str | Path, *, progress: Callable[[int, int], None] | None = None) -> Export:
    """Write a run as a Parquet data set, partitioned by rank; of a step recorded twice the attempt that counts.

    Each step is read once and checked against its chain. The data set appears when it is whole: it is written beside
    its place and moved there. Memory is that of one row group, whatever the size of the run; some 0.5 microseconds a
    row.

    Args:
        run_folder: folder of the run.
        to: folder to make, or an empty one.
        progress: called with the number of steps written so far, and that of all.

    Raises:
        ReferenceNotFoundError: there is no run.
        ReferenceFormatError: a file of the run is damaged.
        ExportError: there is something at ``to`` already, it cannot be written, or the run holds no step.

    Example:
        >>> export_run("refs/run1", "exported").num_rows  # doctest: +SKIP
        48312
    """
    to = Path(os.path.abspath(to))  # "." has no name to put a temporary folder beside
    _check_room(to)
    run = Run.open(run_folder, check_steps=False)
    total = sum(run.rank(rank).num_steps for rank in run.ranks)
    if not total:
        raise ExportError(f"{run_folder} holds no step, so there is nothing to export. {to} was not made.", str(to))
    temporary = to.with_name(f".{to.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        writer = _Writer(run, temporary)
        for num_steps in writer.write():
            if progress is not None:
                progress(num_steps, total)
        files = sorted(temporary.rglob("*.parquet"))
        num_bytes = sum(file.stat().st_size for file in files)
        temporary.replace(to)
    except OSError as error:
        raise ExportError(
            f"{to} could not be written ({error}). The run is as it was, and nothing is left there. Free some space, "
            "or name another folder.",
            str(to),
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Export(
        path=to,
        num_ranks=sum(run.rank(rank).num_steps > 0 for rank in run.ranks),
        num_steps=total,
        num_rows=writer.num_rows,
        num_files=len(files),
        num_bytes=num_bytes,
        incomplete_reason=run.incomplete_reason,
    )


def _check_room(to: Path) -> None:
    if to.is_dir():
        there = sorted(child.name for child in to.iterdir())
        if not there:
            return
        what = f"holds {', '.join(there[:4])}{' and more' if len(there) > 4 else ''} already"
    elif to.exists():
        what = "is a file; a data set is a folder"
    else:
        return
    raise ExportError(f"{to} {what}. Nothing was changed. Name a new folder, or an empty one.", str(to))


class _Writer:
    """Writes the steps of a run, one row group at a time."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.num_rows = 0
        self._run = run
        self._folder = folder
        self._columns = lru_cache(_CACHED)(self._make_columns)

    def write(self) -> Iterator[int]:
        """Yield the number of steps written so far."""
        num_steps = 0
        for rank in self._run.ranks:
            tables = self._tables(rank)
            table = next(tables, None)
            number = 0
            while table is not None:
                path = self._folder / f"rank={rank}" / f"part-{number:05d}.parquet"
                path.parent.mkdir(exist_ok=True)
                num_rows = 0
                with pq.ParquetWriter(path, EXPORT_SCHEMA, compression="zstd") as file:
                    while table is not None and (not num_rows or num_rows + len(table[0]) <= FILE_ROWS):
                        rows, group_steps = table
                        file.write_table(rows, row_group_size=max(1, len(rows)))
                        num_rows += len(rows)
                        num_steps += group_steps
                        yield num_steps
                        table = next(tables, None)
                self.num_rows += num_rows
                number += 1

    def _tables(self, rank: int) -> Iterator[tuple[pa.Table, int]]:
        """Yield row groups with their number of steps."""
        pending: list[pa.Table] = []
        num_rows = 0
        run = self._run.rank(rank)
        for segment in run.segments:
            for step in run.steps(segment).tolist():
                view = self._run.view(rank, segment, step)
                table = self._table(view, run.attempt_of(segment, step))
                if pending and num_rows + len(table) > GROUP_ROWS:
                    yield pa.concat_tables(pending).unify_dictionaries(), len(pending)
                    pending, num_rows = [], 0
                pending.append(table)
                num_rows += len(table)
        if pending:
            yield pa.concat_tables(pending).unify_dictionaries(), len(pending)

    def _table(self, view: StepView, attempt: int) -> pa.Table:
        record = view.record
        numbers = (
            attempt,
            record.segment,
            record.step,
            record.epoch,
            record.chain,
            record.program_id,
            record.layout_id,
        )
        columns = [
            pa.array(np.full(len(record.digests), number, dtype=EXPORT_SCHEMA.field(name).type.to_pandas_dtype()))
            for name, number in zip(_OF_STEP, numbers, strict=True)
        ]
        columns += self._columns(record.program_id, record.layout_id)
        columns.append(pa.array(record.digests))
        return pa.Table.from_arrays(columns, schema=EXPORT_SCHEMA)

    def _make_columns(self, program_id: int, layout_id: int) -> list[pa.Array]:
        """Return what is the same in all steps of a program and a layout."""
        sites = self._run.program(program_id).sites
        entries = self._run.layout(layout_id).entries
        values: dict[str, list[Any]] = {"position": list(range(len(sites)))}
        for name in _OF_SITE[1:]:
            if name in _OF_LAYOUT:
                values[name] = [None if entry is None else getattr(entry, name) for entry in entries]
            else:
                values[name] = [getattr(site, name) for site in sites]
        return [_array(values[name], EXPORT_SCHEMA.field(name).type) for name in _OF_SITE]


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    return pa.array(values, pa.string()).dictionary_encode() if kind == _TEXT else pa.array(values, kind)
