"""What README, docs and the READMEs of the recipes tell a user to do, done,
with the output they promise.
"""

import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import duckdb
import hydra
import lightning.pytorch as pl
import polars
import pytest
import torch
from fits import Classifier, Samples, Validated
from forks import fork_process, outside_ci
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from omegaconf import OmegaConf
from recipe_modules import find_recipe
from step_builder import record, training_step
from torch.utils.data import DataLoader
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback, DeterminismSettings, cli, enforce_determinism

ROOT = Path(__file__).parents[2]
README, DOCS, RECIPES = ROOT / "README.md", ROOT / "docs", ROOT / "recipes"
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
OVERHEAD = RECIPES / "overhead" / "README.md"


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
    """A promised line as a pattern: "..." stands for anything,
    and a sentence may go on in the next line.
    """
    parts = (r"\s+".join(map(re.escape, part.split())) for part in line.split("..."))
    return r".*(?:\n.*)?".join(parts)


def run_page(page: Path, folder: Path, *, added: str = "") -> list[tuple[str, int]]:
    (folder / "recipes").symlink_to(ROOT / "recipes")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**outside_ci(), "PATH": path, "COLUMNS": "120", "NO_COLOR": "1"}
    ended: list[tuple[str, int]] = []
    for command, promised in commands_of(page.read_text()):
        if command == "echo $?":
            assert promised == [str(ended[-1][1])]
            ended.append((command, 0))
            continue
        words = shlex.split(command, comments=True)
        with (folder / "said").open("w+b") as said:
            if words[0] == "python" and words[1] != "-m":
                words = [sys.executable, *words[1:], *shlex.split(added)]
                status = fork_process(
                    words, variables=environment, folder=folder, output=said.fileno()
                )
            else:
                options: dict[str, Any] = {
                    "cwd": folder,
                    "env": environment,
                    "check": False,
                    "timeout": 200,
                }
                status = subprocess.run(
                    words, stdout=said, stderr=subprocess.STDOUT, **options
                ).returncode
        text = (folder / "said").read_text()
        assert "Traceback" not in text, f"{command}\nsaid:\n{text}"
        for line in promised:
            assert re.search(pattern_of(line), text), f"{command}\npromised: {line}\nsaid:\n{text}"
        ended.append((command, status))
    return ended


def test_a_promise_can_be_broken():
    readme = "```console\n$ do it\nrecorded ... steps\n```\n\n```console\n$ echo $?\n1\n```\n"
    assert commands_of(readme) == [("do it", ["recorded ... steps"]), ("echo $?", ["1"])]
    assert re.search(pattern_of("recorded ... steps"), "recorded 48 steps")
    assert not re.search(pattern_of("recorded ... steps"), "recorded nothing")


# README and docs


def python_of(page: Path) -> list[str]:
    return re.findall(r"(?s)```python\n(.*?)```", page.read_text())


def pages_with(language: str, *, but: Collection[str]) -> list[Any]:
    pages = [
        page
        for page in (README, *sorted(DOCS.rglob("*.md")))
        if f"```{language}\n" in page.read_text()
    ]
    return [pytest.param(page, id=page.stem) for page in pages if page.stem not in but]


@pytest.fixture
def as_a_user(tmp_path: Path, monkeypatch: Any, environment_again: None) -> Iterator[None]:
    """A folder of one's own, and Trainers that are quiet and train for one epoch
    unless an example says more.
    """
    monkeypatch.chdir(tmp_path)
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    # the CLI asks for its arguments
    monkeypatch.setattr("lightning.pytorch.cli.Trainer", pl.Trainer)
    monkeypatch.setattr(
        pl, "Trainer", partial(pl.Trainer, max_epochs=1, accelerator="cpu", **quiet)
    )
    with enforce_determinism({}):  # puts back what the examples leave in force
        yield


# Lightning 2.5.0's use of jsonargparse
@pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning.pytorch.cli")
@pytest.mark.usefixtures("as_a_user")
def test_the_readmes_lines_record_and_verify():
    (example,), (comparison,) = python_of(README), python_of(DOCS / "how-to" / "elsewhere.md")
    names: dict[str, Any] = {"Model": Classifier, "loader": DataLoader(Samples(), batch_size=8)}
    exec(example, names)
    exec(example.replace('mode="record"', 'mode="verify", current="runs/current"'), names)
    assert names["callback"].verdict.verdict == "match"
    exec(comparison, names)
    assert names["verdict"].verdict == "match"


class Model(Validated):
    test_step = Validated.validation_step

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = self.first, self.last


INSTEAD = {  # of what a user has: more processes, longer runs, recordings of yesterday
    '"refs/run1")]': '"refs/run1", mode="record")]',
    "report = compare_compiled": "# ",
    "report.assert_close()": "report.worst",
    'compare_runs("refs/one"': "# ",
    "    ...\n": "    observe('input', 1)\n",
    "stop_at=700, steps=1000": "stop_at=2, steps=4",
    'devices=4, strategy="ddp"': 'devices=2, strategy="ddp_fork"',
    'devices=8, strategy="ddp"': 'devices=2, strategy="ddp_fork"',
    "torch.compile(model)": 'torch.compile(model, backend="eager")',
    "raise_on_mismatch=True": "raise_on_mismatch=False",
}


OF_OTHER_TESTS = "README", "elsewhere", "huggingface", "rollout"


@LIGHTNING_ADVICE
@pytest.mark.filterwarnings(
    "ignore:.*dataloader is not resumable", "ignore::det_callbacks.errors.DivergenceWarning"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's and Lightning's own
@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("page", pages_with("python", but=(*OF_OTHER_TESTS, "pytest", "query")))
def test_the_examples_of_a_page_run(page, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["main.py", "fit", "--seed_everything=0", "--trainer.fast_dev_run=1"]
    )
    model, loader, batch = Model(), DataLoader(Samples(), batch_size=8), torch.randn(4, 12)
    if page.stem == "resume":
        trainer = pl.Trainer(callbacks=[DeterminismCallback("refs/earlier", mode="record")])
        trainer.fit(model, loader)
        trainer.save_checkpoint("checkpoints/last.ckpt")
    callbacks = {
        "determinism": {"_target_": "det_callbacks.DeterminismCallback", "reference": "refs/run1"}
    }
    names: dict[str, Any] = {
        "DeterminismCallback": DeterminismCallback,
        "DeterminismSettings": DeterminismSettings,
    }
    names |= {
        "Model": BoringModel,
        "Data": BoringDataModule,
        "make_model": Classifier,
        "make_data": lambda: loader,
    }
    names |= {"Trainer": pl.Trainer, "loader": [batch] if page.stem == "observe" else loader}
    names |= {"model": model, "rewritten": Model(), "val_loader": loader, "test_loader": loader}
    names |= {
        "torch": torch,
        "x": batch,
        "inputs": batch,
        "hidden": torch.randn(3, requires_grad=True),
    }
    names |= {
        "make_trainer": pl.Trainer,
        "racing_pool": torch.relu,
        "train_on": lambda images, labels: images.mul(2),
    }
    names |= {
        "hydra": hydra,
        "cfg": OmegaConf.create({"callbacks": callbacks}),
        "name": "first",
        "reference": None,
    }
    for example in python_of(page):
        for before, after in INSTEAD.items():
            example = example.replace(before, after)
        exec(example, names)


@pytest.mark.slow
def test_the_tutorial_and_the_opening_of_the_readme_tell_the_truth(tmp_path):
    assert len(run_page(DOCS / "tutorial.md", tmp_path)) == 8
    opening = tmp_path / "opening"
    opening.mkdir()
    (opening / "page.md").write_text(re.findall(r"(?s)```console\n.*?```", README.read_text())[0])
    assert len(run_page(opening / "page.md", opening)) == 2


@pytest.fixture(scope="module")
def project(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for number in (1, 2):
        run, name = folder / "refs" / f"run{number}", ("first.ckpt", "second.ckpt")[number - 1]
        trainer = quiet_trainer(DeterminismCallback(run, mode="record"))
        trainer.fit(Classifier(lr=0.1 * number), DataLoader(Samples(), batch_size=8))
        trainer.save_checkpoint(folder / name)
        shutil.copytree(run, folder / "refs" / f"run{number}-step-12")
    shutil.copytree(run, folder / "runs" / "current")
    shutil.copytree(Path(__file__).with_name("projects"), folder, dirs_exist_ok=True)
    (folder / "cli.py").rename(folder / "main.py")
    setup = (
        "from lightning.pytorch.demos.boring_classes import BoringModel as Model\nloader = None\n"
    )
    (folder / "tests").mkdir()
    (folder / "tests" / "test_training.py").write_text(
        setup + "\n".join(python_of(DOCS / "how-to" / "pytest.md"))
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("console", but=("tutorial", "agents", "SKILL")))
def test_the_commands_of_a_page_run(page, project, tmp_path):
    shutil.copytree(project, tmp_path, dirs_exist_ok=True)
    shutil.copytree(
        RECIPES / ("replay" if page.stem == "replay" else "digits"), tmp_path, dirs_exist_ok=True
    )
    text = page.read_text().rpartition("## Install")[2]
    for table in re.findall(r"(?s)```toml\n(.*?)```", text):
        (tmp_path / "pyproject.toml").write_text(table)
    for command, instead in (
        (r"\\\n", ""),
        # test_find.py and test_repro.py run the last two
        (r"\$ (pip|make|scp|git|python repro.py) .*", ""),
        ("main.py fit", "main.py fit --config=cli.yaml"),
        ("checkpoints/last.ckpt", "first.ckpt"),
        (r"(\$ .*[ =]record\b.*)", r"$ rm -rf refs/run1\n\1"),
    ):
        text = re.sub(command, instead, text)
    if page.stem in ("check", "find-the-op"):  # which show what another project said
        text = re.sub(r"(?m)^[^$`\n].*$", "", text)
    (tmp_path / "page.md").write_text(text)
    # the race, which may also come out alike
    forced = "model.is_forced=true" if page.stem == "replay" else ""
    for command, status in run_page(tmp_path / "page.md", tmp_path, added=forced):
        assert status == 0 or not re.search(r"\b(record|verify)\b", command), command


# recipes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "num_commands", "added"),
    [
        *(("digits", 10, ""), ("resume", 8, ""), ("compiled", 7, ""), ("numerics", 4, "")),
        pytest.param("ddp_audit", 5, "", marks=pytest.mark.ddp),
        ("replay", 6, "model.is_forced=true"),  # the race is forced
    ],
)
def test_the_readme_tells_the_truth(recipe, num_commands, added, tmp_path):
    assert len(run_page(RECIPES / recipe / "README.md", tmp_path, added=added)) == num_commands


@pytest.mark.ddp
@pytest.mark.slow
def test_the_table_of_ddp_audit_tells_the_truth(tmp_path):
    readme = (RECIPES / "ddp_audit" / "README.md").read_text()
    rows = re.findall(r"^\| `fault=(\w+)` \|.*\| `(\w+)`: (.*) \|$", readme, re.MULTILINE)
    (faults,) = re.findall(
        r"^FAULTS = \(None, (.*)\)$", (RECIPES / "ddp_audit" / "train.py").read_text(), re.MULTILINE
    )
    assert [f'"{fault}"' for fault, _, _ in rows] == faults.split(", ")
    train = "$ python recipes/ddp_audit/train.py determinism.reference=refs/ddp"
    received = "started on rank 1; rank ... received the difference"
    verify = [
        f"{train} +determinism=verify fault={fault} determinism.current=current-{fault}\n"
        f"{sentence}\n"
        "Step 5\n"
        # in an order no rank did anything else than before
        f"cause {cause}\n{received * (fault != 'order')}\n$ echo $?\n1\n"
        for fault, cause, sentence in rows
    ]
    (tmp_path / "page.md").write_text(
        f"```console\n{train} +determinism=record\n{''.join(verify)}```"
    )
    run_page(tmp_path / "page.md", tmp_path)


# overhead


@pytest.fixture
def overhead(monkeypatch: Any) -> dict[str, ModuleType]:
    """The modules of the recipe."""
    find_recipe(OVERHEAD.parent, monkeypatch)
    return {name: importlib.import_module(name) for name in ("run", "models", "measure")}


def test_the_commands_of_overhead_are_taken_and_its_networks_have_their_sizes(overhead):
    commands = re.findall(
        r"^\$ python recipes/overhead/run\.py(.*)$", OVERHEAD.read_text(), re.MULTILINE
    )
    assert len(commands) >= 3
    for command in commands:
        overhead["run"].make_parser().parse_args(shlex.split(command))
    with torch.device("meta"):
        networks = overhead["models"].GPT2(), overhead["models"].ResNet50()
    assert [sum(parameter.numel() for parameter in one.parameters()) for one in networks] == [
        124_439_808,
        25_557_032,
    ]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_short_runs_of_overhead_measure_time_memory_and_disk(overhead, tmp_path, capsys):
    options = (
        "--networks mlp gpt2 resnet50 --tiny --rounds 3 --steps 2 --memory-steps 3 --sizes 1 64 "
        "--variants op"
    )
    overhead["run"].main([*options.split(), "--json", str(tmp_path / "figures.json")])
    content: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    assert [case["network"] for case in content["cases"]] == ["mlp", "gpt2", "resnet50"]
    op = content["cases"][0]["variants"]["op"]
    assert (
        op["ratio"]
        == sorted(one / other for one, other in zip(op["seconds"], op["plain"], strict=True))[1]
    )
    assert (op["ops"], op["peak_growth_mib"] > 0) == (113, True)
    assert 8 * op["sites"] < op["bytes_a_step"] <= 8 * op["sites"] + 512
    printed = capsys.readouterr().out
    assert re.search(r"^op +\d+\.\d\d +\d+\.\d\d .* 113 ", printed, re.MULTILINE)
    assert re.search(r"^ +64 KiB( +\d+\.\d+){7}$", printed, re.MULTILINE)


@pytest.mark.slow
def test_all_of_overhead_has_a_table_of_all(overhead, tmp_path, capsys, monkeypatch):
    options = "--all --tiny --networks gpt2 layerdrop --rounds 1 --steps 1 --sizes 1 --variants op"
    run = overhead["run"]
    # a process of its own takes seconds to start
    monkeypatch.setattr(run, "measure_memory_apart", overhead["measure"].measure_memory)
    run.main([*options.split(), "--memory-steps", "2", "--json", str(tmp_path / "figures.json")])
    content: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    cases = [(case["network"], case["optimizer"]) for case in content["cases"]]
    assert (cases, len(content["digests"])) == (
        [("gpt2", "plain"), ("layerdrop", "plain"), ("blocks", "lbfgs")],
        1,
    )
    table = capsys.readouterr().out.partition("all networks")[2]
    for network, optimizer in cases:
        assert re.search(
            rf"^{network}, {optimizer} +\d+\.\d\d +-?\d+\.\d +- +- +\d+$", table, re.MULTILINE
        )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen = run.parse(["--device", "cuda", "--all"])
    assert chosen.networks == ["gpt2", "resnet50", "blocks", "layerdrop"]
    assert (chosen.memory_steps, len(chosen.sizes), chosen.optimizers) == (4, 11, ["foreach"])


# many ranks: queries in DuckDB, the recipe, and the sizes it promises

SCALE = RECIPES / "scale"
QUERIES = re.findall(r"```sql\n(.*?)```", (DOCS / "how-to" / "query.md").read_text(), re.DOTALL)


def record_two_ranks(path: Path, **changes) -> None:
    ranks = [{}, {}]
    for rank, step in product(range(2), range(4)):
        planted = changes if (rank, step) == (1, 2) else {}
        built = ranks[rank][step] = training_step(
            rows=(step, 2, 3, 4 + rank), is_first=step == 0, **planted
        )
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
    # where the queries look for them
    for name, to in (("reference", "exported"), ("other", "current")):
        assert cli.main(["export", name, "--to", to]) == 0
    assert capsys.readouterr().out.count(": 314 rows, ") == 2
    assert len(QUERIES) == 3
    exec(python_of(DOCS / "how-to" / "query.md")[0], {"pl": polars})
    ranks, differing, modules = (duckdb.connect().sql(query) for query in QUERIES)
    assert ranks.fetchall() == [("grad of net.weight", 2), ("net.weight", 3)]
    assert differing.columns == ["step", "position", "rank", "module", "op", "reference", "current"]
    rows = differing.fetchall()
    assert [(row[0], row[2]) for row in rows] == [(2, 1)] * 5
    assert rows[0][3:5] == ("net.chain", "aten.mul.Tensor")
    assert all(re.fullmatch("[0-9a-f]{16}", digest) for row in rows for digest in row[5:])
    sites = training_step(is_first=False).view().program.sites
    assert modules.fetchall()[0] == (
        "forward",
        "net.chain",
        sum(site.module == "net.chain" for site in sites),
    )


def test_a_small_run_of_the_recipe_finds_what_it_plants(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(str(SCALE))
    arguments = ["--ranks", "3", "--steps", "6", "--sites", "50", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    runpy.run_path(str(SCALE / "run.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    sys.modules.pop("synthetic")
    assert lines[0].startswith("3 ranks x 6 steps x 50 sites: 7 files")
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
    said = subprocess.run(
        words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=1000
    ).stdout
    for line in (
        *promised,
        f"one digest differs ... {place}, aten.add.Tensor #16 in model.layers.19; 1 s",
    ):
        assert re.search(pattern_of(line), said), line
    peak, before = map(
        int, re.search(r"peak of memory: (\d+) MiB, (\d+) MiB of it before", said).groups()
    )
    # modules that are imported, and the digests of eight ranks, read for findings
    assert peak - before < 112
