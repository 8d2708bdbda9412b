"""Exporting a run: every site is there once, in files that others read, or nothing is."""

from dataclasses import replace

import polars as pl
import pyarrow.dataset as ds
import pytest
from stored_runs import OneOf, append, create, join, record

from det_callbacks import export
from det_callbacks.errors import ExportError, ReferenceFormatError, ReferenceNotFoundError
from det_callbacks.export import export_run
from det_callbacks.runs.files import stream_path
from det_callbacks.runs.manifest import Attempt, read_manifest, write_manifest
from det_callbacks.runs.store import Run


@pytest.fixture
def run(tmp_path):
    """Two ranks; one step of the first was recorded again by a second attempt, which went on with other programs."""
    path = tmp_path / "run"
    writer = create(path, peers=OneOf(0, 2))
    append(writer, range(5))
    writer.close(complete=False)
    other = join(path, 1)
    append(other, range(4), seed=1)
    other.close(complete=True)
    write_manifest(path, replace(read_manifest(path), attempts=(Attempt(), Attempt())))
    join(path, 1, attempt=1).close(complete=True)
    writer = join(path, 0, attempt=1)
    append(writer, [4], seed=0)
    append(writer, [7], num_sites=6)
    writer.close(complete=True)
    return path


def rows_of(path):
    """What an export of a run has to hold, site by site."""
    run = Run.open(path)
    for rank in run.ranks:
        for found in run.rank(rank).iterate():
            view = run.view(rank, found.segment, found.step)
            for position, (site, entry) in enumerate(zip(view.program.sites, view.layout.entries, strict=True)):
                yield {
                    "rank": rank,
                    "attempt": int(rank == 0 and found.step >= 4),
                    "segment": found.segment,
                    "step": found.step,
                    "epoch": found.epoch,
                    "chain": found.chain,
                    "program": found.program_id,
                    "layout": found.layout_id,
                    "position": position,
                    **{name: getattr(site, name) for name in ("phase", "module", "op", "occurrence", "output", "role")},
                    **{name: getattr(site, name) for name in ("name", "arguments", "recomputed")},
                    "dtype": entry and entry.dtype,
                    "shape": entry and list(entry.shape),
                    "stride": entry and list(entry.stride),
                    "source": list(site.source),
                    "digest": int(found.digests[position]),
                }


def exported_rows(folder):
    table = ds.dataset(folder, partitioning="hive").to_table()
    return sorted(table.to_pylist(), key=lambda row: (row["rank"], row["segment"], row["step"], row["position"]))


@pytest.mark.parametrize("group_rows", [250_000, 7])
def test_every_site_is_there_once(tmp_path, run, monkeypatch, group_rows):
    monkeypatch.setattr(export, "GROUP_ROWS", group_rows)
    calls = []
    found = export_run(run, tmp_path / "to", progress=lambda *done: calls.append(done))
    wanted = list(rows_of(run))
    assert exported_rows(tmp_path / "to") == wanted
    assert (found.num_rows, found.num_steps, found.num_ranks) == (len(wanted), 10, 2)
    files = sorted((tmp_path / "to").rglob("*.parquet"))
    assert [file.relative_to(tmp_path / "to").as_posix() for file in files] == [
        "rank=0/part-0.parquet",
        "rank=1/part-0.parquet",
    ]
    assert found.num_bytes == sum(file.stat().st_size for file in files)
    assert calls[-1] == (10, 10)
    frame = pl.scan_parquet(tmp_path / "to" / "**" / "*.parquet", hive_partitioning=True)
    counts = frame.group_by("rank").len().sort("rank").collect()
    assert counts["len"].to_list() == [5 * 3 + 6, 4 * 3]


@pytest.mark.parametrize("content", ["file in it", "is a file"])
def test_what_is_there_is_not_touched(tmp_path, run, content):
    to = tmp_path / "to"
    if content == "is a file":
        to.write_text("mine")
    else:
        to.mkdir()
        (to / "mine").write_text("mine")
    with pytest.raises(ExportError, match=r"(is no empty folder|is a file).*Nothing was changed") as caught:
        export_run(run, to)
    assert (caught.value.exit_code, caught.value.path) == (2, str(to))
    assert [path.name for path in tmp_path.iterdir()] == ["run", "to"] or len(list(tmp_path.iterdir())) == 2


def test_a_damaged_run_or_a_full_disk_leaves_nothing(tmp_path, run, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(export.pq.ParquetWriter, "write_table", fail)
        with pytest.raises(ExportError, match="No space left"):
            export_run(run, tmp_path / "to")
    file = stream_path(run, 1, 0, 0)
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)
    with pytest.raises(ReferenceFormatError, match="step 3 is not what its chain says"):
        export_run(run, tmp_path / "to")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_no_run_and_no_step_are_errors(tmp_path):
    with pytest.raises(ReferenceNotFoundError):
        export_run(tmp_path / "nowhere", tmp_path / "to")
    with pytest.raises(ExportError, match="holds no step"):
        export_run(record(tmp_path / "run", []), tmp_path / "to")
    assert not (tmp_path / "to").exists()
    path = record(tmp_path / "incomplete", range(3), range(2), complete=False)
    (tmp_path / "to").mkdir()  # empty
    assert "1 is the last whole step" in export_run(path, tmp_path / "to").incomplete_reason
    rows = {(row["segment"], row["step"]) for row in exported_rows(tmp_path / "to")}
    assert rows == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)}, "fits stand apart"
