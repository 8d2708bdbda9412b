import json
import os
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec import structs
from stored_runs import append, create, record, small_layout, small_program

from det_callbacks.errors import (
    ReferenceFormatError,
    ReferenceNotFoundError,
    RunExistsError,
    SelectionError,
    WriteError,
)
from det_callbacks.runs import tables
from det_callbacks.runs.files import replace_atomically, table_path
from det_callbacks.runs.manifest import Manifest, _digest, read_manifest, write_manifest
from det_callbacks.runs.program import Layout, Program, SiteRow, TensorLayout
from det_callbacks.runs.replacement import put_in_place
from det_callbacks.runs.selection import Selection
from det_callbacks.runs.source_text import write_source_text
from det_callbacks.runs.store import Run, make_room
from det_callbacks.verdict import as_json


def manifest_with(**changes: object) -> Manifest:
    return Manifest(**{"selection": Selection(), "environment": {}, "run_id": "ab12", **changes})


def write_program(folder: Path, program: Program) -> None:
    (folder / "sites").mkdir(exist_ok=True)
    tables.write_sites(folder, program.rows)
    tables.write_program(folder, program)


def read_program(folder: Path, identity: int) -> Program:
    return tables.read_program(folder, tables.SiteTable(folder), identity)


TABLES = [
    ("programs", small_program(), small_program(op="aten.add.Tensor"), write_program, read_program),
    ("layouts", small_layout(3), small_layout(4), tables.write_layout, tables.read_layout),
]


def test_a_layout_is_read_kind_by_kind(tmp_path, monkeypatch):
    kinds = [
        None,
        TensorLayout(dtype="float32", shape=(2, 3), stride=(3, 1)),
        TensorLayout(dtype="float32", shape=(2,), stride=(3,)),
        TensorLayout(dtype="float32", shape=(), stride=(2, 3)),
        TensorLayout(dtype="float32", shape=(2, 3), stride=(3, 1), detail="sparse_coo"),
        TensorLayout(dtype="int64", shape=(2, 3), stride=(3, 1)),
        TensorLayout(dtype="int64", shape=(0, -1), stride=(1, 0, 0)),
        TensorLayout(dtype="int64", shape=(0,), stride=()),
    ]
    layout = Layout(entries=tuple(kinds[index * index % 11 % len(kinds)] for index in range(900)))
    (tmp_path / "layouts").mkdir()
    tables.write_layout(tmp_path, layout)
    digested = Mock(side_effect=tables.entry_digest)
    monkeypatch.setattr(tables, "entry_digest", digested)
    assert tables.read_layout(tmp_path, layout.id) == layout
    assert digested.call_count == len({*layout.entries})


@pytest.mark.parametrize(("kind", "ours", "theirs", "write", "read"), TABLES)
def test_a_table_that_is_not_what_was_written_is_refused(tmp_path, kind, ours, theirs, write, read):
    (tmp_path / kind).mkdir()
    path = table_path(tmp_path, kind, ours.id)
    with pytest.raises(ReferenceFormatError, match="No such file"):
        read(tmp_path, ours.id)
    write(tmp_path, theirs)
    table_path(tmp_path, kind, theirs.id).rename(path)
    with pytest.raises(ReferenceFormatError, match="does not match the id in its name"):
        read(tmp_path, ours.id)
    path.unlink()
    write(tmp_path, ours)
    whole = pq.read_table(path)
    metadata = whole.schema.metadata
    changes = [
        (whole.replace_schema_metadata({**metadata, b"format_version": b"1"}), "format version"),
        (whole.replace_schema_metadata(None), "format version"),
        (whole.append_column("more", pa.array([1, 2, 3])), "columns are not those of a run"),
        (
            whole.set_column(0, whole.schema.field(0), pa.array([0, 2, 1], pa.int32())),
            "rows are not in order",
        ),
    ]
    if kind == "programs":  # what its name leaves out
        other_lines = structs.replace(ours.sites[0], source=("train.py:42 in forward",))
        ids = pa.array(
            [SiteRow.of(other_lines).id, *(row.id for row in ours.rows[1:])], pa.uint64()
        )
        changes.append(
            (whole.set_column(1, whole.schema.field("site"), ids), "its sites or counts")
        )
        others = [
            {**metadata, b"counts": counts}
            for counts in (metadata[b"counts"].replace(b"6}", b"7}"), b"")
        ]
        changes += [(whole.replace_schema_metadata(other), "is damaged") for other in others]
    for changed, says in changes:
        pq.write_table(changed, path)
        with pytest.raises(ReferenceFormatError, match=says) as caught:
            read(tmp_path, ours.id)
        assert str(path) in str(caught.value)


def test_programs_of_one_file_share_no_counts(tmp_path):
    (tmp_path / "programs").mkdir()
    program = replace(small_program(), ops_skipped={"aten.view.default": 2})
    write_program(tmp_path, program)
    first, second = read_program(tmp_path, program.id), read_program(tmp_path, program.id)
    first.ops_skipped["aten.view.default"] += 1
    assert second == read_program(tmp_path, program.id) == program


def test_a_site_that_is_not_what_its_file_says_or_is_in_none_is_refused(tmp_path):
    (tmp_path / "programs").mkdir()
    program = small_program()
    write_program(tmp_path, program)
    assert read_program(tmp_path, program.id) == program
    (path,) = (tmp_path / "sites").iterdir()
    whole = pq.read_table(path)
    modules = pa.array(["net.other", *whole.column("module").to_pylist()[1:]])
    at = whole.schema.get_field_index("module")
    for changed in (whole.set_column(at, whole.schema.field("module"), modules), whole.slice(0, 2)):
        pq.write_table(changed, path)
        with pytest.raises(
            ReferenceFormatError, match="does not match the id in its name"
        ) as caught:
            read_program(tmp_path, program.id)
        assert str(path) in str(caught.value)
    path.unlink()
    with pytest.raises(
        ReferenceFormatError, match=r"no file in .*sites has site \d+ of this program"
    ) as caught:
        read_program(tmp_path, program.id)
    assert str(table_path(tmp_path, "programs", program.id)) in str(caught.value)


def test_programs_share_what_their_sites_are(tmp_path):
    writer = create(tmp_path / "run")
    programs = [small_program(num_sites) for num_sites in (3, 5, 4)]
    first, *rest = small_program(4).sites
    programs.append(Program.of([first, *(structs.replace(site, inputs=(0,)) for site in rest)]))
    for program in programs:
        writer.put_program(program)
    writer.close(complete=True)
    assert len({program.id for program in programs}) == 4, (
        "what a site reads, and how many there are, is identity"
    )
    (path,) = (tmp_path / "run" / "sites").iterdir()
    assert len(pq.read_table(path)) == 2
    run = Run.open(tmp_path / "run")
    assert [run.program(program.id) for program in programs] == programs
    assert [site.occurrence for site in run.program(programs[1].id).sites] == [0, 0, 1, 2, 3]


def test_the_text_of_source_lines_is_kept_once_and_only_where_it_is_certain(tmp_path):
    text = {
        "train.py:41": ("a", "b", "c"),
        "train.py:1": ("first", "second"),
        "caf\udce9.py:7": ("x", "y", "z"),
    }
    writer = create(tmp_path / "run")
    odd = os.fsdecode(b"caf\xe9.py:7 in forward")  # a path that is not UTF-8
    site = structs.replace(small_program().sites[0], source=(odd,))
    for op in ("aten.mul.Tensor", "aten.add.Tensor"):
        writer.put_program(replace(small_program(op=op), text=text))
    writer.put_program(program := Program.of((site,)))
    writer.close(complete=True)
    (path,) = (tmp_path / "run" / "sources").iterdir()
    run = Run.open(tmp_path / "run")
    assert run.source_text("train.py:41 in forward") == ((40, "a"), (41, "b"), (42, "c"))
    assert run.source_text("train.py:1 in forward") == ((1, "first"), (2, "second"))
    (source,) = run.program(program.id).sites[0].source
    assert run.source_text(source)[1] == (7, "y")
    assert run.source_text("train.py:42 in forward") == run.source_text("train.py") == ()
    write_source_text(tmp_path / "run", {"train.py:41": ("a", "changed", "c")})
    assert Run.open(tmp_path / "run").source_text("train.py:41 in forward") == ()
    path.write_bytes(path.read_bytes().replace(b'"b"', b'"B"'))
    with pytest.raises(ReferenceFormatError, match=path.name):
        Run.open(tmp_path / "run").source_text("train.py:1 in forward")


def whole(**changes: object) -> bytes:
    content = {**as_json(manifest_with()), **changes}
    return json.dumps({**content, "digest": _digest(content)}).encode()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "Input data was truncated"),
        (b"{}", "has format_version None"),
        (b"[1]", "Expected `object`, got `array`"),
        (b"\xff\xfe", "is damaged"),
        (b'{"a":' + b"[" * 200_000, "is damaged"),
        (b'{"format_version": "1", "digest_version": 1}', "has format_version '1'"),
        (b'{"format_version": 2}', "has digest_version None"),
        (b'{"format_version": 2, "digest_version": 1}', "does not match its digest"),
        (whole(world_size=0), "Expected `int` >= 1 - at `$.world_size`"),
        (whole(attempts=[]), "length >= 1 - at `$.attempts`"),
        (
            whole(attempts=[{"segments": 1, "resumed_from": [{"step": 4}]}]),
            "missing required field `segment`",
        ),
        (whole(selection={"level": "everything"}), "level must be one of op, module, state"),
        (whole(selection={"level": "state"}), "entries that this version"),
        (whole(programs="../elsewhere", path="/"), "entries that this version"),
    ],
)
def test_a_manifest_that_is_foreign_or_wrong_is_refused(tmp_path, content, says):
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(ReferenceFormatError, match=re.escape(says)) as caught:
        read_manifest(tmp_path)
    assert str(tmp_path / "run.json") in str(caught.value)


def test_a_run_is_left_alone_unless_asked_and_only_our_own_names_are_deleted(tmp_path, monkeypatch):
    run = record(tmp_path / "run", range(3))
    theirs = {"notes.txt", "rank-1/x", "run.json.bak", "checkpoints/last.ckpt", "my programs/x"}
    for name in theirs:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("theirs")
    (run / ".run.json.77.tmp").write_text("ours: a writer was killed")
    (run / ".disagreement").mkdir()
    (run / ".disagreement" / "run.json").write_text("ours: a resumed recording was killed")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "data").write_text("theirs")
    (run / "rank-00007").symlink_to(tmp_path / "elsewhere")

    def contents() -> dict[str, bytes]:
        return {
            path.relative_to(run).as_posix(): path.read_bytes()
            for path in run.rglob("*")
            if path.is_file()
        }

    before = contents()
    with pytest.raises(RunExistsError, match="Nothing was changed") as caught:
        make_room(run)
    assert all(
        word in str(caught.value)
        for word in (
            str(run),
            "overwrite=True",
            "Hydra: determinism.overwrite=true",
            "another folder",
            "verify",
        )
    )
    with pytest.raises(
        RunExistsError, match=r"To verify, pass another folder for the results \(current of"
    ) as caught:
        make_room(run, purpose="verify")
    assert "overwrite" not in str(caught.value)
    assert contents() == before
    write_manifest(make_room(run, overwrite=True), manifest_with())
    put_in_place(run)
    assert set(contents()) == {*theirs, "run.json"}
    assert (tmp_path / "elsewhere" / "data").exists()
    assert read_manifest(run).run_id == "ab12"
    (run / "run.json").unlink()
    assert make_room(run) == run
    theirs = (
        "programs/1.parquet",
        "sources/mine.py",
        "layouts/mine",
        "rank-00000/x",
        "report.html",
        "verdict.json",
    )
    for number, name in enumerate(theirs):
        path = tmp_path / f"theirs-{number}"
        (path / name).parent.mkdir(parents=True)
        (path / name).touch()
        with pytest.raises(RunExistsError, match=name.partition("/")[0]):
            make_room(path)
        if name != "verdict.json":  # which a refused verification leaves alone in its folder
            with pytest.raises(RunExistsError, match=r"no run\.json, so they may be yours"):
                make_room(path, overwrite=True)
        assert (path / name).exists()


def test_what_a_process_left_that_was_killed_before_its_run_json_is_in_nobodys_way(tmp_path):
    path = tmp_path / "run"
    for name in ("programs", "layouts", "rank-00000"):
        (path / name).mkdir(parents=True)
    (path / ".run.json.77.tmp").touch()
    (path / "rank-00000" / "attempt-000.arrows").touch()
    (path / "notes.txt").touch()
    assert make_room(path) == path
    assert [child.name for child in path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("moment", range(6))
def test_a_kill_while_one_run_takes_the_place_of_another_loses_neither(
    tmp_path, monkeypatch, moment, is_read
):
    run = record(tmp_path / "run", range(3))
    append(create(run, overwrite=True), [0], complete=False).close(complete=False)
    rename, moments = Path.rename, iter(range(moment))

    def killed(path: Path, target: Path) -> Path:
        if next(moments, None) is None:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            put_in_place(run)
    if moment:
        with pytest.raises(
            ReferenceNotFoundError, match=r"these folders in it are runs: \.(complete|moving)"
        ):
            read_manifest(run)
    if is_read:
        assert Run.open(run).rank(0).num_steps == (1 if moment else 3)
    incomplete = (
        r"holds an incomplete run: .*\. Nothing was changed\. Continue .* "
        r"determinism\.overwrite=true"
    )
    with pytest.raises(RunExistsError, match=incomplete if moment else "already holds a run"):
        make_room(run)
    assert Run.open(run).rank(0).num_steps == (1 if moment else 3)
    append(create(run, overwrite=True), range(2), complete=True)
    assert Run.open(run).rank(0).num_steps == 2
    assert {path.name for path in run.iterdir()} == {
        "run.json",
        "programs",
        "sites",
        "layouts",
        "rank-00000",
    }


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    replace_atomically(path, b"before")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError("no space left")))
    with pytest.raises(WriteError, match="no space"):
        replace_atomically(path, b"after")
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("file", b"before")]


def test_only_the_named_steps_are_selected():
    selection = Selection(only_steps=(7, 3, 7))
    assert [step for step in range(10) if selection.selects_step(step)] == [3, 7]
    assert (selection.is_every_step, selection.shown_steps) == (False, "only_steps=[3, 7]")
    for only_steps in ((), (-1,), (1.0,), (True,), "812", 812, ("812",)):
        with pytest.raises(
            SelectionError, match=r"only_steps must be step numbers >= 0, such as \[812\]"
        ):
            Selection(only_steps=only_steps)
    with pytest.raises(SelectionError, match=r"only_steps and every_n_steps=2 both select"):
        Selection(only_steps=(4,), every_n_steps=2)
