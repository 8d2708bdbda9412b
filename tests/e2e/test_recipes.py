"""The commands of the recipes' READMEs, with the output they promise, and what their tables say."""

import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from readme_commands import commands_of, pattern_of, run_page

RECIPES = Path(__file__).parents[2] / "recipes"
OVERHEAD = RECIPES / "overhead" / "README.md"


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


def test_a_promise_can_be_broken() -> None:
    readme = "```console\n$ do it\nrecorded ... steps\n```\n\n```console\n$ echo $?\n1\n```\n"
    assert commands_of(readme) == [("do it", ["recorded ... steps"]), ("echo $?", ["1"])]
    assert re.search(pattern_of("recorded ... steps"), "recorded 48 steps")
    assert not re.search(pattern_of("recorded ... steps"), "recorded nothing")


@pytest.mark.ddp
@pytest.mark.slow
def test_the_table_of_ddp_audit_tells_the_truth(tmp_path: Path) -> None:
    readme = (RECIPES / "ddp_audit" / "README.md").read_text()
    rows = re.findall(r"^\| `fault=(\w+)` \|.*\| `(\w+)`: (.*) \|$", readme, re.MULTILINE)
    (faults,) = re.findall(r"^FAULTS = \(None, (.*)\)$", (RECIPES / "ddp_audit" / "train.py").read_text(), re.MULTILINE)
    assert [f'"{fault}"' for fault, _, _ in rows] == faults.split(", ")
    train = "$ python recipes/ddp_audit/train.py determinism.reference=refs/ddp"
    verify = [
        f"{train} +determinism=verify fault={fault} determinism.current=current-{fault}\n{sentence}\n$ echo $?\n1\n"
        for fault, _, sentence in rows
    ]
    (tmp_path / "page.md").write_text(f"```console\n{train} +determinism=record\n{''.join(verify)}```")
    run_page(tmp_path / "page.md", tmp_path)
    for fault, cause, _ in rows:
        verdict: dict[str, Any] = json.loads((tmp_path / f"current-{fault}" / "verdict.json").read_text())
        assert (verdict["cause"], verdict["first_divergence"]["step"]) == (cause, 5)
        if fault != "order":  # in which no rank did anything else than before
            assert {one["rank"] for one in (verdict["first_divergence"], *verdict["origins"])} == {1}
            assert re.search("it started on rank 1; rank.* received the difference", verdict["explanation"])


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
    file = tmp_path / "figures.json"

    def measured(options: str) -> dict[str, Any]:
        overhead["run"].main([*options.split(), "--variants", "op", "--json", str(file)])
        content: dict[str, Any] = json.loads(file.read_text())
        return content

    (case,) = measured("--networks mlp --rounds 3 --steps 2 --memory-steps 3")["cases"]
    plain, op = case["variants"]["plain"], case["variants"]["op"]
    assert (case["network"], plain["ratio"], op["plain"], op["ops"]) == ("mlp", 1, plain["seconds"], 113)
    assert op["ratio"] == sorted(one / other for one, other in zip(op["seconds"], plain["seconds"], strict=True))[1]
    assert op["peak_growth_mib"] > 0
    assert 8 * op["sites"] < op["bytes_a_step"] <= 8 * op["sites"] + 512
    assert re.search(r"^op +\d+\.\d\d +\d+\.\d\d .* 113 ", capsys.readouterr().out, re.MULTILINE)

    content = measured("--networks gpt2 resnet50 --tiny --rounds 2 --memory-steps 0 --sizes 1 64")
    found = [(case["network"], case["device"], case["is_tiny"]) for case in content["cases"]]
    assert found == [("gpt2", "cpu", True), ("resnet50", "cpu", True)]
    assert [one["num_bytes"] for one in content["digests"]] == [1024, 65536]
    assert re.search(r"^ +64 KiB( +\d+\.\d+){7}$", capsys.readouterr().out, re.MULTILINE)
