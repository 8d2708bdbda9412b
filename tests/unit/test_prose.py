"""The linter of prose: what it reads of a page and of a module, and what it finds there."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("proselint", reason="proselint comes with the dev extra only")

LINTER = Path(__file__).parents[1] / "prose.py"
PAGE = """# A page

The error is
told, in order to be be read.

```console
$ echo the error is told
```

    The error is told.

`is told` and [a link](https://example.org/all the same)
"""
MODULE = '''"""The error is told."""
is_told = "is told", f"the error of step {1} is said here"  # of which nobody knows
'''


def lint(path: Path) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, LINTER, path], capture_output=True, text=True, check=False
    )
    assert not done.stderr
    return done.returncode, [line.removeprefix(f"{path}:") for line in done.stdout.splitlines()]


def test_a_page_is_read_without_its_code_and_proselint_is_asked(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    status, found = lint(page)
    assert status == 1
    assert [line.partition(":")[0] for line in found] == ["3", "4"]
    assert found[0].startswith("3: 'is told': name who says it")
    assert found[1].startswith("4: There's a lexical illusion in 'be be'")
    page.write_text("# A page\n\nThe closing line names the error.\n")
    assert lint(page) == (0, [])


PATTERNS = {
    "It repeats the step before.": "step before",
    "A tensor differs that no op wrote.": "A tensor differs that",
    "Ops run in another order.": "in another order",
    "Two trainings agree.": "trainings",
    "It is the same for each training.": "each training",
    "An edge follows from a read.": "follows from",
    "It warns, also after a resume.": ", also after",
    "A file beside the run.": "beside the",
    "Its content is not what its name says.": "is not what its",
    "It is 1 in the reference, 2 now.": "in the reference, 2 now",
}


def test_a_pattern_of_ours_is_found_and_plain_english_is_not(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("\n\n".join(PATTERNS))
    status, found = lint(page)
    assert status == 1
    assert [line.split("'")[1] for line in found] == [*PATTERNS.values()]
    page.write_text(
        "The training loop runs each training step. A step before the first one follows the "
        "setup.\n"
    )
    assert lint(page) == (0, [])


def test_docstrings_comments_and_messages_of_a_module_are_read(tmp_path):
    module = tmp_path / "module.py"
    module.write_text(MODULE)
    status, found = lint(module)
    assert status == 1
    assert [tuple(line.split("'")[:2]) for line in found] == [
        ("1: ", "is told"),
        ("2: ", "is said"),
        ("2: ", "nobody knows"),
        ("2: ", "of which nobody"),
    ]
