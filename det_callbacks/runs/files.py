"""Writes, reads and checks the files of a run that are written once."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from det_callbacks.digest.host import digest_bytes, format_digest
from det_callbacks.errors import ReferenceFormatError
from det_callbacks.runs.disk import make_folder, replace_atomically
from det_callbacks.runs.program import (
    Layout,
    Program,
    Site,
    SiteRow,
    TensorLayout,
    entry_digest,
    layout_id,
    without_surrogates,
)

FORMAT_VERSION = 1

MANIFEST = "run.json"
PROGRAMS = "programs"
SITES = "sites"
LAYOUTS = "layouts"
SOURCES = "sources"
NONDETERMINISTIC_FILE = "nondeterministic_ops.json"

PROGRAM_SCHEMA = pa.schema({"position": pa.int32(), "site": pa.uint64(), "inputs": pa.list_(pa.int32())})
SITE_SCHEMA = pa.schema(
    {
        **{"position": pa.int32(), "site": pa.uint64()},
        **dict.fromkeys(("phase", "module", "op"), pa.string()),
        "output": pa.int32(),
        **dict.fromkeys(("role", "name", "arguments"), pa.string()),
        "varying": pa.list_(pa.string()),
        **{"recomputed": pa.bool_(), "source": pa.list_(pa.string())},
    }
)
LAYOUT_SCHEMA = pa.schema(
    {
        **{"position": pa.int32(), "dtype": pa.string()},
        **dict.fromkeys(("shape", "stride"), pa.list_(pa.int64())),
        "detail": pa.string(),
    }
)

_SHARED = 4
"""How many programs and layouts are kept by their files' content: two runs that are compared have the same ones."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / the golden ratio, as in Fibonacci hashing

READ_ERRORS = (msgspec.MsgspecError, pa.ArrowException, OSError, ValueError, KeyError, TypeError, RecursionError)

Content = TypeVar("Content")


def damaged(path: Path, what: object) -> ReferenceFormatError:
    """Return the error for a damaged file."""
    return ReferenceFormatError(
        f"{path} is damaged: {what}. Other files of the run were not checked; record the run again, or restore this "
        "file from a copy.",
        str(path),
    )


def read_json(path: Path, kind: type[Content]) -> Content:
    """Return the content of a JSON file; raise ReferenceFormatError, which names a field of the wrong type."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except READ_ERRORS as error:
        raise damaged(path, error) from error


class _Sealed(msgspec.Struct):
    digest: str
    content: msgspec.Raw


def seal(content: object, *, run_id: str) -> bytes:
    """Return a line of JSON with a digest of the content and the run's id."""
    text = msgspec.json.encode(content)
    return msgspec.json.encode(_Sealed(digest=_seal_digest(text, run_id), content=msgspec.Raw(text)))


def unseal(line: bytes, kind: type[Content], *, run_id: str) -> Content:
    """Return the sealed content; raise ValueError if it was changed, or is from another run."""
    sealed = msgspec.json.decode(line, type=_Sealed)
    if sealed.digest != _seal_digest(bytes(sealed.content), run_id):
        raise ValueError("its content does not match its digest")
    return msgspec.json.decode(sealed.content, type=kind)


def _seal_digest(content: bytes, run_id: str) -> str:
    return format_digest(digest_bytes(run_id.encode() + content))


def write_sites(folder: Path, rows: Sequence[SiteRow]) -> None:
    """Write sites to a file; programs refer to them by id."""
    sites = [row.site for row in rows]
    names = (name for name in SITE_SCHEMA.names if name not in ("position", "site"))
    columns: dict[str, Any] = {name: [getattr(site, name) for site in sites] for name in names}
    columns["site"] = ids = np.array([row.id for row in rows], dtype=np.uint64)
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
        columns = {name: [entry and getattr(entry, name) for entry in layout.entries] for name in names}
        _write_table(path, LAYOUT_SCHEMA, columns)


class SiteTable:
    """The sites of a run's programs by id; reads new files when it meets an unknown id."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / SITES
        self._read: set[Path] = set()
        self._rows: dict[int, SiteRow] = {}

    def rows(self, ids: Sequence[int]) -> tuple[SiteRow, ...]:
        """Return the sites with these ids; raise KeyError for an unknown id."""
        try:
            return tuple([self._rows[identity] for identity in ids])
        except KeyError:
            for path in sorted({*self._folder.glob("*.parquet")} - self._read):
                self._rows.update((row.id, row) for row in _read_sites(path))
                self._read.add(path)
        return tuple([self._rows[identity] for identity in ids])


def _read_sites(path: Path) -> list[SiteRow]:
    def make(content: bytes) -> list[SiteRow]:
        table = _table_of(content, SITE_SCHEMA)
        ids = table.column("site").to_pylist()
        rows = [SiteRow.of(msgspec.convert(row, Site)) for row in table.drop_columns(["site"]).to_pylist()]
        if [row.id for row in rows] != ids or table_name(
            digest_bytes(np.array(ids, dtype=np.uint64).tobytes())
        ) != path.name:
            raise ValueError("its content does not match the id in its name")
        return rows

    return _read(path, make)


def read_program(folder: Path, sites: SiteTable, identity: int) -> Program:
    """Return a program; raise ReferenceFormatError if its file is damaged or has a different version."""

    def make(content: bytes) -> Program:
        ids, num_read, read, counts = _program_columns(content)
        try:
            rows = sites.rows(ids)
        except KeyError as error:
            raise ValueError(f"no file in {folder / SITES} has site {error} of this program") from error
        program = Program(rows=rows, num_read=num_read, read=read, **counts)
        if program.id != identity:
            raise ValueError("its content does not match the id in its name")
        return program

    return _read(table_path(folder, PROGRAMS, identity), make)


class _Columns(NamedTuple):
    ids: list[int]
    num_read: np.ndarray
    read: np.ndarray
    counts: dict[str, Any]


@lru_cache(_SHARED)
def _program_columns(content: bytes) -> _Columns:
    table = _table_of(content, PROGRAM_SCHEMA)
    counts = json.loads(table.schema.metadata[b"counts"])
    ids, inputs = table.column("site").combine_chunks(), table.column("inputs").combine_chunks()
    if table.schema.metadata[b"digest"].decode() != _counts_digest(ids.to_numpy(), counts):
        raise ValueError("its sites or counts do not match its digest")
    num_read, read = inputs.value_lengths().to_numpy(), inputs.flatten().to_numpy()
    return _Columns(ids.to_pylist(), num_read, read, msgspec.structs.asdict(msgspec.convert(counts, _Counts)))


class _Counts(msgspec.Struct, forbid_unknown_fields=True):
    ops_seen: int
    ops_digested: int
    ops_skipped: dict[str, int]
    opaque_regions: tuple[str, ...]


def read_layout(folder: Path, identity: int) -> Layout:
    """Return a layout; raise ReferenceFormatError if its file is damaged or of a different version."""

    def make(content: bytes) -> Layout:
        layout, found = _layout_of(content)
        if found != identity:
            raise ValueError("its content does not match the id in its name")
        return layout

    return _read(table_path(folder, LAYOUTS, identity), make)


@lru_cache(_SHARED)
def _layout_of(content: bytes) -> tuple[Layout, int]:
    """Return a layout and its id. Most sites share an entry, so this makes and digests each distinct one once."""
    table = _table_of(content, LAYOUT_SCHEMA)
    first_rows, kinds = _distinct_rows(table)
    rows = [None if row["dtype"] is None else row for row in table.take(first_rows).to_pylist()]
    distinct = msgspec.convert({"entries": rows}, Layout).entries
    digests = np.array([entry_digest(entry) for entry in distinct], dtype=np.uint64)
    return Layout(tuple(map(distinct.__getitem__, kinds.tolist()))), layout_id(digests[kinds])


def _distinct_rows(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return the position of each distinct row, and for every row an index into those.

    Compares rows by a 64-bit hash; in a collision, the id of the layout would not match.
    """
    keys = np.zeros(len(table), dtype=np.uint64)
    for column in table.columns:
        values = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()  # combining copies
        if pa.types.is_list(values.type):
            lengths = np.diff(values.offsets)
            places = np.arange(lengths.max(initial=0)) < lengths[:, None]
            padded = np.zeros(places.shape, dtype=np.int64)
            padded[places] = values.flatten()
            numbers = [lengths, *padded.T]
        else:
            numbers = [values.dictionary_encode(null_encoding="encode").indices.to_numpy()]
        for one in numbers:
            keys = keys * _MULTIPLIER + one.astype(np.uint64)
    _, first_rows, kinds = np.unique(keys, return_index=True, return_inverse=True)
    return first_rows, kinds


def write_source_text(folder: Path, text: Mapping[str, Sequence[str]]) -> None:
    """Write the text of source lines: "train.py:41" -> the lines 40, 41 and 42."""
    content = msgspec.json.encode({without_surrogates(place): lines for place, lines in text.items()}, order="sorted")
    path = folder / SOURCES / f"{format_digest(digest_bytes(content))}.json"
    if not path.exists():
        make_folder(path.parent)
        replace_atomically(path, content)


def read_source_text(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return the text of source lines, except lines that changed between attempts."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for path in sorted((folder / SOURCES).glob("*.json")):
        text = read_json(path, dict[str, tuple[str, ...]])
        if path.stem != format_digest(digest_bytes(path.read_bytes())):
            raise damaged(path, "its content does not match the digest in its name")
        for place, lines in text.items():
            found.setdefault(place, set()).add(lines)
    return {place: lines.pop() for place, lines in found.items() if len(lines) == 1}


def table_path(folder: Path, kind: str, identity: int) -> Path:
    """Return the path of a program, a layout or a table of sites."""
    return folder / kind / table_name(identity)


def table_name(identity: int) -> str:
    """Return the name of the file of a program, a layout or a table of sites."""
    return f"{format_digest(identity)}.parquet"


def rank_folder(rank: int) -> str:
    """Return the name of a process's folder."""
    return f"rank-{rank:05d}"


def stream_path(folder: Path, rank: int, attempt: int, number: int) -> Path:
    """Return the path of a process's steps; ``number`` is the number of the fit in the attempt."""
    segment = f".segment-{number:03d}" if number else ""
    return folder / rank_folder(rank) / f"attempt-{attempt:03d}{segment}.arrows"


def _write_table(path: Path, schema: pa.Schema, columns: dict[str, Any], **metadata: str) -> None:
    columns["position"] = list(range(len(next(iter(columns.values())))))
    metadata["format_version"] = str(FORMAT_VERSION)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, schema=schema.with_metadata(metadata)), sink, compression="zstd")
    replace_atomically(path, sink.getvalue().to_pybytes())


def _read(path: Path, make: Callable[[bytes], Content]) -> Content:
    """Return the result of ``make`` for a file's content; ``make`` raises ValueError if the content is wrong."""
    try:
        return make(path.read_bytes())
    except ReferenceFormatError:  # from another file, which ``make`` reads
        raise
    except READ_ERRORS as error:
        raise damaged(path, error) from error


def _table_of(content: bytes, schema: pa.Schema) -> pa.Table:
    """Return the columns of a table but ``position``; raise ValueError if it is not a whole one of this version."""
    # pq.read_table would load pyarrow.dataset, which takes longer
    table = pq.ParquetFile(pa.BufferReader(content)).read(use_threads=False)
    table.validate(full=True)
    version = (table.schema.metadata or {}).get(b"format_version")
    if version != str(FORMAT_VERSION).encode():
        raise ValueError(f"it has format version {version!r} instead of {FORMAT_VERSION}")
    if not table.schema.equals(schema):
        raise ValueError("its columns are not those of a run")
    if not np.array_equal(table.column("position"), np.arange(len(table))):
        raise ValueError("its rows are not in order")
    return table.drop_columns(["position"])


def _counts_digest(sites: np.ndarray, counts: Mapping[str, Any]) -> str:
    content = sites.astype("<u8").tobytes() + json.dumps(counts, sort_keys=True).encode()
    return format_digest(digest_bytes(content))
