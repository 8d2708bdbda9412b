"""Projects as people have them: recorded, repeated with the same bits, and a fault of one part in a million found."""

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from checking import Run, run_command
from forks import fork_process

PROJECTS = Path(__file__).with_name("projects")
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "projects.md"
ADDED = "# added for det_callbacks"

pytestmark = pytest.mark.slow

__all__ = ["run_command"]


@pytest.fixture(autouse=True)
def _in_the_projects(run_command: Run) -> None:
    shutil.copytree(PROJECTS, Path.cwd(), dirs_exist_ok=True)


def start(script: str, *arguments: str, **variables: str) -> tuple[int, str]:
    """Run a project in a fork, and return its status and what it printed."""
    with Path("printed").open("w+b") as printed:
        words = [sys.executable, script, *arguments]
        status = fork_process(words, variables={**os.environ, **variables}, output=printed.fileno())
    return status, Path("printed").read_text()


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("cli.py", ["fit", "--config", "cli.yaml"]),
        ("transformer.py", ["gpt2"]),
        ("transformer.py", ["vit"]),
        ("resnet.py", []),
        ("two_optimizers.py", []),
    ],
)
def test_without_a_changed_line(
    script: str, arguments: list[str], run_command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ADDED not in Path(script).read_text()
    if script == "transformer.py":
        pytest.importorskip("transformers", reason="transformers is not installed")
    for words in (("record", "run"), ("verify", "run")):
        done = run_command(*words, script=script, faults=arguments)
        assert done.status == 0, done.text + done.errors
    monkeypatch.setenv("PLANTED", "1")
    done = run_command("verify", "run", script=script, faults=arguments)
    assert done.status == 1, done.text + done.errors
    assert "\nDIVERGED\nStep 2, forward: aten.mul.Tensor " in done.text
    assert "synthetic.py" in done.text


def test_what_is_not_deterministic_is_found_and_replayed() -> None:
    ended, text = start("message_passing.py", MODE="audit")
    assert ended == 1, text
    assert "project.scatter_sum.default" in Path("audit/replay.yaml").read_text()
    for mode, variables, status in (("record", {}, 0), ("verify", {}, 0), ("verify", {"PLANTED": "1"}, 1)):
        ended, text = start("message_passing.py", MODE=mode, REPLAY="audit/replay.yaml", **variables)
        assert ended == status, text
    assert "Step 2, forward: aten.mul.Tensor " in text


def test_a_loop_without_a_trainer() -> None:
    for words, variables, status in (
        ("first", {}, 0),
        ("second runs/first", {}, 0),
        ("third runs/first", {"PLANTED": "1"}, 1),
    ):
        ended, text = start("plain_loop.py", *words.split(), **variables)
        assert ended == status, text
    assert "DivergenceError" in text
    assert "Step 2" in text


def test_the_page_counts_the_lines() -> None:
    rows: dict[str, Any] = dict(re.findall(r"(?m)^\| `([\w.]+)` \|.*\| (\d+) \|$", PAGE.read_text()))
    counted = {path.name: path.read_text().count(ADDED) for path in PROJECTS.glob("*.py")}
    del counted["synthetic.py"]
    assert {name: int(number) for name, number in rows.items()} == counted
