"""The files of a run that are written once, and how any of them is read and checked."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from det_callbacks.digest.host import digest_bytes, format_digest
from det_callbacks.errors import ReferenceFormatError
from det_callbacks.runs.disk import make_folder, replace_atomically
from det_callbacks.runs.program import Layout, Program, Site, TensorLayout

FORMAT_VERSION = 1

MANIFEST = "run.json"
PROGRAMS = "programs"
LAYOUTS = "layouts"
SOURCES = "sources"
NONDETERMINISTIC_FILE = "nondeterministic_ops.json"

PROGRAM_SCHEMA = pa.schema(
    {
        "position": pa.int32(),
        **dict.fromkeys(("phase", "module", "op"), pa.string()),
        **dict.fromkeys(("occurrence", "output"), pa.int32()),
        **dict.fromkeys(("role", "name", "arguments"), pa.string()),
        **{"varying": pa.list_(pa.string()), "inputs": pa.list_(pa.int32())},
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

# What is kept of a program beside its sites.
_COUNTS = ("ops_seen", "ops_digested", "ops_skipped", "opaque_regions")

READ_ERRORS = (msgspec.MsgspecError, pa.ArrowException, OSError, ValueError, KeyError, TypeError, RecursionError)

Content = TypeVar("Content")
Table = TypeVar("Table", Program, Layout)


def damaged(path: Path, what: object) -> ReferenceFormatError:
    """Return the error of a file that cannot be what was written."""
    return ReferenceFormatError(
        f"{path} is damaged: {what}. The other files of the run were not looked at further; record the run again, or "
        "restore this file from a copy.",
        str(path),
    )


def read_json(path: Path, kind: type[Content]) -> Content:
    """Return the content of a JSON file; ReferenceFormatError, which names the field, where it is not of that type."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except READ_ERRORS as error:
        raise damaged(path, error) from error


class _Sealed(msgspec.Struct):
    digest: str
    content: msgspec.Raw


def seal(content: object, *, run_id: str) -> bytes:
    """Return something of a run as one line of JSON, with the digest of that and of the run's id."""
    text = msgspec.json.encode(content)
    return msgspec.json.encode(_Sealed(digest=_seal_digest(text, run_id), content=msgspec.Raw(text)))


def unseal(line: bytes, kind: type[Content], *, run_id: str) -> Content:
    """Return what was sealed; ValueError where it is something else, or of another run."""
    sealed = msgspec.json.decode(line, type=_Sealed)
    if sealed.digest != _seal_digest(bytes(sealed.content), run_id):
        raise ValueError("its content is not what its digest says")
    return msgspec.json.decode(sealed.content, type=kind)


def _seal_digest(content: bytes, run_id: str) -> str:
    return format_digest(digest_bytes(run_id.encode() + content))


def write_program(folder: Path, program: Program) -> None:
    """Write a program, unless it is there."""
    path = table_path(folder, PROGRAMS, program.id)
    if path.exists():
        return
    columns = {field.name: [getattr(site, field.name) for site in program.sites] for field in fields(Site)}
    columns["source"] = sources = [[without_surrogates(line) for line in site.source] for site in program.sites]
    counts = {name: getattr(program, name) for name in _COUNTS}
    _write_table(path, PROGRAM_SCHEMA, columns, counts=json.dumps(counts), digest=_counts_digest(sources, counts))


def write_layout(folder: Path, layout: Layout) -> None:
    """Write a layout, unless it is there; some 2 ms for 2,000 sites."""
    path = table_path(folder, LAYOUTS, layout.id)
    if not path.exists():
        names = [field.name for field in fields(TensorLayout)]
        columns = {name: [entry and getattr(entry, name) for entry in layout.entries] for name in names}
        _write_table(path, LAYOUT_SCHEMA, columns)


def read_program(folder: Path, identity: int) -> Program:
    """Return a program; ReferenceFormatError where its file is damaged or of another format version."""

    def make(table: pa.Table) -> Program:
        metadata = table.schema.metadata
        counts = json.loads(metadata[b"counts"])
        program = msgspec.convert({**counts, "sites": table.to_pylist()}, Program)
        if metadata[b"digest"].decode() != _counts_digest([list(site.source) for site in program.sites], counts):
            raise ValueError("its source lines or counts are not what its digest says")
        return program

    return _read_table(table_path(folder, PROGRAMS, identity), PROGRAM_SCHEMA, identity, make)


def read_layout(folder: Path, identity: int) -> Layout:
    """Return a layout; ReferenceFormatError as of a program."""

    def make(table: pa.Table) -> Layout:
        entries = [None if row["dtype"] is None else row for row in table.to_pylist()]
        return msgspec.convert({"entries": entries}, Layout)

    return _read_table(table_path(folder, LAYOUTS, identity), LAYOUT_SCHEMA, identity, make)


def write_source_text(folder: Path, text: Mapping[str, Sequence[str]]) -> None:
    """Write the text of source lines: "train.py:41" -> the lines 40, 41 and 42."""
    content = msgspec.json.encode({without_surrogates(place): lines for place, lines in text.items()}, order="sorted")
    path = folder / SOURCES / f"{format_digest(digest_bytes(content))}.json"
    if not path.exists():
        make_folder(path.parent)
        replace_atomically(path, content)


def read_source_text(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return the text of the source lines of all programs; none of lines whose text changed from attempt to attempt."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for path in sorted((folder / SOURCES).glob("*.json")):
        text = read_json(path, dict[str, tuple[str, ...]])
        if path.stem != format_digest(digest_bytes(path.read_bytes())):
            raise damaged(path, "its content is not what its name says")
        for place, lines in text.items():
            found.setdefault(place, set()).add(lines)
    return {place: lines.pop() for place, lines in found.items() if len(lines) == 1}


def table_path(folder: Path, kind: str, identity: int) -> Path:
    """Return where a program or a layout lies."""
    return folder / kind / f"{format_digest(identity)}.parquet"


def rank_folder(rank: int) -> str:
    """Return the name of the folder of a process."""
    return f"rank-{rank:05d}"


def stream_path(folder: Path, rank: int, attempt: int, number: int) -> Path:
    """Return where the steps of a process lie; ``number`` counts the fits of that attempt."""
    segment = f".segment-{number:03d}" if number else ""
    return folder / rank_folder(rank) / f"attempt-{attempt:03d}{segment}.arrows"


def _write_table(path: Path, schema: pa.Schema, columns: dict[str, list[Any]], **metadata: str) -> None:
    columns["position"] = list(range(len(next(iter(columns.values())))))
    metadata["format_version"] = str(FORMAT_VERSION)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, schema=schema.with_metadata(metadata)), sink, compression="zstd")
    replace_atomically(path, sink.getvalue().to_pybytes())


def _read_table(path: Path, schema: pa.Schema, identity: int, make: Callable[[pa.Table], Table]) -> Table:
    """Return what is made of a table, whose id has to be the file's name."""
    try:
        # pq.read_table would load pyarrow.dataset, which takes longer than the table
        table = pq.ParquetFile(pa.BufferReader(path.read_bytes())).read(use_threads=False)
        table.validate(full=True)
        version = (table.schema.metadata or {}).get(b"format_version")
        if version != str(FORMAT_VERSION).encode():
            raise ValueError(f"it has format version {version!r} instead of {FORMAT_VERSION}")
        if not table.schema.equals(schema):
            raise ValueError("its columns are others than a run's")
        if not np.array_equal(table.column("position"), np.arange(len(table))):
            raise ValueError("its rows are not in order")
        content = make(table.drop_columns(["position"]))
        if content.id != identity:
            raise ValueError("its content is not what its name says")
    except READ_ERRORS as error:
        raise damaged(path, error) from error
    return content


def without_surrogates(text: str) -> str:
    """Return a text that JSON and text columns take: bytes that are no text in the process's locale become UTF-8.

    A path or an argument has them where it is not UTF-8, or the locale is C; what is no UTF-8 either is escaped.
    """
    try:
        content = text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # surrogates that stand for no bytes
        content = text.encode(errors="backslashreplace")
    return content.decode(errors="backslashreplace")


def _counts_digest(sources: list[list[str]], counts: Mapping[str, Any]) -> str:
    return format_digest(digest_bytes(json.dumps([sources, counts], sort_keys=True).encode()))
