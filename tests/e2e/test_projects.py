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


def start(command: str, *, status: int = 0, **variables: str) -> str:
    """Run a project in a fork, which has to end with a status; return what it printed."""
    with Path("printed").open("w+b") as printed:
        words = [sys.executable, *command.split()]
        ended = fork_process(words, variables={**os.environ, **variables}, output=printed.fileno())
    text = Path("printed").read_text()
    assert ended == status, text
    return text


@pytest.mark.parametrize("command", ["cli.py fit --config cli.yaml", "transformer.py"])
def test_without_a_changed_line(command: str, run_command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    script, *arguments = command.split()
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


def test_what_is_not_deterministic_is_found_and_replayed_and_a_loop_needs_no_trainer() -> None:
    start("message_passing.py", MODE="audit", status=1)
    assert "project.scatter_sum.default" in Path("audit/replay.yaml").read_text()
    for mode in ("record", "verify"):
        start("message_passing.py", MODE=mode, REPLAY="audit/replay.yaml")
    text = start("message_passing.py", MODE="verify", REPLAY="audit/replay.yaml", PLANTED="1", status=1)
    assert "Step 2, forward: aten.mul.Tensor " in text
    start("plain_loop.py first")
    start("plain_loop.py second runs/first")
    text = start("plain_loop.py third runs/first", PLANTED="1", status=1)
    assert "DivergenceError" in text
    assert "Step 2" in text


def test_the_page_counts_the_lines() -> None:
    rows: dict[str, Any] = dict(re.findall(r"(?m)^\| `([\w.]+)` \|.*\| (\d+) \|$", PAGE.read_text()))
    counted = {path.name: path.read_text().count(ADDED) for path in PROJECTS.glob("*.py")}
    del counted["synthetic.py"]
    assert {name: int(number) for name, number in rows.items()} == counted
