"""Format version 1 of a run folder, pinned: names, columns, bytes; read here without det_callbacks.

A failure means that older versions cannot read what this one writes: FORMAT_VERSION has to go up, and CHANGELOG.md to
say so.
"""

import json
import struct
from pathlib import Path
from typing import Any, get_args

import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from stored_runs import append, create, digests_of, record, small_layout, small_program

from det_callbacks.runs.program import Role
from det_callbacks.runs.stream import END_OF_STREAM, encode_step

PROGRAM = "6992a2677c253c5c"
LAYOUT = "9d790b2ff43dcaba"

STREAM_COLUMNS = {
    "step": "int64",
    "epoch": "int32",
    "program_id": "uint64",
    "layout_id": "uint64",
    "chain": "uint64",
    "digests": "list<item: uint64 not null>",
}
PROGRAM_COLUMNS = {
    "position": "int32",
    "phase": "string",
    "module": "string",
    "op": "string",
    "occurrence": "int32",
    "output": "int32",
    "role": "string",
    "name": "string",
    "arguments": "string",
    "varying": "list<element: string>",
    "inputs": "list<element: int32>",
    "recomputed": "bool",
    "source": "list<element: string>",
}
ROLES = {"output", "value", "argument", "input", "generator", "named", "samples", "sent", "delivered"} | {
    "graph",
    "entering",
    "inside",
    "left",
}
# how a site is written where its digest is taken
COMPACT: dict[str, Any] = {"separators": (",", ":"), "ensure_ascii": False}

LAYOUT_COLUMNS = {
    "position": "int32",
    "dtype": "string",
    "shape": "list<element: int64>",
    "stride": "list<element: int64>",
    "detail": "string",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("runs") / "run", range(6), range(2))


def columns(schema: pa.Schema) -> dict[str, str]:
    return {field.name: str(field.type) for field in schema}


def steps_by_hand(path: Path) -> tuple[pa.Schema, list[dict[str, Any]]]:
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
        return reader.schema, reader.read_all().to_pylist()


def xxh3(content: bytes) -> int:
    """Return the digest of fewer than 256 KiB: XXH3-64 of the bytes, padded with zeros to whole KiB."""
    return xxhash.xxh3_64_intdigest(content + bytes(-len(content) % 1024))


def test_the_names_in_the_folder(run: Path) -> None:
    assert sorted(path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()) == [
        f"layouts/{LAYOUT}.parquet",
        f"programs/{PROGRAM}.parquet",
        "rank-00000/attempt-000.arrows",
        "rank-00000/attempt-000.segment-001.arrows",
        "run.json",
    ]


def test_run_json(run: Path) -> None:
    content = json.loads((run / "run.json").read_text())
    digest = content.pop("digest")
    assert set(content) == {
        "format_version",
        "digest_version",
        "det_callbacks_version",
        "run_id",
        "purpose",
        "keeps",
        "world_size",
        "attempts",
        "selection",
        "environment",
        "settings",
        "replay",
        "keep_tensors",
        "recorded_by",
    }
    assert (content["format_version"], content["digest_version"]) == (1, 1)
    assert (content["purpose"], content["keeps"], content["world_size"]) == ("record", "all", 1)
    assert content["attempts"] == [{"segments": 2, "resumed_from": []}]
    assert digest == f"{xxh3(json.dumps(content, sort_keys=True).encode()):016x}"


def test_the_stream(run: Path) -> None:
    schema, rows = steps_by_hand(run / "rank-00000" / "attempt-000.arrows")
    assert columns(schema) == STREAM_COLUMNS
    run_id = json.loads((run / "run.json").read_text())["run_id"]
    assert schema.metadata == {
        b"format_version": b"1",
        b"digest_version": b"1",
        b"run_id": run_id.encode(),
        b"rank": b"0",
        b"attempt": b"0",
        b"segment": b"0",
    }
    assert [(row["step"], row["epoch"]) for row in rows] == [(step, step // 4) for step in range(6)]
    assert {(f"{row['program_id']:016x}", f"{row['layout_id']:016x}") for row in rows} == {(PROGRAM, LAYOUT)}
    assert [row["digests"] for row in rows] == [digests_of(step).tolist() for step in range(6)]
    second, rows = steps_by_hand(run / "rank-00000" / "attempt-000.segment-001.arrows")
    assert second.metadata[b"segment"] == b"1"
    assert [row["step"] for row in rows] == [0, 1]


def test_the_chain(run: Path) -> None:
    for name in ("attempt-000.arrows", "attempt-000.segment-001.arrows"):
        chain = 0
        for row in steps_by_hand(run / "rank-00000" / name)[1]:
            numbers = [chain, row["step"], row["epoch"], row["program_id"], row["layout_id"], *row["digests"]]
            chain = xxh3(struct.pack(f"<{len(numbers)}Q", *numbers))
            assert row["chain"] == chain


def test_the_roles_of_a_site() -> None:
    assert set(get_args(Role)) == ROLES


def test_the_bytes_of_a_step() -> None:
    message = bytes(encode_step(5, 1, 0x1122334455667788, 2**64 - 1, 9, digests_of(5)))
    assert message[:16].hex() == "ffffffffa80100001400000000000000"
    assert message[-72:] == struct.pack(
        "<5Q2i3Q", 5, 1, 0x1122334455667788, 2**64 - 1, 9, 0, 3, *digests_of(5).tolist()
    )
    assert END_OF_STREAM.hex() == "ffffffff00000000"


@pytest.mark.parametrize("num_sites", [1, 100, 5_000])
def test_a_step_costs_8_bytes_a_site_and_at_most_512(tmp_path: Path, num_sites: int) -> None:
    path = tmp_path / "run"
    writer = create(path)
    file = path / "rank-00000" / "attempt-000.arrows"
    append(writer, [0], num_sites=num_sites)
    before = file.stat().st_size
    append(writer, range(1, 101), num_sites=num_sites)
    assert file.stat().st_size - before <= 100 * (8 * num_sites + 512)
    writer.close(complete=True)
    assert file.stat().st_size == writer.bytes_written


def test_a_program(run: Path) -> None:
    table = pq.read_table(run / "programs" / f"{PROGRAM}.parquet")
    assert columns(table.schema) == PROGRAM_COLUMNS
    first, second, _ = table.to_pylist()
    assert first == {
        "position": 0,
        "phase": "forward",
        "module": "net.größe",
        "op": "aten.mul.Tensor",
        "occurrence": 0,
        "output": 0,
        "role": "named",
        "name": "batch[0]",
        "arguments": '{"other":2.0}',
        "varying": ["lr"],
        "inputs": [0],
        "recomputed": True,
        "source": ["train.py:41 in forward", "train.py:7 in main"],
    }
    assert (second["position"], second["name"], second["inputs"]) == (1, None, [])
    metadata = table.schema.metadata
    counts = {"ops_seen": 9, "ops_digested": 3, "ops_skipped": {"view": 6}, "opaque_regions": ["net.fused"]}
    assert set(metadata) == {b"format_version", b"counts", b"digest"}
    assert metadata[b"format_version"] == b"1"
    assert json.loads(metadata[b"counts"]) == counts
    content = json.dumps([table.column("source").to_pylist(), counts], sort_keys=True).encode()
    assert metadata[b"digest"].decode() == f"{xxh3(content):016x}"


def test_the_name_of_a_program(run: Path) -> None:
    rows = pq.read_table(run / "programs" / f"{PROGRAM}.parquet").to_pylist()
    lines = [
        json.dumps([row[name] for name in PROGRAM_COLUMNS if name not in ("position", "source")], **COMPACT)
        for row in rows
    ]
    assert f"{xxh3(chr(10).join(lines).encode()):016x}" == PROGRAM


def test_a_layout(run: Path) -> None:
    table = pq.read_table(run / "layouts" / f"{LAYOUT}.parquet")
    assert columns(table.schema) == LAYOUT_COLUMNS
    assert table.schema.metadata == {b"format_version": b"1"}
    tensor = {"dtype": "float32", "shape": [2, 3], "stride": [3, 1], "detail": ""}
    nothing = dict.fromkeys(tensor)
    rows = table.to_pylist()
    assert rows == [{"position": index, **(nothing if index == 1 else tensor)} for index in range(3)]
    entries = [
        b"null" if row["dtype"] is None else json.dumps([row[name] for name in tensor], separators=(",", ":")).encode()
        for row in rows
    ]
    assert f"{xxh3(struct.pack('<3Q', *[xxh3(entry) for entry in entries])):016x}" == LAYOUT


def test_the_identities_are_what_they_were() -> None:
    assert (f"{small_program().id:016x}", f"{small_layout().id:016x}") == (PROGRAM, LAYOUT)


def test_polars_reads_all_of_it(run: Path) -> None:
    steps = polars.read_ipc_stream(run / "rank-00000" / "attempt-000.arrows")
    assert steps.columns == list(STREAM_COLUMNS)
    assert steps["step"].to_list() == list(range(6))
    assert steps["digests"].to_list() == [digests_of(step).tolist() for step in range(6)]
    program = polars.read_parquet(run / "programs" / "*.parquet")
    assert program.columns == list(PROGRAM_COLUMNS)
    assert program["op"].to_list() == ["aten.mul.Tensor"] * 3
    assert program["source"][0].to_list() == ["train.py:41 in forward", "train.py:7 in main"]
    layout = polars.read_parquet(run / "layouts" / f"{LAYOUT}.parquet")
    assert layout["dtype"].to_list() == ["float32", None, "float32"]


def test_nothing_in_the_folder_is_a_pickle(run: Path) -> None:
    beginnings = {path.suffix: path.read_bytes()[:4] for path in run.rglob("*") if path.is_file()}
    assert beginnings == {".json": b'{\n "', ".parquet": b"PAR1", ".arrows": b"\xff\xff\xff\xff"}
