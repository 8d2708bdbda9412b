"""Makes docs/reference/causes.md and findings.md of the files of the rules: ``make
causes``, ``make findings``.
"""

import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from det_callbacks.causes import data, generators, ops, programs, settings, states
from det_callbacks.findings import table as findings

PAGES = Path(__file__).resolve().parents[1] / "docs" / "reference"
EXAMPLE = "\n\nExample:\n"

CAUSES = """# The causes

<!-- Made by `make causes` from the files in det_callbacks/causes: change those. -->

A verdict names one `cause`: what the root of its [trail](verdict.md#the-trail) means. These are the meanings, each with
an example of the whole explanation.

| meaning | cause | when it applies |"""  # noqa: E501  # a text

FINDINGS = """# The findings

<!-- Made by `make findings` from the files in det_callbacks/findings: change those. -->

A finding is a mistake that a single recorded run reveals: the run is reproducible but wrong. `det-callbacks findings`
checks for them in this order. `level` is the lowest [level](callback.md) that records what the finding needs; below
that level it is never reported. [Look for findings](../how-to/findings.md) describes the command and its limits.

| finding | level | when it applies |"""  # noqa: E501  # a text


def cause_rules() -> list[Any]:
    """Return the functions of the causes that have an example, in the order of their files."""
    rooms = (settings, states, data, generators, programs, ops)
    found = (value for room in rooms for value in vars(room).values() if inspect.isfunction(value))
    return [rule for rule in dict.fromkeys(found) if EXAMPLE in (inspect.getdoc(rule) or "")]


def causes_of(rule: Any) -> list[str]:
    (line,) = re.findall(r"(?m)^Causes: (.*)$", inspect.getdoc(rule) or "")
    return line.split(", ")


def when(rule: Any) -> str:
    text = re.sub(r"(?m)^Causes: .*$", "", (inspect.getdoc(rule) or "").partition(EXAMPLE)[0])
    return " ".join(text.split())


def name_of(rule: Any) -> str:
    return str(rule.__name__).replace("_", " ")


def example(rule: Any) -> str:
    return inspect.cleandoc((inspect.getdoc(rule) or "").partition(EXAMPLE)[2])


def page(head: str, rules: Sequence[Any], titles: Sequence[str], rows: Sequence[str]) -> str:
    table = [
        head,
        "| --- | --- | --- |",
        *(f"| {row} | {when(rule)} |" for row, rule in zip(rows, rules, strict=True)),
    ]
    named = zip(titles, rules, strict=True)
    sections = [
        f"## {title}\n\n{when(rule)}\n\n```text\n{example(rule)}\n```" for title, rule in named
    ]
    return "\n\n".join(["\n".join(table), *sections]) + "\n"


def pages() -> dict[str, str]:
    rules = cause_rules()
    rows = [
        f"{name_of(rule)} | {' or '.join(f'`{cause}`' for cause in causes_of(rule))}"
        for rule in rules
    ]
    found = {"causes": page(CAUSES, rules, [name_of(rule).capitalize() for rule in rules], rows)}
    names = [rule.name for rule in findings.RULES]
    rows = [f"[`{rule.name}`](#{rule.name}) | `{rule.level}`" for rule in findings.RULES]
    return {**found, "findings": page(FINDINGS, findings.RULES, names, rows)}


def is_current(name: str) -> bool:
    return (PAGES / f"{name}.md").read_text() == pages()[name]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        (PAGES / f"{name}.md").write_text(pages()[name])
