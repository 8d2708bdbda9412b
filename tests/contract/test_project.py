"""The files around the package: one version, a changelog that can be read,
and workflows that run targets of make.
"""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
GITHUB = ROOT / ".github"


def jobs_of(workflow: Path) -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(workflow.read_text())["jobs"]
    return jobs


def wrong_steps(jobs: dict[str, Any], makefile: str = MAKEFILE) -> list[str]:
    """Return the commands that are not one target of the Makefile with its variables."""
    targets = set(re.findall(r"(?m)^([a-z-]+):", makefile))
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    found = {
        one: re.fullmatch(r"make ([a-z-]+)((?: ([A-Z]+)=(?:'[^']*'|\S+))*)", one)
        for one in commands
    }
    return [
        one
        for one, match in found.items()
        if match is None
        or match[1] not in targets
        or not all(f"$({name}" in makefile for name in re.findall(r" ([A-Z]+)=", match[2]))
    ]


def test_workflows_run_targets_of_make_and_nothing_else():
    workflows = [*(GITHUB / "workflows").iterdir()]
    jobs = {name: job for workflow in workflows for name, job in jobs_of(workflow).items()}
    assert wrong_steps(jobs) == []
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert all(
        step.keys() <= {"run"} or step["uses"].startswith(("actions/", "pypa/")) for step in steps
    )
    assert {"lint", "tests", "slow", "versions", "wheel", "docs", "build", "publish"} == {*jobs}


def test_only_the_job_that_publishes_may_and_without_a_stored_token():
    file = GITHUB / "workflows" / "publish.yml"
    workflow, jobs = yaml.safe_load(file.read_text()), jobs_of(file)
    assert workflow["permissions"] == {"contents": "read"}
    assert {name for name, job in jobs.items() if "permissions" in job} == {"publish"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert (jobs["publish"]["needs"], jobs["publish"]["environment"]) == ("build", "pypi")
    assert "secrets." not in file.read_text()


@pytest.mark.parametrize("tag", ["v{}", "v{}1", "{}x"])
def test_a_tag_that_is_not_the_version_is_refused(tag):
    make = ["make", "--silent", "tag", f"TAG={tag.format(PROJECT['version'])}"]
    done = subprocess.run(make, cwd=ROOT, check=False, capture_output=True)
    assert (done.returncode == 0) is (tag == "v{}")


CONDA = {"torch": "pytorch", "xxhash": "python-xxhash"}  # the others have the same names there


def test_the_conda_recipe_has_the_dependencies_of_the_package():
    text = (ROOT / "conda" / "meta.yaml").read_text()
    (version,) = re.findall(r'set version = "(.*)"', text)
    assert version == PROJECT["version"]
    recipe = yaml.safe_load(re.sub(r"{%.*?%}", "", re.sub(r"{{.*?}}", "x", text)))
    wanted = [f"python {PROJECT['requires-python']}"]
    for one in map(Requirement, PROJECT["dependencies"]):
        texts = sorted(map(str, one.specifier), key=lambda part: not part.startswith(">="))
        wanted.append(f"{CONDA.get(one.name, one.name)} {','.join([texts[0], *sorted(texts[1:])])}")
    assert recipe["requirements"]["run"] == wanted
    assert recipe["build"]["entry_points"] == [
        f"{name} = {place}" for name, place in PROJECT["scripts"].items()
    ]
    assert (recipe["about"]["summary"], recipe["about"]["license"]) == (
        PROJECT["description"],
        PROJECT["license"],
    )


@pytest.mark.parametrize(
    "command",
    ["pytest", "make nothing", "make lint && true", "make lint\nmake docs", "make test OTHER=1"],
)
def test_a_step_that_runs_something_else_is_found(command):
    assert wrong_steps({"job": {"steps": [{"run": command}]}}) == [command]


def test_the_matrix_has_each_session_and_each_tested_python():
    jobs = jobs_of(GITHUB / "workflows" / "ci.yml")
    noxfile = (ROOT / "noxfile.py").read_text()
    tests, hf = noxfile.split("def tests")
    sessions = [f"tests({name})" for name in re.findall(r'id="(.*?)"', tests)]
    sessions += [f"hf({name})" for name in re.findall(r'id="(.*?)"', hf)]
    assert jobs["versions"]["strategy"]["matrix"]["session"] == sessions
    tested = jobs["tests"]["strategy"]["matrix"]["python"]
    page = (ROOT / "docs" / "reference" / "versions.md").read_text()
    assert f"fast tests on Python {', '.join(tested[:-1])} and {tested[-1]}." in page


def test_a_bug_report_has_the_output_of_the_doctor():
    forms = {
        path.stem: yaml.safe_load(path.read_text())
        for path in (GITHUB / "ISSUE_TEMPLATE").iterdir()
    }
    first = forms["bug"]["body"][0]
    assert "det-callbacks doctor --json" in first["attributes"]["label"]
    assert first["validations"]["required"]
    for form in forms.values():
        assert form["name"]
        assert form["description"]


def test_one_version_is_everywhere_and_the_changelog_begins_with_what_is_not_released():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert (citation["title"], citation["abstract"]) == (PROJECT["name"], PROJECT["description"])
    assert (citation["keywords"], citation["authors"]) == (PROJECT["keywords"], PROJECT["authors"])
    changelog = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"(?m)^## (.*)$", changelog)
    assert headings[:2] == ["[Unreleased]", f"[{PROJECT['version']}] - {citation['date-released']}"]
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", one) for one in headings[1:])
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert {*re.findall(r"(?m)^### (.*)$", changelog)} <= kinds
