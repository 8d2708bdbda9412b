"""What a run writes once: its programs, their sites and layouts, as tables."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from det_callbacks.digest.host import digest_bytes, format_digest
from det_callbacks.errors import WriteError
from det_callbacks.runs.files import (
    FORMAT_VERSION,
    LAYOUTS,
    MAX_BYTES,
    MAX_ROWS,
    MAX_VALUES,
    PROGRAMS,
    SITES,
    parse_file,
    replace_atomically,
    require_at_most,
    table_name,
    table_path,
)
from det_callbacks.runs.program import (
    Layout,
    Program,
    Site,
    SiteRow,
    TensorLayout,
    entry_digest,
    layout_id,
)

PROGRAM_SCHEMA = pa.schema(
    {
        "position": pa.int32(),
        "site": pa.uint64(),
        "inputs": pa.list_(pa.int32()),
    }
)
SITE_SCHEMA = pa.schema(
    {
        "position": pa.int32(),
        "site": pa.uint64(),
        "phase": pa.string(),
        "module": pa.string(),
        "op": pa.string(),
        "output": pa.int32(),
        "role": pa.string(),
        "subject": pa.string(),
        "of": pa.string(),
        "part": pa.string(),
        "arguments": pa.string(),
        "varying": pa.list_(pa.string()),
        "recomputed": pa.bool_(),
        "source": pa.list_(pa.string()),
        "eager_op": pa.string(),
        "eager_line": pa.string(),
        "eager_call": pa.int32(),
        "eager_calls": pa.int32(),
        "choice": pa.string(),
    }
)
LAYOUT_SCHEMA = pa.schema(
    {
        "position": pa.int32(),
        "dtype": pa.string(),
        "shape": pa.list_(pa.int64()),
        "stride": pa.list_(pa.int64()),
        "detail": pa.string(),
    }
)

_NUM_CACHED_FILES = 4
"""How many programs and layouts are kept by their files' content:
two runs that are compared have the same ones.
"""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / the golden ratio, as in Fibonacci hashing


def write_sites(folder: Path, rows: Sequence[SiteRow]) -> None:
    """Write sites to a file; programs refer to them by id."""
    sites = [row.site for row in rows]
    names = (name for name in SITE_SCHEMA.names if name not in ("position", "site"))
    columns: dict[str, Any] = {name: [getattr(site, name) for site in sites] for name in names}
    ids = np.array([row.id for row in rows], dtype=np.uint64)
    columns["site"] = ids
    path = table_path(folder, SITES, digest_bytes(ids.tobytes()))
    if not path.exists():
        _write_table(path, SITE_SCHEMA, columns)


def write_program(folder: Path, program: Program) -> None:
    """Write a program unless it exists; write its sites first."""
    path = table_path(folder, PROGRAMS, program.id)
    if path.exists():
        return
    sites = np.array([row.id for row in program.rows], dtype=np.uint64)
    offsets = np.concatenate(([0], np.cumsum(program.num_read))).astype(np.int32)
    columns = {"site": sites, "inputs": pa.ListArray.from_arrays(offsets, program.read)}
    digest = _counts_digest(sites, program.counts)
    _write_table(path, PROGRAM_SCHEMA, columns, counts=json.dumps(program.counts), digest=digest)


def write_layout(folder: Path, layout: Layout) -> None:
    """Write a layout unless it exists; takes 2 ms for 2,000 sites."""
    path = table_path(folder, LAYOUTS, layout.id)
    if not path.exists():
        names = [field.name for field in fields(TensorLayout)]
        columns = {
            name: [None if entry is None else getattr(entry, name) for entry in layout.entries]
            for name in names
        }
        _write_table(path, LAYOUT_SCHEMA, columns)


def _write_table(path: Path, schema: pa.Schema, columns: dict[str, Any], **metadata: str) -> None:
    num_rows = len(next(iter(columns.values())))
    schema = schema.with_metadata({**metadata, "format_version": str(FORMAT_VERSION)})
    table = pa.table({**columns, "position": list(range(num_rows))}, schema=schema)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    content = sink.getvalue()
    try:
        _check_footer(pq.ParquetFile(pa.BufferReader(content)).metadata)
        texts = (
            column.nbytes
            for column in table.columns
            if column.type in (pa.string(), pa.list_(pa.string()))
        )
        require_at_most(MAX_BYTES, sum(texts), "bytes of text")
    except ValueError as error:
        text = (
            f"Cannot write {path}: {error}. Record less of a step (level, modules, phases), or "
            "make steps shorter."
        )
        raise WriteError(text, str(path)) from error
    replace_atomically(path, content.to_pybytes())


def _counts_digest(sites: np.ndarray, counts: Mapping[str, Any]) -> str:
    content = sites.astype("<u8").tobytes() + json.dumps(counts, sort_keys=True).encode()
    return format_digest(digest_bytes(content))


def _check_footer(footer: pq.FileMetaData) -> None:
    """Raise ValueError for more than a run has: a few compressed bytes may
    stand for any number of rows.
    """
    groups = [footer.row_group(index) for index in range(footer.num_row_groups)]
    columns = [group.column(index) for group in groups for index in range(group.num_columns)]
    sizes: dict[str, tuple[int, list[int]]] = {
        "rows": (MAX_ROWS, [max(footer.num_rows, sum(group.num_rows for group in groups))]),
        "values": (MAX_VALUES, [column.num_values for column in columns]),
        "bytes": (MAX_BYTES, [column.total_uncompressed_size for column in columns]),
    }
    for what, (limit, numbers) in sizes.items():
        require_at_most(limit, sum(numbers), what)


class SiteTable:
    """The sites of a run's programs by id; reads new files when it meets an unknown id."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / SITES
        self._loaded: set[Path] = set()
        self._rows: dict[int, SiteRow] = {}

    def rows(self, ids: Sequence[int]) -> tuple[SiteRow, ...]:
        """Return the sites with these ids; raise KeyError for an unknown id."""
        try:
            return tuple([self._rows[identity] for identity in ids])
        except KeyError:
            for path in sorted({*self._folder.glob("*.parquet")} - self._loaded):
                self._rows.update((row.id, row) for row in _read_sites(path))
                self._loaded.add(path)
        return tuple([self._rows[identity] for identity in ids])


def _read_sites(path: Path) -> list[SiteRow]:
    def parse(content: bytes) -> list[SiteRow]:
        table = _table_of(content, SITE_SCHEMA)
        ids = table.column("site").to_pylist()
        rows = [
            SiteRow.of(msgspec.convert(row, Site))
            for row in table.drop_columns(["site"]).to_pylist()
        ]
        digest_of_ids = digest_bytes(np.array(ids, dtype=np.uint64).tobytes())
        if [row.id for row in rows] != ids or table_name(digest_of_ids) != path.name:
            raise ValueError("its content does not match the id in its name")
        texts = {text for row in rows for text in (row.site.arguments, row.site.choice)}
        if not all(isinstance(json.loads(text), dict) for text in texts):
            raise ValueError("the arguments of a site are no JSON object")
        return rows

    return parse_file(path, parse)


def read_program(folder: Path, sites: SiteTable, identity: int) -> Program:
    """Return a program; raise ReferenceFormatError if its file is damaged
    or has a different version.
    """

    def parse(content: bytes) -> Program:
        columns = _program_columns(content)
        counts = columns.counts
        try:
            rows = sites.rows(columns.ids)
        except KeyError as error:
            raise ValueError(
                f"no file in {folder / SITES} has site {error} of this program"
            ) from error
        program = Program(
            rows=rows,
            num_read=columns.num_read,
            read=columns.read,
            ops_seen=counts.ops_seen,
            ops_digested=counts.ops_digested,
            # the columns are cached, and programs must not share a dictionary
            ops_skipped=dict(counts.ops_skipped),
            opaque_regions=counts.opaque_regions,
        )
        if program.id != identity:
            raise ValueError("its content does not match the id in its name")
        return program

    return parse_file(table_path(folder, PROGRAMS, identity), parse)


class _Counts(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    ops_seen: int
    ops_digested: int
    ops_skipped: dict[str, int]
    opaque_regions: tuple[str, ...]


class _Columns(NamedTuple):
    ids: tuple[int, ...]
    num_read: np.ndarray
    read: np.ndarray
    counts: _Counts


@lru_cache(_NUM_CACHED_FILES)
def _program_columns(content: bytes) -> _Columns:
    table = _table_of(content, PROGRAM_SCHEMA)
    counts = json.loads(table.schema.metadata[b"counts"])
    ids, inputs = table.column("site").combine_chunks(), table.column("inputs").combine_chunks()
    read = inputs.flatten()
    if ids.null_count or inputs.null_count or read.null_count:
        raise ValueError("it lacks a value")
    readers = np.repeat(np.arange(len(ids)), inputs.value_lengths())
    if np.any(read.to_numpy() < 0) or np.any(read.to_numpy() > readers):
        raise ValueError("a site reads one that comes after it")
    if table.schema.metadata[b"digest"].decode() != _counts_digest(ids.to_numpy(), counts):
        raise ValueError("its sites or counts do not match its digest")
    return _Columns(
        ids=tuple(ids.to_pylist()),
        num_read=inputs.value_lengths().to_numpy(),
        read=read.to_numpy(),
        counts=msgspec.convert(counts, _Counts),
    )


def read_layout(folder: Path, identity: int) -> Layout:
    """Return a layout; raise ReferenceFormatError if its file is damaged or
    of a different version.
    """

    def parse(content: bytes) -> Layout:
        layout, digest = _layout_of(content)
        if digest != identity:
            raise ValueError("its content does not match the id in its name")
        return layout

    return parse_file(table_path(folder, LAYOUTS, identity), parse)


@lru_cache(_NUM_CACHED_FILES)
def _layout_of(content: bytes) -> tuple[Layout, int]:
    """Return a layout and its id.

    Most sites share an entry, so this makes and digests each distinct one once.
    """
    table = _table_of(content, LAYOUT_SCHEMA)
    first_rows, kinds = _distinct_rows(table)
    rows = [None if row["dtype"] is None else row for row in table.take(first_rows).to_pylist()]
    distinct = msgspec.convert({"entries": rows}, Layout).entries
    digests = np.array([entry_digest(entry) for entry in distinct], dtype=np.uint64)
    return Layout(tuple([distinct[kind] for kind in kinds.tolist()])), layout_id(digests[kinds])


def _distinct_rows(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return the position of each distinct row, and for every row an index into those.

    Compares rows by a 64-bit hash; in a collision, the id of the layout would not match.
    """
    keys = np.zeros(len(table), dtype=np.uint64)
    for column in table.columns:
        # combining copies
        values = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if pa.types.is_list(values.type):
            bounds = values.offsets.to_numpy()
            items = values.values[bounds[0] : bounds[-1]].to_numpy().astype(np.uint64)
            lengths, starts = np.diff(bounds), bounds - bounds[0]
            places = np.arange(len(items)) - np.repeat(starts[:-1], lengths)
            totals = np.concatenate(
                ([np.uint64(0)], np.cumsum(_mixed(items, places.astype(np.uint64))))
            )
            column_keys = np.diff(totals[starts]) + lengths.astype(np.uint64)
        else:
            column_keys = (
                values.dictionary_encode(null_encoding="encode")
                .indices.to_numpy()
                .astype(np.uint64)
            )
        keys = _mixed(column_keys, keys)
    _, first_rows, kinds = np.unique(keys, return_index=True, return_inverse=True)
    return first_rows, kinds


def _mixed(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return 64 bits that depend on every bit of a value and of its place."""
    mixed: np.ndarray = (values ^ (places + np.uint64(1)) * _MULTIPLIER) * _MULTIPLIER
    mixed ^= mixed >> np.uint64(32)
    mixed *= _MULTIPLIER
    mixed ^= mixed >> np.uint64(29)
    return mixed


def _table_of(content: bytes, schema: pa.Schema) -> pa.Table:
    """Return the columns of a table but ``position``; raise ValueError if it is not a
    whole one of this version.
    """
    # pq.read_table would load pyarrow.dataset, which takes longer
    paths = {pa.string(): "{}", pa.list_(pa.string()): "{}.list.element"}
    texts = [paths[field.type].format(field.name) for field in schema if field.type in paths]
    file = pq.ParquetFile(pa.BufferReader(content), read_dictionary=texts)
    version = (file.schema_arrow.metadata or {}).get(b"format_version")
    if version != str(FORMAT_VERSION).encode():
        raise ValueError(f"it has format version {version!r} instead of {FORMAT_VERSION}")
    if not file.schema_arrow.equals(_with_indices(schema)):
        raise ValueError("its columns are not those of a run")
    _check_footer(file.metadata)
    table = file.read(use_threads=False)
    table.validate(full=True)
    require_at_most(MAX_BYTES, sum(map(_num_bytes_of_text, table.columns)), "bytes of text")
    if not np.array_equal(table.column("position"), np.arange(len(table))):
        raise ValueError("its rows are not in order")
    plain = schema.with_metadata(table.schema.metadata)
    return table.cast(plain).drop_columns(["position"])


def _with_indices(schema: pa.Schema) -> pa.Schema:
    """Return a schema whose text is read as indices into distinct texts:
    every row may repeat one long text.
    """
    indices = pa.dictionary(pa.int32(), pa.string())
    types = {pa.string(): indices, pa.list_(pa.string()): pa.list_(indices)}
    return pa.schema([(field.name, types.get(field.type, field.type)) for field in schema])


def _num_bytes_of_text(column: pa.ChunkedArray) -> int:
    total = 0
    for chunk in column.chunks:
        values = chunk.flatten() if pa.types.is_list(chunk.type) else chunk
        if pa.types.is_dictionary(values.type):
            texts = values.dictionary
            ends = np.frombuffer(texts.buffers()[1], dtype="<i4")[
                texts.offset : texts.offset + len(texts) + 1
            ]
            total += int(np.diff(ends)[values.indices.drop_null().to_numpy()].sum(dtype=np.int64))
    return total
