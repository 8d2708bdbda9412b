"""docs/agents.md and its short form, followed by a program:
from two runs that differ to the line that is at fault.
"""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from agents_page import CAUSES, PAGE, SKILL, commands, fields, read, rows, sections
from checking import Ended
from test_followed_loops import fork

from det_callbacks import cli
from det_callbacks.cli import check as checks
from det_callbacks.verdict import Cause

APP = Path(__file__).with_name("racing_app.py")
FIELD = re.compile(
    r"`((?:first_divergence|environment)\.[\w.\[\]]+|record_next|cause|evidence|origins)`"
)
SCRIPT = ["--", "python", "train.py"]


class Agent:
    """Runs the commands of one section after the other, and reads the JSON
    that the last one printed.
    """

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self.page = sections(PAGE.read_text())

    def follow(self, heading: str) -> tuple[Any, list[int]]:
        """Return the last JSON of a section, of which all fields that it names are there,
        and the exit statuses.
        """
        (text,) = (
            text
            for name, text in self.page.items()
            if name.partition(". ")[2] == heading or name == heading
        )
        content, statuses = None, []
        for command in commands(text):
            ended = self.run(command)
            assert ended.status != 2, ended.text + ended.errors
            statuses.append(ended.status)
            if "--json" in command:
                content = json.loads(ended.text)
                assert not ended.errors or command.startswith("find")  # its progress
        for path in fields(text) if content is not None else ():
            read(content, path)
        return content, statuses

    def run(self, command: str) -> Ended:
        words = shlex.split(command)
        if words[-3:] == SCRIPT:
            words[-2] = sys.executable
        self._capfd.readouterr()
        return Ended(cli.main(words), *self._capfd.readouterr())

    def options_for(self, arguments: dict[str, Any]) -> list[str]:
        """Return the options of ``record`` that the table makes of ``record_next``."""
        (text,) = (
            text for name, text in self.page.items() if name.endswith("Record what is missing")
        )
        options = {cells[0].strip("`"): cells[1].strip("`") for cells in rows(text)}
        values = {
            name: value if isinstance(value, str) else ",".join(map(str, value))
            for name, value in arguments.items()
        }
        return [options[name] + value for name, value in values.items()]

    def recordings(self, heading: str) -> list[list[str]]:
        """Return the options of the recordings of a section, without the script."""
        (text,) = (text for name, text in self.page.items() if name.endswith(heading))
        return [
            shlex.split(command)[2:-3] for command in commands(text) if command.startswith("record")
        ]


def test_an_agent_that_follows_the_page_ends_at_the_line(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "run_process", fork)
    script = Path(shutil.copy(APP, "train.py"))
    agent = Agent(capfd)
    found, statuses = agent.follow("The short way")
    assert (statuses, found["origins"][0]["op"]) == ([1], "app.sum_rows.default")
    assert Path(found["find"]["repro"]["path"]).exists()
    assert agent.follow("Record both runs")[1] == [0, 0]

    found, statuses = agent.follow("Compare")
    assert (statuses, found["verdict"], found["first_divergence"]["is_origin"]) == (
        [1],
        "diverged",
        None,
    )
    first_seven = [cells[0].strip("`") for cells in rows(agent.page[CAUSES])][:7]
    assert found["cause"] not in first_seven

    assert (
        agent.recordings("Record what is missing") == [agent.options_for(found["record_next"])] * 2
    )
    found, _ = agent.follow("Record what is missing")
    assert found["first_divergence"]["is_origin"] is True

    path, line, function = re.fullmatch(
        r"(.*):(\d+) in (\w+)", read(found, "first_divergence.source[0]")
    ).groups()
    assert "sum_rows(x)" in Path(path).read_text().splitlines()[int(line) - 1]
    assert (function, found["first_divergence"]["op"]) == ("forward", "app.sum_rows.default")
    to_read = fields(agent.page["4. Go to the line"])
    assert len(to_read) == 6
    for field in to_read:
        read(found, field)

    assert (
        agent.recordings("Measure the difference") == [agent.options_for(found["record_next"])] * 2
    )
    found, statuses = agent.follow("Measure the difference")
    assert (statuses, found["record_next"]) == ([0, 0, 1], None)
    numbers = read(found, "first_divergence.numbers.output[0]")
    assert 0 < numbers["num_differing"] <= numbers["num_elements"] == 16

    assert agent.follow("Mistakes that repeat") == (
        {"schema": 1, "run": "refs/first", "findings": []},
        [0],
    )
    assert agent.follow("Prove the fix")[1] == [1], "not mended yet"
    text = script.read_text()
    mended = text.replace(
        "random.SystemRandom().sample(range(x.shape[1]), x.shape[1])", "range(x.shape[1])"
    )
    assert mended != text
    script.write_text(mended)
    assert agent.follow("Prove the fix")[1] == [0]


def test_the_short_form_has_the_same_commands_and_fields():
    page, skill = PAGE.read_text(), SKILL.read_text()
    assert set(commands(skill)) <= set(commands(page))
    assert {"find", "diff", "record", "check"} == {
        command.split()[0] for command in commands(skill)
    }
    named = set(
        re.findall(
            r"`((?:first_divergence|environment)\.[\w.\[\]]+|record_next|cause|evidence|origins)`",
            skill,
        )
    )
    assert len(named) >= 8
    assert all(f"`{name}`" in page or f"`{name.partition('[')[0]}" in page for name in named)


def test_the_skill_file_has_the_form_that_agents_load():
    head = yaml.safe_load(SKILL.read_text().split("---\n")[1])
    assert head["name"] == SKILL.parent.name
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", head["name"])
    assert 0 < len(head["description"]) <= 1024
    assert len(head["compatibility"]) <= 500
    assert set(head) <= {
        "name",
        "description",
        "license",
        "compatibility",
        "metadata",
        "allowed-tools",
    }
    assert len(SKILL.read_text().splitlines()) < 500


def test_the_table_of_causes_has_each_cause():
    causes = [
        cause
        for cells in rows(sections(PAGE.read_text())[CAUSES])
        for cause in re.findall(r"`(\w+)`", cells[0])
    ]
    assert sorted(causes) == sorted(get_args(Cause))
