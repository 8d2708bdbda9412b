"""Bugs that others had: with the bug the culprit is named, with the fix the verdict is
a match without findings.
"""

import re

import pytest
from bugs_page import GALLERY, PAGE, entries, page
from test_documented_commands import run_page

from det_callbacks.cli import main

NAMES = sorted(entries())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_both_arms_say_what_the_readme_promises(name, tmp_path):
    readme = GALLERY / name / "README.md"
    ended = [
        (command, status)
        for command, status in run_page(readme, tmp_path)
        if not command.startswith("echo")
    ]
    last_command, last_status = ended[-1]
    assert any(status for _, status in ended), "no arm with the bug"
    assert last_status == 0
    assert " verify" in last_command or " resume" in last_command or "findings" in last_command
    # by now that of the fix, where it is another training
    for run in (tmp_path / "refs").iterdir():
        assert main(["findings", str(run)]) == 0


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_is_short_and_its_readme_shows_both_arms(name):
    readme = (GALLERY / name / "README.md").read_text()
    assert len((GALLERY / name / "train.py").read_text().splitlines()) <= 80
    assert re.search(r"\]\(https://github\.com/[\w./-]+/(issues|pull)/\d+\)", readme)
    assert re.search(r"^\$ echo \$\?\n[13]$", readme, re.MULTILINE)
    assert re.search(r"^det_callbacks: match: verified ", readme, re.MULTILINE)


def test_the_page_of_the_docs_is_made_from_them():
    assert PAGE.read_text() == page()
    assert {path.parent.name for path in GALLERY.glob("*/train.py")} == set(NAMES)
