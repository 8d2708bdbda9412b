"""The files of a run that are written once: run.json, programs and layouts.

Each is checked against a digest of its content when it is read, so that a flipped bit is an error and never other
content: programs and layouts against their ids, which are their names; run.json, and what a program's id leaves out
(source lines, counts), against a digest kept inside.
"""

import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from det_callbacks.errors import ReferenceFormatError, ReferenceNotFoundError, RunExistsError
from det_callbacks.host_digest import DIGEST_VERSION, digest_bytes, format_digest
from det_callbacks.runs.program import Layout, Program, Site, TensorLayout

FORMAT_VERSION = 1

MANIFEST = "run.json"
PROGRAMS = "programs"
LAYOUTS = "layouts"
NONDETERMINISTIC_FILE = "nondeterministic_ops.json"

PROGRAM_SCHEMA = pa.schema(
    [
        ("position", pa.int32()),
        ("phase", pa.string()),
        ("module", pa.string()),
        ("op", pa.string()),
        ("occurrence", pa.int32()),
        ("output", pa.int32()),
        ("role", pa.string()),
        ("name", pa.string()),
        ("arguments", pa.string()),
        ("varying", pa.list_(pa.string())),
        ("inputs", pa.list_(pa.int32())),
        ("recomputed", pa.bool_()),
        ("source", pa.list_(pa.string())),
    ]
)

LAYOUT_SCHEMA = pa.schema(
    [
        ("position", pa.int32()),
        ("dtype", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("stride", pa.list_(pa.int64())),
        ("detail", pa.string()),
    ]
)

_OUR_NAME = re.compile(
    rf"{MANIFEST}|{PROGRAMS}|{LAYOUTS}|verdict\.json|report\.html|rank-\d{{5}}"
    r"|\.(run\.json|verdict\.json|report\.html)\.\d+\.tmp"
)

_READ_ERRORS = (pa.ArrowException, OSError, ValueError, KeyError, TypeError, IndexError, UnicodeError)


def damaged(path: Path, what: object) -> ReferenceFormatError:
    """Return the error of a file that cannot be what was written."""
    return ReferenceFormatError(
        f"{path} is damaged: {what}. The other files of the run were not looked at further; record the run again, or "
        "restore this file from a copy.",
        str(path),
    )


def replace_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees all of it or what was there before."""
    # processes of two nodes may have one number, and write the same program into a shared folder
    temporary = path.with_name(f".{path.name}.{os.getpid()}{uuid.uuid4().int % 10**9:09d}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:  # Ctrl-C too: raised again
        temporary.unlink(missing_ok=True)
        raise


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write run.json with the versions and a digest of its content."""
    content = {"format_version": FORMAT_VERSION, "digest_version": DIGEST_VERSION, **manifest}
    # as a reader will see it: keys that are numbers become text, which sorts otherwise
    content = json.loads(json.dumps(content, allow_nan=False))
    content["digest"] = _manifest_digest(content)
    replace_atomically(folder / MANIFEST, json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of run.json.

    Raises:
        ReferenceNotFoundError: there is no run.
        ReferenceFormatError: it is damaged, or of another format or digest version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ReferenceNotFoundError(_not_found(folder), str(folder))
    try:
        raw = path.read_bytes()
        content = json.loads(raw)
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, "it is empty" if path.stat().st_size == 0 else f"it is not JSON ({error})") from error
    if not isinstance(content, dict) or "format_version" not in content:
        raise damaged(path, "it is not the run.json of a recorded run")
    for name, known in (("format_version", FORMAT_VERSION), ("digest_version", DIGEST_VERSION)):
        if content.get(name) != known:
            raise ReferenceFormatError(
                f"{path} has {name} {content.get(name)!r}, and this version of det_callbacks reads {known}. Use the "
                "version that recorded it, or record the run again.",
                str(path),
            )
    if content.get("digest") != _manifest_digest(content):
        raise damaged(path, "its content is not what its digest says")
    return content


def write_program(folder: Path, program: Program) -> None:
    """Write a program, unless it is there."""
    path = program_path(folder, program.id)
    if path.exists():
        return
    sites = program.sites
    columns: dict[str, list[Any]] = {
        name: [getattr(site, name) for site in sites] for name in PROGRAM_SCHEMA.names if name != "position"
    }
    columns["position"] = list(range(len(sites)))
    for name in ("varying", "inputs"):
        columns[name] = [list(value) for value in columns[name]]
    # a path that is not UTF-8 has surrogates in it, which no text column takes
    sources = [[line.encode(errors="backslashreplace").decode() for line in site.source] for site in sites]
    columns["source"] = sources
    counts = {
        "ops_seen": program.ops_seen,
        "ops_digested": program.ops_digested,
        "ops_skipped": dict(program.ops_skipped),
        "opaque_regions": list(program.opaque_regions),
    }
    metadata = {
        "format_version": str(FORMAT_VERSION),
        "counts": json.dumps(counts),
        "digest": format_digest(_counts_digest(sources, counts)),
    }
    _write_table(path, pa.table(columns, schema=PROGRAM_SCHEMA.with_metadata(metadata)))


def read_program(folder: Path, identity: int) -> Program:
    """Return a program.

    Raises:
        ReferenceFormatError: the file is missing, damaged or of another format version.
    """
    path = program_path(folder, identity)
    table = _read_table(path, PROGRAM_SCHEMA)
    try:
        metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
        counts = json.loads(metadata["counts"])
        rows = table.drop_columns(["position"]).to_pylist()
        for row in rows:
            for name in ("varying", "inputs", "source"):
                row[name] = tuple(row[name])
        program = Program(
            sites=tuple(Site(**row) for row in rows),
            ops_seen=counts["ops_seen"],
            ops_digested=counts["ops_digested"],
            ops_skipped=counts["ops_skipped"],
            opaque_regions=tuple(counts["opaque_regions"]),
        )
        sources = [list(site.source) for site in program.sites]
        is_whole = program.id == identity and metadata["digest"] == format_digest(_counts_digest(sources, counts))
    except _READ_ERRORS as error:
        raise damaged(path, f"it does not hold a program ({error})") from error
    if not is_whole:
        raise damaged(path, "its content is not what its name says")
    return program


def write_layout(folder: Path, layout: Layout) -> None:
    """Write a layout, unless it is there; some 2 ms for 2,000 sites."""
    path = layout_path(folder, layout.id)
    if path.exists():
        return
    entries = layout.entries
    columns = {
        "position": list(range(len(entries))),
        "dtype": [entry and entry.dtype for entry in entries],
        "shape": [entry and entry.shape for entry in entries],
        "stride": [entry and entry.stride for entry in entries],
        "detail": [entry and entry.detail for entry in entries],
    }
    metadata = {"format_version": str(FORMAT_VERSION)}
    _write_table(path, pa.table(columns, schema=LAYOUT_SCHEMA.with_metadata(metadata)))


def read_layout(folder: Path, identity: int) -> Layout:
    """Return a layout.

    Raises:
        ReferenceFormatError: the file is missing, damaged or of another format version.
    """
    path = layout_path(folder, identity)
    table = _read_table(path, LAYOUT_SCHEMA)
    try:
        layout = Layout(
            entries=tuple(
                None
                if row["dtype"] is None
                else TensorLayout(
                    dtype=row["dtype"], shape=tuple(row["shape"]), stride=tuple(row["stride"]), detail=row["detail"]
                )
                for row in table.to_pylist()
            )
        )
        is_whole = layout.id == identity
    except _READ_ERRORS as error:
        raise damaged(path, f"it does not hold a layout ({error})") from error
    if not is_whole:
        raise damaged(path, "its content is not what its name says")
    return layout


def make_room(path: Path, *, overwrite: bool) -> None:
    """Make a folder and see to it that no run is in it; with ``overwrite`` delete one that is, and nothing else.

    Raises:
        RunExistsError: there is a run, or something else under our names, or a file.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise RunExistsError(
            f"{path} is a file, or one of the folders above it is; a run is a folder. Nothing was changed. Name "
            "another place to record to.",
            str(path),
        ) from error
    ours = sorted(child for child in path.iterdir() if _OUR_NAME.fullmatch(child.name))
    if ours and not overwrite:
        raise RunExistsError(
            f"{path} holds a run already ({', '.join(child.name for child in ours[:4])}). Nothing was changed. "
            "Record to another folder, replace the run with overwrite=True, or compare with it "
            '(DeterminismCallback: mode="verify"; ObserverContext: reference=...).',
            str(path),
        )
    # run.json first: what a kill leaves of the others is no run
    for child in sorted(ours, key=lambda child: child.name != MANIFEST):
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()


def program_path(folder: Path, identity: int) -> Path:
    """Return where a program lies."""
    return folder / PROGRAMS / f"{format_digest(identity)}.parquet"


def layout_path(folder: Path, identity: int) -> Path:
    """Return where a layout lies."""
    return folder / LAYOUTS / f"{format_digest(identity)}.parquet"


def rank_folder(rank: int) -> str:
    """Return the name of the folder of a process."""
    return f"rank-{rank:05d}"


def stream_path(folder: Path, rank: int, attempt: int, number: int) -> Path:
    """Return where the steps of a process lie; ``number`` counts the fits of that attempt."""
    segment = f".segment-{number:03d}" if number else ""
    return folder / rank_folder(rank) / f"attempt-{attempt:03d}{segment}.arrows"


def _write_table(path: Path, table: pa.Table) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    replace_atomically(path, sink.getvalue().to_pybytes())


def _read_table(path: Path, schema: pa.Schema) -> pa.Table:
    try:
        table = pq.read_table(pa.BufferReader(path.read_bytes()), use_threads=False)
        table.validate(full=True)
    except FileNotFoundError as error:
        raise damaged(path, "it is missing") from error
    except _READ_ERRORS as error:
        raise damaged(path, f"it is not Parquet ({error})") from error
    version = (table.schema.metadata or {}).get(b"format_version")
    if version != str(FORMAT_VERSION).encode():
        raise damaged(path, f"it has format version {version!r} instead of {FORMAT_VERSION}")
    if not table.schema.equals(schema):
        raise damaged(path, "its columns are others than a run's")
    if not np.array_equal(table.column("position"), np.arange(len(table))):
        raise damaged(path, "its rows are not in order")
    return table


def _counts_digest(sources: list[list[str]], counts: Mapping[str, Any]) -> int:
    return digest_bytes(json.dumps([sources, dict(counts)], sort_keys=True).encode())


def _manifest_digest(content: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != "digest"}
    return format_digest(digest_bytes(json.dumps(rest, sort_keys=True).encode()))


def _not_found(folder: Path) -> str:
    if not folder.exists():
        return f"There is no run at {folder}: the folder does not exist. Record one there first."
    if not folder.is_dir():
        return f"{folder} is a file; a run is a folder. Name the folder that a run was recorded in."
    inside = sorted(child.name for child in folder.iterdir() if (child / MANIFEST).is_file())
    if inside:
        return f"{folder} is not a run (no {MANIFEST}), but these folders in it are: {', '.join(inside[:10])}."
    return f"{folder} is not a run: it has no {MANIFEST}. Record one there first."


def read_list(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a small JSON file of a run, [] where there is none.

    Raises:
        ReferenceFormatError: it is damaged.
    """
    try:
        entries = json.loads(path.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise damaged(path, f"it cannot be read ({error})") from error
    if isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries):
        return entries
    raise damaged(path, "it is no list of objects")
