"""Exporting a run: every site is there once, in files that others read, or nothing is."""

import json
from dataclasses import replace
from unittest.mock import Mock

import polars as pl
import pyarrow.dataset as ds
import pytest
from stored_runs import OneOf, append, create, join, record

from det_callbacks.cli import commands, main
from det_callbacks.cli.commands import export_run, export_trace
from det_callbacks.errors import (
    ExportError,
    ReferenceFormatError,
    ReferenceNotFoundError,
    WriteError,
)
from det_callbacks.runs.files import stream_path
from det_callbacks.runs.manifest import Attempt, read_manifest, write_manifest
from det_callbacks.runs.store import Run

OF_SITE = (
    "phase",
    "module",
    "op",
    "occurrence",
    "output",
    "role",
    "name",
    "arguments",
    "recomputed",
)


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run"
    append(create(path, peers=OneOf(0, 2)), range(5), complete=False)
    append(join(path, 1), range(4), seed=1, complete=True)
    write_manifest(path, replace(read_manifest(path), attempts=(Attempt(), Attempt())))
    writer, other = (join(path, rank, attempt=1) for rank in range(2))
    append(writer, [4], seed=0)
    append(writer, [7], num_sites=6)
    for one in (writer, other):
        one.start_segment()
    append(writer, range(2), complete=False)
    other.close(complete=True)
    return path


def rows_of(path):
    """What an export of a run has to hold, site by site."""
    run = Run.open(path)
    for rank, found in [(one, found) for one in run.ranks for found in run.rank(one).iterate()]:
        view = run.view(rank, found.segment, found.step)
        of_step = {name: getattr(found, name) for name in ("segment", "step", "epoch", "chain")}
        of_step |= {
            "rank": rank,
            "attempt": int(rank == 0 and (found.segment, found.step) >= (0, 4)),
        }
        of_step |= {"program": found.program_id, "layout": found.layout_id}
        for position, (site, entry) in enumerate(
            zip(view.program.sites, view.layout.entries, strict=True)
        ):
            of_site = {name: getattr(site, name) for name in OF_SITE} | {
                "source": list(site.source)
            }
            of_tensor = {"dtype": entry and entry.dtype}
            of_tensor |= {
                name: entry and list(getattr(entry, name)) for name in ("shape", "stride")
            }
            yield {
                **of_step,
                "position": position,
                **of_site,
                **of_tensor,
                "digest": int(found.digests[position]),
            }


@pytest.mark.parametrize("group_rows", [250_000, 7])
def test_every_site_is_there_once(tmp_path, run, monkeypatch, group_rows):
    monkeypatch.setattr(commands, "GROUP_ROWS", group_rows)
    (tmp_path / "to").mkdir()  # empty
    found = export_run(run, tmp_path / "to")
    assert "1 is the last whole step" in found.incomplete_reason
    wanted = list(rows_of(run))
    rows = ds.dataset(tmp_path / "to", partitioning="hive").to_table().to_pylist()
    assert (
        sorted(rows, key=lambda row: (row["rank"], row["segment"], row["step"], row["position"]))
        == wanted
    )
    assert found.num_rows == len(wanted)
    files = [tmp_path / "to" / f"rank={rank}" / "part-0.parquet" for rank in range(2)]
    assert sorted((tmp_path / "to").rglob("*.parquet")) == files
    assert found.num_bytes == sum(file.stat().st_size for file in files)
    frame = pl.scan_parquet(tmp_path / "to" / "**" / "*.parquet", hive_partitioning=True)
    assert frame.group_by("rank").len().sort("rank").collect()["len"].to_list() == [
        5 * 3 + 6 + 2 * 3,
        4 * 3,
    ]


def test_what_cannot_be_exported_leaves_nothing_and_touches_nothing(tmp_path, run, monkeypatch):
    to = tmp_path / "to"
    with monkeypatch.context() as patch:
        patch.setattr(
            commands.pq.ParquetWriter,
            "write_table",
            Mock(side_effect=OSError(28, "No space left on device")),
        )
        with pytest.raises(
            WriteError,
            match=r"No space left on device; free some space, or pass .* folder .--to of",
        ):
            export_run(run, to)
    file = stream_path(run, 1, 0, 0)
    content = file.read_bytes()
    file.write_bytes(content[:-20] + bytes([content[-20] ^ 1]) + content[-19:])
    with pytest.raises(ReferenceFormatError, match="step 3 does not match its chain"):
        export_run(run, to)
    with pytest.raises(ReferenceNotFoundError):
        export_run(tmp_path / "nowhere", to)
    with pytest.raises(ExportError, match="holds no step"):
        export_run(record(tmp_path / "empty", []), to)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "empty"}
    (to / "mine").mkdir(parents=True)
    for place in (to, file):
        with pytest.raises(
            ExportError, match=r"(is not empty|is a file).*Nothing was changed"
        ) as caught:
            export_run(run, place)
        assert (caught.value.exit_code, caught.value.path) == (2, str(place))
    assert [path.name for path in to.iterdir()] == ["mine"]


def test_a_trace_has_slices_that_nest_and_the_first_divergence(tmp_path, run, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    views = {
        (rank, found.segment, found.step): Run.open(run).view(rank, found.segment, found.step)
        for rank in (0, 1)
        for found in Run.open(run).rank(rank).iterate()
    }
    site = views[1, 0, 3].program.sites[1]
    first = {"rank": 1, "step": 3, **{name: getattr(site, name) for name in (*OF_SITE[:5], "name")}}
    verdict = {
        "verdict": "diverged",
        "cause": "forward",
        "explanation": "It differs.",
        "first_divergence": first,
    }
    (run / "verdict.json").write_text(json.dumps(verdict))
    assert main(["export", str(run), "--to", "perfetto"]) == 0
    assert "run.perfetto.json: " in capsys.readouterr().out.replace("\n", "")
    events = json.loads((tmp_path / "run.perfetto.json").read_text())["traceEvents"]
    slices = [one for one in events if one["ph"] == "X"]
    for rank in (0, 1):
        here = [one for one in slices if one["pid"] == rank]
        steps = [one for one in here if one["name"].startswith("step ")]
        keys = [key for key in views if key[0] == rank]
        assert sorted(one["name"] for one in steps) == sorted(f"step {step}" for _, _, step in keys)
        assert sum(one["dur"] for one in steps) == sum(
            len(views[key].program.sites) for key in keys
        )
        leaves = [one for one in here if "args" in one]
        assert [one["ts"] for one in leaves] == [*range(len(leaves))], (
            "one microsecond each, in order"
        )
        for one in here:  # of two slices one holds the other, or they are apart
            begin, end = one["ts"], one["ts"] + one["dur"]
            for other in here:
                apart = other["ts"] >= end or other["ts"] + other["dur"] <= begin
                inside = begin <= other["ts"] <= other["ts"] + other["dur"] <= end
                outside = other["ts"] <= begin <= end <= other["ts"] + other["dur"]
                assert apart or inside or outside
    (instant,) = (one for one in events if one["ph"] == "i")
    (step,) = (one for one in slices if one["pid"] == 1 and one["name"] == "step 3")
    assert (instant["pid"], instant["ts"], instant["name"]) == (
        1,
        step["ts"] + 1,
        "diverged: forward",
    )
    assert instant["args"] == {"explanation": "It differs."}
    assert main(["export", str(run), "--to", "perfetto"]) == 2, "it exists"
    (tmp_path / "run.perfetto.json").unlink()
    (run / "verdict.json").write_text("{}")
    with pytest.raises(ReferenceFormatError, match=r"verdict.json is damaged"):
        export_trace(run, "trace.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], "nothing is left"
    assert main(["export", str(run), "--to", "./perfetto"]) == 0
    assert (tmp_path / "perfetto" / "rank=0").is_dir(), "a folder of that name"


def test_modules_of_a_trace_are_inside_those_that_hold_them():
    assert commands._modules("net.0.norm") == ["net", "net.0", "net.0.norm"]
    assert commands._modules("") == []
