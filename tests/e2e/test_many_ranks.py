"""What the docs say of many ranks: their queries in DuckDB, its recipe, and the sizes it promises."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest
from readme_commands import commands_of, pattern_of
from step_builder import training_step
from stored_runs import OneOf, join

from det_callbacks import cli
from det_callbacks.runs.writer import RunWriter

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "scale"
QUERIES = re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "how-to" / "query.md").read_text(), re.DOTALL)


def record(path: Path, **changes) -> None:
    """Write a run of two ranks with other batches; ``changes`` are those of rank 1 in step 2."""
    manifest = {"selection": {"level": "op"}, "environment": {}}
    for rank in range(2):
        writer = join(path, rank) if rank else RunWriter.create(path, peers=OneOf(0, 2), manifest=manifest)
        for step in range(4):
            planted = changes if (rank, step) == (1, 2) else {}
            view = training_step(rows=(step, 2, 3, 4 + rank), is_first=step == 0, **planted).view(step=step)
            digests = view.record.digests
            for place, site in enumerate(view.program.sites):  # equal on all ranks, as after an all-reduce
                if site.name == "net.weight" and (rank, step) != (1, 3):
                    digests[place] = step
                if site.name == "grad of net.weight" and (rank, step) not in ((1, 2), (1, 3)):
                    digests[place] = step
            writer.put_program(view.program)
            writer.put_layout(view.layout)
            writer.append(step, 0, view.program.id, view.layout.id, digests)
        writer.close(complete=True)


def test_the_queries_of_the_docs_answer_what_they_say(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "reference")
    record(tmp_path / "other", noise_at=5)
    for name, to in (("reference", "exported"), ("other", "current")):  # where the queries look for them
        assert cli.main(["export", name, "--to", to]) == 0
    assert capsys.readouterr().out.count(": 314 rows, ") == 2
    assert len(QUERIES) == 3
    ranks, differing, modules = (duckdb.connect().sql(query) for query in QUERIES)
    assert ranks.fetchall() == [("grad of net.weight", 2), ("net.weight", 3)]
    assert differing.columns == ["step", "position", "rank", "module", "op", "reference", "current"]
    rows = differing.fetchall()
    assert len(rows) == 5
    assert {row[0] for row in rows} == {2}
    assert {row[2] for row in rows} == {1}
    assert rows[0][3:5] == ("net.chain", "aten.mul.Tensor")
    assert all(re.fullmatch("[0-9a-f]{16}", digest) for row in rows for digest in row[5:])
    sites = training_step(is_first=False).view().program.sites
    assert modules.fetchall()[0] == ("forward", "net.chain", sum(site.module == "net.chain" for site in sites))


def test_a_small_run_of_the_recipe_finds_what_it_plants(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(str(RECIPE))
    arguments = ["--ranks", "3", "--steps", "6", "--sites", "50", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    runpy.run_path(str(RECIPE / "run.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    sys.modules.pop("synthetic")
    assert lines[0].startswith("3 ranks x 6 steps x 50 sites: 6 files")
    assert lines[1].endswith(" match")
    places = zip(lines[2:5], ((1, 3), (2, 5), (1, 2)), strict=True)
    assert all(f"diverged: rank {rank}, step {step}, " in line for line, (rank, step) in places)
    assert lines[2].endswith("; 1 sites differ")
    assert lines[5].startswith("peak of memory")


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("number", "place"), [(0, "rank 4, step 25"), (1, "rank 128, step 100")])
def test_the_commands_of_the_recipe_find_it_in_bounded_memory(tmp_path, number, place):
    if number and shutil.disk_usage(tmp_path).free < 8e9:
        pytest.skip("the two runs take 3.3 GB of disk")
    command, promised = commands_of((RECIPE / "README.md").read_text())[number]
    words = [sys.executable, *command.split()[1:], "--folder", str(tmp_path)]
    said = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=1000).stdout
    for line in (*promised, f"one digest differs ... {place}, aten.add.Tensor #16 in model.layers.19; 1 s"):
        assert re.search(pattern_of(line), said), line
    peak, before = map(int, re.search(r"peak of memory: (\d+) MiB, (\d+) MiB of it before", said).groups())
    assert peak - before < 64  # the rest is what is imported
