"""Makes docs/reference/causes.md of the files in ``det_callbacks/causes``: ``make causes``."""

import inspect
from pathlib import Path

from det_callbacks.causes.rule import Rule
from det_callbacks.causes.table import RULES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "causes.md"
EXAMPLE = "\n\nExample:\n"

HEAD = """# The causes

<!-- Made by `make causes` from the files in det_callbacks/causes: change those. -->

A verdict names one `cause`. The rules below are asked in this order, which is that of time: what a run starts with,
what it is given, what it draws, what it computes. The first that applies names the cause. Each has an example of the
whole message. [The verdict](verdict.md#why-it-differs) describes the evidence.
"""


def when(rule: Rule) -> str:
    """Return when a rule applies, in one line."""
    return " ".join((inspect.getdoc(rule) or "").partition(EXAMPLE)[0].split())


def example(rule: Rule) -> str:
    """Return the whole message that stands in a rule's docstring."""
    return inspect.cleandoc((inspect.getdoc(rule) or "").partition(EXAMPLE)[2])


def page() -> str:
    """Return the page as it has to be."""
    rows = [(rule.NAME, " or ".join(f"`{cause}`" for cause in rule.CAUSES), when(rule)) for rule in RULES]
    table = ["| rule | cause | when it applies |", "| --- | --- | --- |", *(f"| {' | '.join(row)} |" for row in rows)]
    sections = [f"## {rule.NAME.capitalize()}\n\n{when(rule)}\n\n```text\n{example(rule)}\n```" for rule in RULES]
    return "\n\n".join([HEAD.rstrip(), "\n".join(table), *sections]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
