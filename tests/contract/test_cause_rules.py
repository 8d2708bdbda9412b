"""The docs list the rules of a cause as they are asked."""

import re
from pathlib import Path
from typing import get_args

from det_callbacks.compare.cause import RULES
from det_callbacks.report.advice import ADVICE
from det_callbacks.verdict import Cause

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "verdict.md").read_text()


def test_the_docs_list_every_rule_in_its_order() -> None:
    section = PAGE.split("## Why it differs")[1].split("\n## ")[0]
    listed = re.findall(r"^\| ([a-z ]+) \| (.*?) \| (.+) \|$", section, flags=re.M)
    rows = [row for row in listed if row[0] != "rule"]
    assert [row[0] for row in rows] == [rule.name for rule in RULES]
    for (name, causes, example), rule in zip(rows, RULES, strict=True):
        assert example, name
        if not callable(rule.cause):
            assert causes == f"`{rule.cause}`", name


def test_every_rule_leads_to_a_cause_that_a_verdict_knows() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert [*ADVICE] == [rule.name for rule in RULES]
    assert {rule.cause for rule in RULES if not callable(rule.cause)} <= set(get_args(Cause))
