"""docs/ci/github-actions.yml: its commands are real ones, its steps fit together, and they find a change."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW = yaml.safe_load((ROOT / "docs" / "ci" / "github-actions.yml").read_text())
STEPS = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
APP = Path(__file__).with_name("racing_app.py")


def step_of(name: str) -> dict[str, Any]:
    (step,) = (step for step in STEPS if step.get("name") == name)
    return step


def commands(program: str) -> list[list[str]]:
    """Return the commands of all steps that start a program."""
    lines = [line.strip() for step in STEPS for line in step.get("run", "").splitlines()]
    return [shlex.split(line) for line in lines if line.startswith(program)]


def test_it_is_a_workflow_whose_steps_name_each_other():
    assert WORKFLOW[True]  # the key "on", as YAML reads it
    for job in WORKFLOW["jobs"].values():
        known = {step["id"] for step in job["steps"] if "id" in step}
        named = re.findall(r"steps\.(\w+)\.", json.dumps(job))
        assert set(named) <= known
        assert all(("run" in step) != ("uses" in step) for step in job["steps"])
    restored, saved = step_of("Restore the reference"), step_of("Save the reference")
    assert restored["with"]["path"] == saved["with"]["path"] == "refs/base"
    order = [step.get("name") for step in WORKFLOW["jobs"]["verify"]["steps"]]
    assert order.index("Save the reference") < order.index("Verify the pull request"), "a failing job saves nothing"
    actions = {step["uses"] for step in STEPS if "uses" in step}
    assert all(re.fullmatch(r"actions/[\w/-]+@v\d+", action) for action in actions)


def test_the_options_of_pytest_are_taken(tmp_path):
    (words,) = commands("pytest")
    done = subprocess.run(
        [sys.executable, "-m", *words, "--collect-only"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
@pytest.mark.parametrize("changes", [False, True])
def test_its_steps_find_a_change_and_leave_the_report(changes, tmp_path):
    repository = tmp_path / "repository"
    repository.mkdir()
    author = {f"GIT_{role}_{field}": "a@example.org" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    variables |= {
        **author,
        "PATH": path,
        "GITHUB_WORKSPACE": str(repository),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
    }
    variables |= WORKFLOW["env"]

    def bash(script: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-e", "-o", "pipefail", "-c", script]  # as GitHub runs it
        return subprocess.run(
            command, cwd=repository, env={**variables, **more}, capture_output=True, text=True, check=False
        )

    text = APP.read_text().replace("random.SystemRandom().sample(range(x.shape[1]), x.shape[1])", "range(x.shape[1])")
    (repository / "train.py").write_text(text)
    commit = "git add train.py && git commit --quiet --allow-empty --message=one"
    assert bash(f"git init --quiet && git remote add origin . && {commit}").returncode == 0
    base = bash("git rev-parse HEAD").stdout.strip()
    (repository / "train.py").write_text(text.replace("lr=0.01", "lr=0.02") if changes else text)
    assert bash(commit).returncode == 0

    named = bash(step_of("Name the CPU")["run"])
    assert named.returncode == 0, named.stderr
    assert re.fullmatch(r"model=[\w-]*\n", (tmp_path / "output").read_text())
    recorded = bash(step_of("Record the base commit")["run"], BASE=base)
    assert recorded.returncode == 0, recorded.stdout + recorded.stderr
    verified = bash(step_of("Verify the pull request")["run"])
    assert verified.returncode == (1 if changes else 0), verified.stdout + verified.stderr
    uploaded = [repository / path for path in step_of("Upload the report")["with"]["path"].split()]
    if changes:
        assert all(file.is_file() for file in uploaded)
        assert json.loads(uploaded[1].read_text())["cause"] == "settings"
