"""Makes docs/reference/causes.md and findings.md of the files of the rules: ``make causes``, ``make findings``."""

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from det_callbacks.causes import table as causes
from det_callbacks.findings import table as findings

PAGES = Path(__file__).resolve().parents[1] / "docs" / "reference"
EXAMPLE = "\n\nExample:\n"

CAUSES = """# The causes

<!-- Made by `make causes` from the files in det_callbacks/causes: change those. -->

A verdict names one `cause`. The rules below are tried in chronological order: what a run starts with, what it is given,
what it samples, what it computes. The first that applies names the cause. Each has an example of the whole explanation.
[The verdict](verdict.md#why-it-differs) describes the evidence.

| rule | cause | when it applies |"""

FINDINGS = """# The findings

<!-- Made by `make findings` from the files in det_callbacks/findings: change those. -->

A finding is a mistake that a single recorded run reveals: the run is reproducible but wrong. `det-callbacks findings`
checks for them in this order. `level` is the lowest [level](callback.md) that records what the finding needs; below
that level it is never reported. [Look for findings](../how-to/findings.md) describes the command and its limits.

| finding | level | when it applies |"""


def when(rule: Any) -> str:
    return " ".join((inspect.getdoc(rule) or "").partition(EXAMPLE)[0].split())


def name_of(rule: Any) -> str:
    return str(rule.__name__).rpartition(".")[2].replace("_", " ")


def example(rule: Any) -> str:
    return inspect.cleandoc((inspect.getdoc(rule) or "").partition(EXAMPLE)[2])


def page(head: str, rules: Sequence[Any], titles: Sequence[str], rows: Sequence[str]) -> str:
    table = [head, "| --- | --- | --- |", *(f"| {row} | {when(rule)} |" for row, rule in zip(rows, rules, strict=True))]
    named = zip(titles, rules, strict=True)
    sections = [f"## {title}\n\n{when(rule)}\n\n```text\n{example(rule)}\n```" for title, rule in named]
    return "\n\n".join(["\n".join(table), *sections]) + "\n"


def pages() -> dict[str, str]:
    rules = causes.RULES
    rows = [f"{name_of(rule)} | {' or '.join(f'`{cause}`' for cause in rule.CAUSES)}" for rule in rules]
    found = {"causes": page(CAUSES, rules, [name_of(rule).capitalize() for rule in rules], rows)}
    names = [rule.name for rule in findings.RULES]
    rows = [f"[`{rule.name}`](#{rule.name}) | `{rule.level}`" for rule in findings.RULES]
    return {**found, "findings": page(FINDINGS, findings.RULES, names, rows)}


def is_current(name: str) -> bool:
    return (PAGES / f"{name}.md").read_text() == pages()[name]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        (PAGES / f"{name}.md").write_text(pages()[name])
