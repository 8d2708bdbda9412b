"""Makes docs/reference/findings.md of the files in ``det_callbacks/findings``: ``make findings``."""

import inspect
from pathlib import Path

from det_callbacks.findings.rule import Rule
from det_callbacks.findings.table import RULES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "findings.md"
EXAMPLE = "\n\nExample:\n"

HEAD = """# The findings

<!-- Made by `make findings` from the files in det_callbacks/findings: change those. -->

A finding is what one recorded run shows by itself: the training is reproducible, and wrong. The command looks for them
in this order. `level` is the lowest [level](callback.md) that records what the finding needs; below it the finding is
silent. [Look for findings](../how-to/findings.md) describes the command and its limits.
"""


def when(rule: Rule) -> str:
    """Return when a finding applies, in one line."""
    return " ".join((inspect.getdoc(rule) or "").partition(EXAMPLE)[0].split())


def example(rule: Rule) -> str:
    """Return the whole message that stands in a rule's docstring."""
    return inspect.cleandoc((inspect.getdoc(rule) or "").partition(EXAMPLE)[2])


def page() -> str:
    """Return the page as it has to be."""
    rows = [(f"[`{rule.NAME}`](#{rule.NAME})", f"`{rule.LEVEL}`", when(rule)) for rule in RULES]
    table = [
        "| finding | level | when it applies |",
        "| --- | --- | --- |",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    sections = [f"## {rule.NAME}\n\n{when(rule)}\n\n```text\n{example(rule)}\n```" for rule in RULES]
    return "\n\n".join([HEAD.rstrip(), "\n".join(table), *sections]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
