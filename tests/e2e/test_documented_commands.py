"""What README, docs and the READMEs of the recipes tell a user to do, done, with the output they promise."""

import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import duckdb
import pytest
import torch
from fits import Classifier, Samples
from forks import fork_process
from step_builder import record, training_step
from torch import nn
from torch.utils.data import DataLoader
from trainers import quiet_trainer

from det_callbacks import DeterminismCallback, cli, enforce_determinism

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
OVERHEAD = RECIPES / "overhead" / "README.md"
QUIET = "enable_progress_bar=False, enable_model_summary=False, logger=False, enable_checkpointing=False"


def commands_of(readme: str) -> list[tuple[str, list[str]]]:
    """Each command with the lines of output below it."""
    found: list[tuple[str, list[str]]] = []
    for line in "".join(BLOCK.findall(readme)).splitlines():
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        elif line.strip():
            found[-1][1].append(line)
    return found


def pattern_of(line: str) -> str:
    """A promised line as a pattern: "..." stands for anything, and a sentence may go on in the next line."""
    parts = (r"\s+".join(map(re.escape, part.split())) for part in line.split("..."))
    return r".*(?:\n.*)?".join(parts)


def run_page(page: Path, folder: Path, *, added: str = "") -> int:
    """Run all commands of a page in a folder, and check what they promise; return how many there are.

    Commands that train get the ``added`` arguments as well.
    """
    (folder / "recipes").symlink_to(ROOT / "recipes")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "120", "NO_COLOR": "1"}
    commands, status = commands_of(page.read_text()), 0
    for command, promised in commands:
        if command == "echo $?":
            assert promised == [str(status)]
            continue
        words = shlex.split(command, comments=True)
        with (folder / "said").open("w+b") as said:
            if words[0] == "python":
                words = [sys.executable, *words[1:], *shlex.split(added)]
                status = fork_process(words, variables=environment, folder=folder, output=said.fileno())
            else:
                options: dict[str, Any] = {"cwd": folder, "env": environment, "check": False, "timeout": 200}
                status = subprocess.run(words, stdout=said, stderr=subprocess.STDOUT, **options).returncode
        text = (folder / "said").read_text()
        for line in promised:
            assert re.search(pattern_of(line), text), f"{command}\npromised: {line}\nsaid:\n{text}"
    return len(commands)


def test_a_promise_can_be_broken() -> None:
    readme = "```console\n$ do it\nrecorded ... steps\n```\n\n```console\n$ echo $?\n1\n```\n"
    assert commands_of(readme) == [("do it", ["recorded ... steps"]), ("echo $?", ["1"])]
    assert re.search(pattern_of("recorded ... steps"), "recorded 48 steps")
    assert not re.search(pattern_of("recorded ... steps"), "recorded nothing")


# README and docs


def python_of(page: str) -> list[str]:
    return re.findall(r"(?s)```python\n(.*?)```", (ROOT / page).read_text())


def test_the_readmes_lines_record_and_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = python_of("README.md")
    (comparison,) = python_of("docs/how-to/elsewhere.md")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"Model": Classifier, "loader": DataLoader(Samples(), batch_size=8)}
    example = example.replace("max_epochs=2", f"max_epochs=2, {QUIET}")
    with enforce_determinism({}):  # puts back what the example leaves in force
        exec(example, names)
        exec(example.replace('mode="record"', 'mode="verify", current="runs/current"'), names)
        assert names["callback"].verdict.verdict == "match"
        exec(example.replace("refs/run1", "refs/run2"), names)
        exec(comparison.replace("runs/current", "refs/run2"), names)
    assert names["verdict"].verdict == "match"


@pytest.mark.slow
def test_the_tutorial_and_the_opening_of_the_readme_tell_the_truth(tmp_path: Path) -> None:
    assert run_page(ROOT / "docs" / "tutorial.md", tmp_path) == 8
    opening = tmp_path / "opening"
    opening.mkdir()
    (opening / "page.md").write_text(re.findall(r"(?s)```console\n.*?```", (ROOT / "README.md").read_text())[0])
    assert run_page(opening / "page.md", opening) == 2


@pytest.mark.slow
def test_the_docs_are_built(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "on_divergence" in (tmp_path / "reference" / "api" / "index.html").read_text()


EXAMPLES = {  # page -> what its examples have instead of the numbers of a user, and the name of what comes out
    "compare-models": ({"report = compare_compiled": "# ", "report.assert_close()": "report.worst"}, "report"),
    "loggers": (
        {
            '"refs/run1")': '"refs/run2", mode="record")',
            "log_every_n_steps=10": f"log_every_n_steps=1, max_epochs=1, {QUIET.replace('logger=False, ', '')}",
        },
        "Trainer",
    ),
    "observe": ({"    ...\n": "    observe('input', 1)\n"}, "observer"),
    "replay": ({'DeterminismCallback("refs/run1", mode': "dict(mode"}, "mode"),
    "resume": ({"max_epochs=10": f"max_epochs=3, {QUIET}", "700, steps=1000": "2, steps=4"}, "verdict"),
}


@pytest.mark.filterwarnings("ignore::det_callbacks.errors.DivergenceWarning", "ignore:.*dataloader is not resumable")
@pytest.mark.parametrize("page", EXAMPLES)
def test_examples_of_the_how_to_pages_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    changes, result = EXAMPLES[page]
    loader, batch = DataLoader(Samples(), batch_size=8), torch.randn(4, 12)
    models = (nn.Sequential(OrderedDict(encoder=nn.Linear(12, 16), head=nn.Linear(16, 2))) for _ in range(2))
    names: dict[str, Any] = dict(zip(("model", "rewritten"), models, strict=True))
    names |= {"inputs": batch, "x": batch, "loader": [batch], "hidden": torch.randn(3, requires_grad=True)}
    names |= {"torch": torch, "racing_pool": torch.relu, "make_model": Classifier, "make_data": lambda: loader}
    names["make_trainer"] = lambda: quiet_trainer(max_epochs=1)
    if page in ("resume", "loggers"):  # these train
        names |= {"model": Classifier(), "loader": loader}
        trainer = quiet_trainer(DeterminismCallback("refs/run1", mode="record"), max_epochs=1)
        trainer.fit(names["model"], loader)
        trainer.save_checkpoint("checkpoints/last.ckpt")
    for example in python_of(f"docs/how-to/{page}.md"):
        for before, after in changes.items():
            example = example.replace(before, after)
        exec(example, names)
    assert getattr(names[result], "verdict", "match") is not None


# recipes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "num_commands", "added"),
    [
        *(("digits", 10, ""), ("resume", 8, ""), ("compiled", 7, "")),
        pytest.param("ddp_audit", 5, "", marks=pytest.mark.ddp),
        ("replay", 6, "model.is_forced=true"),  # the race is forced
    ],
)
def test_the_readme_tells_the_truth(recipe: str, num_commands: int, added: str, tmp_path: Path) -> None:
    assert run_page(RECIPES / recipe / "README.md", tmp_path, added=added) == num_commands


@pytest.mark.ddp
@pytest.mark.slow
def test_the_table_of_ddp_audit_tells_the_truth(tmp_path: Path) -> None:
    readme = (RECIPES / "ddp_audit" / "README.md").read_text()
    rows = re.findall(r"^\| `fault=(\w+)` \|.*\| `(\w+)`: (.*) \|$", readme, re.MULTILINE)
    (faults,) = re.findall(r"^FAULTS = \(None, (.*)\)$", (RECIPES / "ddp_audit" / "train.py").read_text(), re.MULTILINE)
    assert [f'"{fault}"' for fault, _, _ in rows] == faults.split(", ")
    train = "$ python recipes/ddp_audit/train.py determinism.reference=refs/ddp"
    verify = [
        f"{train} +determinism=verify fault={fault} determinism.current=current-{fault}\n{sentence}\nStep 5\n"
        # in an order no rank did anything else than before
        f"cause {cause}\n{'started on rank 1; rank ... received the difference' * (fault != 'order')}\n$ echo $?\n1\n"
        for fault, cause, sentence in rows
    ]
    (tmp_path / "page.md").write_text(f"```console\n{train} +determinism=record\n{''.join(verify)}```")
    run_page(tmp_path / "page.md", tmp_path)


# overhead


@pytest.fixture
def overhead(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules of the recipe; other recipes use their names too."""
    names = [path.stem for path in OVERHEAD.parent.glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(OVERHEAD.parent)
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        del sys.modules[name]


def test_the_commands_of_overhead_are_taken_and_its_networks_have_their_sizes(overhead: dict[str, ModuleType]) -> None:
    commands = re.findall(r"^\$ python recipes/overhead/run\.py(.*)$", OVERHEAD.read_text(), re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        overhead["run"].make_parser().parse_args(shlex.split(command))
    with torch.device("meta"):
        networks = overhead["models"].GPT2(), overhead["models"].ResNet50()
    assert [sum(parameter.numel() for parameter in one.parameters()) for one in networks] == [124_439_808, 25_557_032]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_short_runs_of_overhead_measure_time_memory_and_disk(
    overhead: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--networks mlp gpt2 resnet50 --tiny --rounds 3 --steps 2 --memory-steps 3 --sizes 1 64 --variants op"
    overhead["run"].main([*options.split(), "--json", str(tmp_path / "figures.json")])
    content: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    assert [case["network"] for case in content["cases"]] == ["mlp", "gpt2", "resnet50"]
    op = content["cases"][0]["variants"]["op"]
    assert op["ratio"] == sorted(one / other for one, other in zip(op["seconds"], op["plain"], strict=True))[1]
    assert (op["ops"], op["peak_growth_mib"] > 0) == (113, True)
    assert 8 * op["sites"] < op["bytes_a_step"] <= 8 * op["sites"] + 512
    printed = capsys.readouterr().out
    assert re.search(r"^op +\d+\.\d\d +\d+\.\d\d .* 113 ", printed, re.MULTILINE)
    assert re.search(r"^ +64 KiB( +\d+\.\d+){7}$", printed, re.MULTILINE)


# many ranks: queries in DuckDB, the recipe, and the sizes it promises

SCALE = RECIPES / "scale"
QUERIES = re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "how-to" / "query.md").read_text(), re.DOTALL)


def record_two_ranks(path: Path, **changes) -> None:
    """Write a run of two ranks with other batches; ``changes`` are those of rank 1 in step 2."""
    ranks = [{}, {}]
    for rank, step in product(range(2), range(4)):
        planted = changes if (rank, step) == (1, 2) else {}
        built = ranks[rank][step] = training_step(rows=(step, 2, 3, 4 + rank), is_first=step == 0, **planted)
        for place, site in enumerate(built.sites):  # equal on all ranks, as after an all-reduce
            if site.name == "net.weight" and (rank, step) != (1, 3):
                built.digests[place] = step
            if site.name == "grad of net.weight" and (rank, step) not in ((1, 2), (1, 3)):
                built.digests[place] = step
    record(path, ranks[0], others=ranks[1:])


def test_the_queries_of_the_docs_answer_what_they_say(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    record_two_ranks(tmp_path / "reference")
    record_two_ranks(tmp_path / "other", noise_at=5)
    for name, to in (("reference", "exported"), ("other", "current")):  # where the queries look for them
        assert cli.main(["export", name, "--to", to]) == 0
    assert capsys.readouterr().out.count(": 314 rows, ") == 2
    assert len(QUERIES) == 3
    ranks, differing, modules = (duckdb.connect().sql(query) for query in QUERIES)
    assert ranks.fetchall() == [("grad of net.weight", 2), ("net.weight", 3)]
    assert differing.columns == ["step", "position", "rank", "module", "op", "reference", "current"]
    rows = differing.fetchall()
    assert [(row[0], row[2]) for row in rows] == [(2, 1)] * 5
    assert rows[0][3:5] == ("net.chain", "aten.mul.Tensor")
    assert all(re.fullmatch("[0-9a-f]{16}", digest) for row in rows for digest in row[5:])
    sites = training_step(is_first=False).view().program.sites
    assert modules.fetchall()[0] == ("forward", "net.chain", sum(site.module == "net.chain" for site in sites))


def test_a_small_run_of_the_recipe_finds_what_it_plants(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(str(SCALE))
    arguments = ["--ranks", "3", "--steps", "6", "--sites", "50", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    runpy.run_path(str(SCALE / "run.py"), run_name="__main__")
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
    command, promised = commands_of((SCALE / "README.md").read_text())[number]
    words = [sys.executable, *command.split()[1:], "--folder", str(tmp_path)]
    said = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=1000).stdout
    for line in (*promised, f"one digest differs ... {place}, aten.add.Tensor #16 in model.layers.19; 1 s"):
        assert re.search(pattern_of(line), said), line
    peak, before = map(int, re.search(r"peak of memory: (\d+) MiB, (\d+) MiB of it before", said).groups())
    assert peak - before < 64  # the rest is what is imported
