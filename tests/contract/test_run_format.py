"""Format version 2 of a run folder, pinned: names, columns, bytes; read here without det_callbacks.

A failure means that older versions cannot read what this one writes: FORMAT_VERSION has to go up,
and CHANGELOG.md to say so.
"""

import json
import struct
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from stored_runs import digests_of, record, small_layout, small_program

from det_callbacks.runs.program import Role, Site, SiteRow

PROGRAM = "f33c3b2683cf5aca"
SITES = "8e6d869a8e2077e9"
LAYOUT = "9d790b2ff43dcaba"
STREAMS = ("attempt-000.arrows", "attempt-000.segment-001.arrows")
EVIDENCE = tuple(name.replace(".arrows", ".evidence.arrows") for name in STREAMS)
RUN_JSON = """
    format_version digest_version det_callbacks_version run_id purpose world_size attempts selection environment
    settings replay keep_tensors recorded_by
"""  # noqa: E501  # a text
STREAM_COLUMNS = {
    "step": "int64",
    "epoch": "int32",
    **dict.fromkeys(("program_id", "layout_id", "chain"), "uint64"),
    "digests": "list<item: uint64 not null>",
}
PROGRAM_COLUMNS = {"position": "int32", "site": "uint64", "inputs": "list<element: int32>"}
SITE_COLUMNS = {
    **{"position": "int32", "site": "uint64"},
    **dict.fromkeys(("phase", "module", "op"), "string"),
    "output": "int32",
    **dict.fromkeys(("role", "subject", "of", "part", "arguments"), "string"),
    "varying": "list<element: string>",
    "recomputed": "bool",
    "source": "list<element: string>",
    **{"eager_op": "string", "eager_line": "string", "eager_call": "int32", "eager_calls": "int32"},
    "choice": "string",
}
LAYOUT_COLUMNS = {
    "position": "int32",
    "dtype": "string",
    **dict.fromkeys(("shape", "stride"), "list<element: int64>"),
    "detail": "string",
}
ROLES = (
    "output value argument input generator named samples sent delivered graph region_input "
    "graph_output"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("runs") / "run", range(6), range(2))


def columns(schema: pa.Schema) -> dict[str, str]:
    return {field.name: str(field.type) for field in schema}


def xxh3(content: bytes) -> int:
    """Return the digest of fewer than 256 KiB: XXH3-64 of the bytes,
    padded with zeros to whole KiB.
    """
    return xxhash.xxh3_64_intdigest(content + bytes(-len(content) % 1024))


def test_the_names_in_the_folder_and_no_pickle(run):
    beginnings = {
        path.relative_to(run).as_posix(): path.read_bytes()[:4]
        for path in run.rglob("*")
        if path.is_file()
    }
    assert beginnings == {
        f"layouts/{LAYOUT}.parquet": b"PAR1",
        f"programs/{PROGRAM}.parquet": b"PAR1",
        f"sites/{SITES}.parquet": b"PAR1",
        **{f"rank-00000/{name}": b"\xff\xff\xff\xff" for name in (*STREAMS, *EVIDENCE)},
        "run.json": b'{\n "',
    }


def test_run_json(run):
    content = json.loads((run / "run.json").read_text())
    digest = content.pop("digest")
    assert set(content) == set(RUN_JSON.split())
    assert (content["format_version"], content["digest_version"]) == (2, 1)
    assert (content["purpose"], content["world_size"]) == ("record", 1)
    assert content["attempts"] == [{"segments": 2, "resumed_from": [], "readings": []}]
    assert digest == f"{xxh3(json.dumps(content, sort_keys=True).encode()):016x}"


def test_the_streams_and_their_chains(run):
    run_id = json.loads((run / "run.json").read_text())["run_id"]
    versions = {b"format_version": b"2", b"digest_version": b"1"}
    for segment, (name, num_steps) in enumerate(zip(STREAMS, (6, 2), strict=True)):
        stream = pa.ipc.open_stream((run / "rank-00000" / name).read_bytes())
        rows = stream.read_all().to_pylist()
        assert columns(stream.schema) == STREAM_COLUMNS
        place = {
            b"run_id": run_id.encode(),
            b"rank": b"0",
            b"attempt": b"0",
            b"segment": str(segment).encode(),
        }
        assert stream.schema.metadata == {**versions, **place}
        assert [(row["step"], row["epoch"]) for row in rows] == [
            (step, step // 4) for step in range(num_steps)
        ]
        chain = 0
        for step, row in enumerate(rows):
            assert (f"{row['program_id']:016x}", f"{row['layout_id']:016x}") == (PROGRAM, LAYOUT)
            assert row["digests"] == digests_of(step).tolist()
            numbers = [
                chain,
                row["step"],
                row["epoch"],
                row["program_id"],
                row["layout_id"],
                *row["digests"],
            ]
            chain = xxh3(struct.pack(f"<{len(numbers)}Q", *numbers))
            assert row["chain"] == chain


def xxh3_of_json(content: object) -> int:
    return xxh3(json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode())


def test_the_sites_and_their_ids(run):
    table = pq.read_table(run / "sites" / f"{SITES}.parquet")
    assert columns(table.schema) == SITE_COLUMNS
    assert table.schema.metadata == {b"format_version": b"2"}
    assert set(get_args(Role)) == set(ROLES.split())
    first, second = (tuple(row.values()) for row in table.to_pylist())
    assert first[2:] == (
        *("forward", "net.größe", "aten.mul.Tensor", 0, "named", "tensor", "batch[0]", ""),
        *('{"other":2.0}', ["lr"], True),
        ["train.py:41 in forward", "train.py:7 in main"],
        *("", "", 0, 0, "{}"),
    )
    assert second[2:] == (
        "backward",
        "net",
        "aten.mul.Tensor",
        0,
        "output",
        "",
        "",
        "",
        "{}",
        [],
        False,
        [],
        *("", "", 0, 0, "{}"),
    )
    ids = [xxh3_of_json(row[2:]) for row in (first, second)]
    assert [row[:2] for row in (first, second)] == [*enumerate(ids)]
    assert f"{xxh3(struct.pack('<2Q', *ids)):016x}" == SITES


def test_every_column_of_a_site_is_in_its_id_and_what_explains_it_is_not_in_its_kind():
    place: Any = {"phase": "forward", "module": "net", "role": "output"}
    plain = SiteRow.of(Site(**place))
    changes: dict[str, Any] = {
        **dict.fromkeys(("phase", "module", "op", "of", "part", "eager_op", "eager_line"), "other"),
        **{"output": 1, "role": "value", "subject": "tensor", "arguments": '{"p":1}'},
        **{"varying": ("p",), "recomputed": True, "source": ("a.py:1",)},
        **{"eager_call": 1, "eager_calls": 1, "choice": '{"XBLOCK":1}'},
    }
    assert changes.keys() == {*SITE_COLUMNS} - {"position", "site"}
    explains = {"source", "eager_op", "eager_line", "eager_call", "eager_calls", "choice"}
    for name, value in changes.items():
        row = SiteRow.of(Site(**{**place, name: value}))
        assert row.id != plain.id, name
        assert (row.kind == plain.kind) == (name in explains), name


def test_a_program_and_its_name(run):
    sites = {
        row["site"]: row for row in pq.read_table(run / "sites" / f"{SITES}.parquet").to_pylist()
    }
    table = pq.read_table(run / "programs" / f"{PROGRAM}.parquet")
    assert columns(table.schema) == PROGRAM_COLUMNS
    ids, inputs = table.column("site").to_pylist(), table.column("inputs").to_pylist()
    first, second = sites
    assert (ids, inputs) == ([first, second, second], [[0], [], []])
    counts = {
        "ops_seen": 9,
        "ops_digested": 3,
        "ops_skipped": {"view": 6},
        "opaque_regions": ["net.fused"],
    }
    metadata = table.schema.metadata
    assert set(metadata) == {b"format_version", b"counts", b"digest"}
    assert (metadata[b"format_version"], json.loads(metadata[b"counts"])) == (b"2", counts)
    content = struct.pack("<3Q", *ids) + json.dumps(counts, sort_keys=True).encode()
    assert metadata[b"digest"].decode() == f"{xxh3(content):016x}"
    # source lines, and what is known of kernels, are no part of the name, nor are positions
    kinds = [xxh3_of_json([*sites[one].values()][2:-6]) for one in ids]
    content = (
        struct.pack("<3Q", *kinds) + struct.pack("<3i", *map(len, inputs)) + struct.pack("<i", 0)
    )
    assert f"{xxh3(content):016x}" == f"{small_program().id:016x}" == PROGRAM


def test_a_layout_and_its_name(run):
    table = pq.read_table(run / "layouts" / f"{LAYOUT}.parquet")
    assert columns(table.schema) == LAYOUT_COLUMNS
    assert table.schema.metadata == {b"format_version": b"2"}
    tensor = ["float32", [2, 3], [3, 1], ""]
    assert [[*row.values()] for row in table.to_pylist()] == [
        [0, *tensor],
        [1, *[None] * 4],
        [2, *tensor],
    ]
    entry = xxh3(json.dumps(tensor, separators=(",", ":")).encode())
    name = xxh3(struct.pack("<3Q", entry, xxh3(b"null"), entry))
    assert f"{name:016x}" == f"{small_layout().id:016x}" == LAYOUT
