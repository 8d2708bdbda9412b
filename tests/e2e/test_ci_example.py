"""The GitHub action and its example: their commands are real ones, their steps fit together,
and they find a change.
"""

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
ACTION = yaml.safe_load((ROOT / ".github" / "actions" / "verify" / "action.yml").read_text())
STEPS = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]] + ACTION["runs"][
    "steps"
]


def step_of(name: str) -> dict[str, Any]:
    (step,) = (step for step in STEPS if step.get("name") == name)
    return step


def commands(program: str) -> list[list[str]]:
    """Return the commands of all steps that start a program."""
    lines = [line.strip() for step in STEPS for line in step.get("run", "").splitlines()]
    return [shlex.split(line) for line in lines if line.startswith(program)]


def test_its_steps_name_each_other_and_its_inputs():
    assert WORKFLOW[True]  # the key "on", as YAML reads it
    text = json.dumps([ACTION["runs"], ACTION["outputs"]])
    steps = ACTION["runs"]["steps"]
    assert set(re.findall(r"steps[.](\w+)[.]", text)) <= {step.get("id") for step in steps}
    assert set(re.findall(r"inputs[.]([\w-]+)", text)) == {*ACTION["inputs"]}
    (use,) = (
        step for step in STEPS if "det_callbacks/.github/actions/verify@" in step.get("uses", "")
    )
    assert (
        {name for name, one in ACTION["inputs"].items() if one.get("required")}
        <= {*use["with"]}
        <= {*ACTION["inputs"]}
    )
    assert all(("run" in step) != ("uses" in step) for step in STEPS)
    assert all("shell" in step for step in steps if "run" in step), "a composite action needs it"
    restored, saved = step_of("Restore the reference"), step_of("Save the reference")
    assert restored["with"]["path"] == saved["with"]["path"] == "determinism/base"
    order = [step.get("name") for step in steps]
    assert order.index("Save the reference") < order.index("Verify the pull request"), (
        "a failing job saves nothing"
    )
    actions = {step["uses"] for step in STEPS if "uses" in step} - {use["uses"]}
    assert all(re.fullmatch(r"actions/[\w/-]+@v\d+", action) for action in actions)


def test_the_options_of_pytest_are_taken(tmp_path):
    (words,) = commands("pytest")
    done = subprocess.run(
        [sys.executable, "-m", *words, "--collect-only"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout + done.stderr


# what the pull request changes, and the exit status
CHANGES: dict[str, tuple[str, str, int]] = {
    "nothing": ("", "", 0),
    "a loss": ("loss = ", "loss = 1.5 * ", 1),
    "an error": ("import", "raise SystemExit('broken')\nimport", 2),
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
@pytest.mark.parametrize("change", CHANGES)
def test_its_steps_find_a_change_and_leave_the_report(change, tmp_path):
    repository = tmp_path / "repository"
    repository.mkdir()
    author = {
        f"GIT_{role}_{field}": "a@example.org"
        for role in ("AUTHOR", "COMMITTER")
        for field in ("NAME", "EMAIL")
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    variables |= {**author, **WORKFLOW["env"], "PATH": path, "GITHUB_WORKSPACE": str(repository)}
    variables |= {
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }
    variables |= {
        "COMMAND": "python train.py --name 'a b'",
        "OPTIONS": ACTION["inputs"]["options"]["default"],
        "LEVEL": "op",
    }

    def bash(script: str, **more: str) -> subprocess.CompletedProcess[str]:
        # as GitHub runs it
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
        return subprocess.run(
            command,
            cwd=repository,
            env={**variables, **more},
            capture_output=True,
            text=True,
            check=False,
        )

    old, new, status = CHANGES[change]
    (repository / "train.py").write_text(PROGRAM)
    commit = "git add train.py && git commit --quiet --allow-empty --message=one"
    assert bash(f"git init --quiet && git remote add origin . && {commit}").returncode == 0
    base = bash("git rev-parse HEAD").stdout.strip()
    assert old in PROGRAM
    (repository / "train.py").write_text(PROGRAM.replace(old, new, 1) if old else PROGRAM)
    assert bash(commit).returncode == 0

    assert bash(step_of("Name the CPU")["run"]).returncode == 0
    assert re.fullmatch(r"model=[\w-]*\n", (tmp_path / "output").read_text())
    recorded = bash(step_of("Record the base commit")["run"], BASE=base)
    assert recorded.returncode == 0, recorded.stdout + recorded.stderr
    verified = bash(step_of("Verify the pull request")["run"])
    assert verified.returncode == 0, "the next steps show the verdict first"
    assert (tmp_path / "output").read_text().endswith(f"status={status}\n"), (
        verified.stdout + verified.stderr
    )
    end = step_of("End with the status of the verification")["run"]
    assert bash(end, STATUS=f"{status}", IS_ALLOWED="false").returncode == status
    assert bash(end, STATUS=f"{status}", IS_ALLOWED="true").returncode == (2 if status == 2 else 0)
    if status == 2:
        return
    shown = bash(step_of("Show the verdict")["run"])
    assert shown.returncode == 0, shown.stderr
    summary = (tmp_path / "summary.md").read_text()
    if not status:
        assert shown.stdout == ""
        assert summary.startswith("## Training: match\n")
        return
    line = 1 + PROGRAM[: PROGRAM.index(old)].count("\n")
    assert shown.stdout.startswith(
        f"::error file=train.py,line={line},title=Training diverged::Step 0, "
    )
    assert summary.startswith("## Training: diverged\n")
    assert "| sites that differ |" in summary
    uploaded = [repository / path for path in step_of("Upload the report")["with"]["path"].split()]
    assert all(file.is_file() for file in uploaded)


PROGRAM = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).mean()
    loss.backward()
    optimizer.step()
"""
