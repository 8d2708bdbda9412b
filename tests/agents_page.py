"""docs/agents.md as a program reads it: its sections, commands, tables and fields."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from det_callbacks import Verdict

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "agents.md"
SKILL = ROOT / "docs" / "skills" / "det-callbacks" / "SKILL.md"
CAUSES = "What each cause asks for"


def sections(page: str) -> dict[str, str]:
    headings = re.split(r"(?m)^## (.*)$", page)
    return dict(zip(headings[1::2], headings[2::2], strict=True))


def commands(text: str) -> list[str]:
    blocks = re.findall(r"(?s)```console\n(.*?)```", text)
    return re.findall(r"(?m)^\s*\$ det-callbacks (.*)$", "\n".join(blocks))


def rows(text: str) -> Iterator[list[str]]:
    for row in re.findall(r"(?m)^\| (`.*) \|$", text):
        yield row.split(" | ")


def fields(text: str) -> list[str]:
    """Return the JSON fields that a table of a section tells an agent to read."""
    table = text.partition("| field | what it holds |")[2].partition("\n\n")[0]
    return [cells[0].strip("`") for cells in rows(table)]


def read(content: Any, path: str) -> Any:
    """Return what a path such as ``first_divergence.source[0]`` names;
    KeyError or IndexError if there is nothing.
    """
    for name, index in re.findall(r"([a-z_]+)|\[(\d+)\]", path):
        content = content[name] if name else content[int(index)]
    return content


def require_fields_of_its_cause(verdict: Verdict) -> None:
    """Fail unless the fields that the page tells an agent to read for this cause are
    there, and say something.
    """
    content = json.loads(json.dumps(verdict.to_dict()))
    table = sections(PAGE.read_text())[CAUSES]
    (cells,) = (cells for cells in rows(table) if f"`{verdict.cause}`" in cells[0])
    named = [
        field
        for field in re.findall(r"`([a-z_.]+)`", cells[1])
        if field.partition(".")[0] in content
    ]
    assert [field for field in named if read(content, field)], f"{named} say nothing"
    if "environment.differences" in named:
        assert [
            one["name"]
            for one in content["environment"]["differences"]
            if one["is_machine"] is False
        ]
