"""A run folder of somebody who means harm: nothing leaves it, no number in it is believed,
and no text in it acts.
"""

import io
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec import structs
from stored_runs import (
    ENVIRONMENT,
    SELECTION,
    append,
    create,
    digests_of,
    record,
    small_layout,
    small_program,
)

from det_callbacks.cli import main
from det_callbacks.compare.record import RankRecord, Tally, write_record
from det_callbacks.compare.rounding import ROUNDING_FILE
from det_callbacks.errors import (
    DetCallbacksError,
    DivergenceError,
    ReferenceFormatError,
    WriteError,
)
from det_callbacks.report.console import Section, Table, to_text
from det_callbacks.runs import evidence, files, tables
from det_callbacks.runs.evidence import (
    EvidenceRow,
    NondeterministicOp,
    evidence_path,
    read_evidence,
)
from det_callbacks.runs.files import MAX_BYTES
from det_callbacks.runs.lock import FolderLock
from det_callbacks.runs.manifest import read_manifest, write_manifest
from det_callbacks.runs.metrics import Metric, Reading
from det_callbacks.runs.program import Layout, Program, Site, TensorLayout
from det_callbacks.runs.source_text import write_source_text
from det_callbacks.runs.store import Run
from det_callbacks.runs.writer import RunWriter
from det_callbacks.tensors.files import (
    KEPT,
    REPLAY,
    SavedStep,
    SavedTensor,
    StepWriter,
    tensor_path,
)
from det_callbacks.text import visible
from det_callbacks.verify.judge import compare_runs

MANIFEST = {"selection": SELECTION, "environment": ENVIRONMENT, "keep_tensors": ("*",)}
STREAM = "rank-00000/attempt-000.arrows"
OP = NondeterministicOp(
    op="aten.kthvalue", phase="forward", module="", source=(), message="-", is_allowed=True
)
TEXT = {"train.py:41": ("a", "b", "c"), "train.py:7": ("a", "b", "c")}
STEERING = "\x1b[2K\r\x9b2J\x85\u2028\u202e\u2066\u200f\u061c\x07"
ACTIVE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def whole_run(path: Path, seed: int = 0) -> Path:
    """Write a run that has every kind of file."""
    writer = RunWriter.create(path, manifest=MANIFEST)
    run_id = writer.manifest.run_id
    loss = Metric(dtype="float32", shape=(), digest=f"{seed:016x}", value="0.5")
    first, *rest = small_program().sites
    program, layout = Program.of((structs.replace(first, inputs=()), *rest)), small_layout()
    writer.put_program(replace(program, text=TEXT))
    writer.put_layout(layout)
    for kind in (KEPT, REPLAY):
        place = {
            "phase": "backward",
            "module": "net",
            "op": "aten.mul.Tensor",
            "output": 0,
            "occurrence": 0,
        }
        bits = np.zeros(24, dtype=np.uint8)
        options = {
            **place,
            "site_digest": f"{digests_of(1, seed=seed)[2]:016x}",
            "statistics": dict.fromkeys(("squares", "sum", "largest", "nan", "inf"), 0),
        }
        saved = SavedTensor(dtype="float32", shape=(2, 3), bits=bits, options=options)
        StepWriter(writer.stream, kind, run_id=run_id).write(
            1, {"backward/net:aten.mul.Tensor#1.0": saved}, {}
        )
    for step in range(3):
        writer.put_evidence([EvidenceRow(step, "batch start", "generator", "python", value=0)])
        writer.append(step, 0, program.id, layout.id, digests_of(step, seed=seed))
    writer.put_nondeterministic_ops([OP])
    writer.put_reading(
        Reading(where="epoch", number=2, step=2, epoch=0, metrics={"val_loss": loss})
    )
    writer.close(complete=True)
    return path


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return whole_run(tmp_path / "reference"), whole_run(tmp_path / "current", seed=1)


LINKS = [
    *(".lock", ".replacement", ".complete", ".moving", ".disagreement", ".run.json.77.tmp"),
    *(
        "run.json",
        "verdict.json",
        "report.html",
        "programs",
        "sites",
        "layouts",
        "sources",
        "rank-00000",
        "rank-00007",
    ),
    *(
        "programs/x.parquet",
        "sources/x.json",
        "rank-00000/record.json",
        "rank-00000/nondeterministic_ops.json",
    ),
    *(f"rank-00000/attempt-{name}" for name in ("000.arrows", "001.arrows", "001.evidence.arrows")),
    *(f"rank-00000/attempt-{name}.metrics.jsonl" for name in ("000", "001")),
    *(
        f"rank-00000/{kind}{name}"
        for kind in ("kept", "replay")
        for name in ("", "/attempt-001.segment-000")
    ),
    "rank-00000/kept/attempt-000.segment-000/step-000000001.safetensors",
]
ACTS: dict[str, Callable[[Path], object]] = {
    "record": lambda run: append(create(run), range(2), complete=True),
    "overwrite": lambda run: append(create(run, overwrite=True), range(2), complete=True),
    "verify": lambda run: append(create(run, purpose="verify"), range(2), complete=True),
    "resume": lambda run: append(
        RunWriter.resume(run, manifest=MANIFEST), range(2, 4), complete=True
    ),
    "re-record in pytest": lambda run: FolderLock(run).acquire(instead="-"),
    "read": Run.open,
}


@pytest.mark.parametrize("kind", ["file", "folder", "nothing"])
@pytest.mark.parametrize("act", ACTS)
def test_a_link_in_a_run_is_refused_by_name_and_nothing_outside_changes(tmp_path, act, kind):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("theirs")
    (elsewhere / "folder").mkdir()
    (elsewhere / "folder" / "data").write_text("theirs")
    before = {path: path.is_file() and path.read_bytes() for path in elsewhere.rglob("*")}
    whole = whole_run(tmp_path / "whole")
    for name in LINKS:
        run = tmp_path / "run"
        shutil.copytree(whole, run)
        link = run / name
        if link.is_dir():
            shutil.rmtree(link)
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(elsewhere / kind)
        with pytest.raises(DetCallbacksError, match=f"{re.escape(str(link))} ") as caught:
            ACTS[act](run)
        assert caught.value.exit_code == 2
        assert "link to" in str(caught.value)
        assert {
            path: path.is_file() and path.read_bytes() for path in elsewhere.rglob("*")
        } == before, name
        shutil.rmtree(run)


def test_links_of_the_user_are_followed(tmp_path):
    """The folder itself, its parents, and what is not of the run."""
    (tmp_path / "data").mkdir()
    (tmp_path / "parent").symlink_to(tmp_path / "data")
    record(tmp_path / "data" / "run", range(3))
    (tmp_path / "run").symlink_to(tmp_path / "parent" / "run")
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path)
    (tmp_path / "run" / "last.ckpt").symlink_to(tmp_path / "nowhere")
    append(create(tmp_path / "run", overwrite=True), range(2), complete=True)
    assert Run.open(tmp_path / "data" / "run").rank(0).num_steps == 2
    assert (tmp_path / "run" / "last.ckpt").is_symlink()


def test_a_link_that_appears_later_is_not_written_through(tmp_path):
    writer = create(tmp_path / "run")
    (tmp_path / "theirs").write_text("theirs")
    evidence_path(writer.stream).symlink_to(tmp_path / "theirs")
    with pytest.raises(WriteError, match=r"evidence\.arrows: it is a link to .*theirs; "):
        writer.put_evidence([EvidenceRow(1, "batch start", "generator", "python", value=0)])
    writer.close(complete=False)
    assert (tmp_path / "theirs").read_text() == "theirs"


def test_a_device_is_not_opened():
    with pytest.raises(OSError, match="it is not a regular file"):
        files.open_file(Path("/dev/zero"))


class Counted(io.BufferedReader):
    """A file that counts the bytes that are read from it."""

    total = 0

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(size)
        Counted.total += len(content)
        return content


def made_sparse(path: Path) -> None:
    os.truncate(path, 20 << 30)


def nested(path: Path) -> None:
    path.write_bytes(b'{"a":' + b"[" * 100_000)


def turned_into(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


CHANGES: dict[str, Callable[[Path], None]] = {
    "pipe": turned_into(os.mkfifo),
    "folder": turned_into(Path.mkdir),
    "device": turned_into(lambda path: path.symlink_to("/dev/zero")),
    "sparse": made_sparse,
    "nested": nested,
}
COMMANDS = (
    *(("show", "{current}"), ("show", "{current}", "--step", "1"), ("findings", "{current}")),
    *(
        ("diff", "{reference}", "{current}"),
        ("diff", "{reference}", "{current}", "--html", "{page}"),
    ),
    *(
        ("diff", "{reference}", "{current}", "--numerics"),
        ("export", "{current}", "--to", "{page}.export"),
    ),
    ("ops", "--used-by", "{current}"),
)


@pytest.mark.parametrize("change", CHANGES)
def test_every_reader_of_a_run_refuses_what_is_no_file_of_a_run(
    runs, tmp_path, capsys, monkeypatch, change
):
    def counted(path: Path, mode: str, *args: Any, opener: Any) -> Any:
        if mode != "rb":
            return open(path, mode, *args, opener=opener)
        return Counted(io.FileIO(path, "r", opener=opener))

    monkeypatch.setattr(files, "open", counted, False)
    reference, current = runs
    page = tmp_path / "page.html"
    for path in sorted(
        path for path in current.rglob("*") if path.is_file() and REPLAY not in path.parts
    ):
        content, refused = path.read_bytes(), 0
        CHANGES[change](path)
        for words in COMMANDS:
            Counted.total = 0
            shutil.rmtree(f"{page}.export", ignore_errors=True)
            status = main(
                [word.format(reference=reference, current=current, page=page) for word in words]
            )
            told = capsys.readouterr()
            shown = f"{path.name}: {words}: {told.err}"
            assert status != 2 or str(path) in told.err, shown
            assert "please report" not in told.err, shown
            assert Counted.total < 1 << 20, shown
            refused += status == 2 or path.name in told.out
        assert refused, f"nothing reads {path}"
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        path.write_bytes(content)
    assert main(["diff", str(reference), str(current)]) == 1


@pytest.mark.parametrize("change", CHANGES)
def test_files_beside_a_run_are_refused_alike(runs, tmp_path, change):
    reference, current = runs
    manifest = read_manifest(current)
    path = tmp_path / ROUNDING_FILE
    path.touch()
    CHANGES[change](path)
    with pytest.raises(ReferenceFormatError, match=re.escape(f"{path} is damaged")):
        compare_runs(reference, current, numerics=True, tolerance=tmp_path)
    write_manifest(current, replace(manifest, purpose="verify"))
    reference_id = read_manifest(reference).run_id
    ids = {"run_id": manifest.run_id, "reference_id": reference_id, "rank": 0, "steps": "all"}
    write_record(current, RankRecord(**ids, fits=(), tally=Tally()))
    path = current / "rank-00000" / "record.json"
    CHANGES[change](path)
    with pytest.raises(ReferenceFormatError, match=re.escape(str(path))):
        compare_runs(reference, current)


@pytest.mark.parametrize("change", CHANGES)
def test_saved_tensors_that_are_no_file_are_refused(runs, change):
    run = Run.open(runs[1])
    path = tensor_path(runs[1] / STREAM, REPLAY, 1)
    CHANGES[change](path)
    saved = SavedStep.of(run, rank=0, segment=0, step=1)
    with pytest.raises(ReferenceFormatError, match=re.escape(str(path))):
        saved.read("backward/net:aten.mul.Tensor#1.0")


def unread(monkeypatch: Any) -> None:
    """Make reading the columns of a table a failure that nothing catches."""
    monkeypatch.setattr(pq.ParquetFile, "read", Mock(side_effect=AssertionError("it was read")))


@pytest.mark.parametrize("limit", ["MAX_ROWS", "MAX_VALUES", "MAX_BYTES"])
@pytest.mark.parametrize("kind", ["programs", "layouts", "sites"])
def test_a_table_that_claims_too_much_is_refused_before_it_is_read(
    tmp_path, monkeypatch, kind, limit
):
    run = record(tmp_path / "run", range(2))
    monkeypatch.setattr(tables, limit, 2)
    tables._program_columns.cache_clear()
    tables._layout_of.cache_clear()
    if kind != "sites":
        unread(monkeypatch)
        read = Run.open(run).layout if kind == "layouts" else Run.open(run).program
        (path,) = (run / kind).iterdir()
        with pytest.raises(
            ReferenceFormatError, match=r"it has [\d,]+ \w+, and a run has at most 2"
        ) as caught:
            read(int(path.stem, 16))
        assert str(path) in str(caught.value)
    if kind == "sites" and limit != "MAX_ROWS":
        (path,) = (run / kind).iterdir()
        with pytest.raises(
            ReferenceFormatError, match=r"it has [\d,]+ \w+, and a run has at most 2"
        ):
            tables._read_sites(path)


def test_a_long_text_that_every_row_repeats_is_counted_before_it_is_repeated(tmp_path):
    num, row = 60_000, {"output": 0, "recomputed": False, "varying": [], "source": []}
    row |= {"eager_call": 0, "eager_calls": 0}
    columns = {name: [row.get(name, "{}")] * num for name in tables.SITE_SCHEMA.names}
    columns |= {"position": range(num), "site": [1] * num}
    columns["module"] = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(num, np.int32)), pa.array(["m" * 10_000])
    )
    fields = [
        (field.name, getattr(columns[field.name], "type", field.type))
        for field in tables.SITE_SCHEMA
    ]
    schema = pa.schema(fields, {"format_version": "2"})
    path = tmp_path / "0.parquet"
    pq.write_table(pa.table(columns, schema=schema), path, compression="zstd")
    assert path.stat().st_size < 400_000
    with pytest.raises(ReferenceFormatError, match=r"60\d,\d+,\d+ bytes of text") as caught:
        tables._read_sites(path)
    assert str(path) in str(caught.value)


def test_the_dimensions_of_a_tensor_take_no_more_memory_than_they_are(tmp_path):
    (tmp_path / "layouts").mkdir()
    long = TensorLayout(dtype="float32", shape=(1,) * 200_000)
    layout = Layout((long, *[TensorLayout(dtype="float32", shape=(2, 3), stride=(3, 1))] * 500_000))
    tables.write_layout(tmp_path, layout)  # a matrix of all rows would have 10**11 elements
    assert len(tables.read_layout(tmp_path, layout.id)) == len(layout)


def test_what_no_reader_accepts_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_ROWS", 3)
    writer = create(tmp_path / "run")
    writer.put_program(small_program())
    with pytest.raises(
        WriteError, match=r"it has 4 rows, and .* at most 3\. Record less of a step \(level"
    ):
        writer.put_program(small_program(4))
    writer.close(complete=False)


def of_evidence(path: Path, change: Callable[[bytearray], None]) -> list[EvidenceRow]:
    writer = create(path)
    for step in range(2):
        writer.put_evidence(
            [EvidenceRow(step, "batch start", "generator", "python", text="x" * 5000)]
        )
        writer.flush_evidence()
    append(writer, range(2), complete=True)
    place = evidence_path(path / STREAM)
    content = bytearray(place.read_bytes())
    change(content)
    place.write_bytes(content)
    return [*read_evidence(place, run_id=writer.manifest.run_id)]


def lengthened(content: bytearray) -> None:
    """Say that the compressed text of the first record batch has a terabyte."""
    offset = content.index((5000).to_bytes(8, "little"))
    at = content.index((5000).to_bytes(8, "little"), offset + 1)
    content[at : at + 8] = (1 << 40).to_bytes(8, "little")


def swallowed(content: bytearray, size: int = 1 << 20) -> None:
    """Say that the body of the first record batch reaches beyond the end."""
    first = 8 + int.from_bytes(content[4:8], "little")
    table = first + 8 + int.from_bytes(content[first + 8 : first + 12], "little")
    at = evidence._field(bytes(content[first:]), table - first, 3) + first
    content[at : at + 8] = size.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lengthened, "it has 1,099,511,.* bytes in a record batch"),
        (swallowed, "it ends early"),
        (partial(swallowed, size=1 << 60), "it has 1,152,921,.* bytes in a record batch"),
    ],
)
def test_a_record_batch_of_evidence_that_claims_too_much_is_refused_unread(tmp_path, change, says):
    with pytest.raises(ReferenceFormatError, match=rf"evidence\.arrows is damaged: .*{says}"):
        of_evidence(tmp_path / "run", change)


@pytest.mark.parametrize("limit", ["MAX_VALUES", "MAX_BYTES"])
def test_a_record_batch_is_compared_with_the_limits(tmp_path, monkeypatch, limit):
    assert len(of_evidence(tmp_path / "run", lambda content: None)) == 4
    monkeypatch.setattr(evidence, limit, 4)
    monkeypatch.setattr(pa.ipc, "open_stream", Mock(side_effect=AssertionError("it was read")))
    with pytest.raises(
        ReferenceFormatError, match=r"a record batch in its middle cannot be read \(it has"
    ):
        of_evidence(tmp_path / "other", lambda content: None)


def test_saved_tensors_that_claim_too_much_are_refused(runs):
    path = tensor_path(runs[1] / STREAM, KEPT, 1)
    path.write_bytes((MAX_BYTES + 1).to_bytes(8, "little") + path.read_bytes()[8:])
    os.truncate(path, 2 * MAX_BYTES)
    with pytest.raises(
        ReferenceFormatError, match=r"bytes in its header, and a run has at most"
    ) as caught:
        compare_runs(*runs, numerics=True)
    assert str(path) in str(caught.value)


def test_text_of_a_run_cannot_steer_a_terminal(tmp_path, capsys):
    def write(path: Path, seed: int) -> Path:
        rest: dict[str, Any] = {
            "role": "output",
            "subject": "tensor",
            "of": STEERING,
            "part": STEERING,
        }
        source = (f"train.py:41 in {STEERING}",)
        sites = [
            Site(
                phase="forward",
                module=f"net{STEERING}\nMATCH",
                op=f"aten.mul{STEERING}",
                source=source,
                **rest,
            ),
            Site(
                phase=STEERING, module="net", op=f"aten.add{STEERING}.Tensor", inputs=(0,), **rest
            ),
        ]
        entry = TensorLayout(dtype=STEERING, shape=(2,), stride=(1,), detail=STEERING)
        program, layout = Program.of(sites, opaque_regions=(STEERING,)), Layout((entry, entry))
        program = replace(program, text={"train.py:41": (STEERING, f"x\n{STEERING}", "y")})
        writer = create(path)
        writer.put_program(program)
        writer.put_layout(layout)
        for step in range(3):
            writer.append(step, 0, program.id, layout.id, digests_of(step, 2, seed))
        writer.put_nondeterministic_ops(
            [replace(OP, op=STEERING, message=STEERING, is_allowed=False)]
        )
        digest = Metric(dtype="float32", shape=(), digest=f"{seed:016x}", value=STEERING)
        writer.put_reading(
            Reading(where="epoch", number=2, step=2, epoch=0, metrics={STEERING: digest})
        )
        writer.close(complete=True)
        manifest = read_manifest(path)
        environment = {
            name: replace(one, value=f"{seed}{STEERING}")
            for name, one in manifest.environment.items()
        }
        write_manifest(
            path, replace(manifest, environment=environment, settings={STEERING: STEERING})
        )
        return path

    paths = {
        "reference": write(tmp_path / "reference", 0),
        "current": write(tmp_path / "current", 1),
    }
    page = tmp_path / "page"
    shown = 0
    for words in COMMANDS:
        for more in ((), ("--json",)) if words[0] != "export" else ((),):
            main([*(word.format(**paths, page=page) for word in words), *more])
            told = "".join(capsys.readouterr())
            assert not ACTIVE.search(told), (words, ACTIVE.search(told))
            assert "\nMATCH" not in told
            shown += "\\x1b[2K" in told
    assert shown >= 4, "the text is shown, with escapes"
    assert not ACTIVE.search(page.read_text())
    assert "\\u202e" in page.read_text()


def test_errors_and_tables_show_what_they_quote():
    assert (
        str(DivergenceError(f"net{STEERING}"))
        == "net\\x1b[2K\\r\\x9b2J\\x85\\u2028\\u202e\\u2066\\u200f\\u061c\\x07"
    )
    assert visible("größe 測定 🙂\tx\ny") == "größe 測定 🙂\tx\ny"
    table = Table(columns=["a"], rows=[["x\nMATCH"], ["\x1b]0;t\x07"]])
    assert to_text(
        [Section(code=["one\nMATCH"]), Section(title="t\nMATCH"), Section(table=table)]
    ).splitlines() == [
        *("one\\nMATCH", "", "t\\nMATCH", "", "a", "x\\nMATCH", "\\x1b]0;t\\x07"),
    ]


@pytest.mark.parametrize("content", [{"train.py": ["x"]}, {"": ["x"]}, {"train.py:4x": ["x"]}])
def test_a_source_line_without_a_number_is_damage(runs, capsys, content):
    write_source_text(runs[1], content)
    assert main(["diff", *map(str, runs)]) == 1, "source lines only explain"
    assert re.search(
        r"sources/\w+\.json is damaged: a place in it has no line number", capsys.readouterr().out
    )
