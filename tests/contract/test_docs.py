"""README and docs: links lead somewhere, examples are Python, tables name what there is."""

import ast
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import det_callbacks
from det_callbacks import DeterminismCallback, cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"\]\((?!https?:)([^)\s]*)\)")


def anchors(text: str) -> set[str]:
    headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?s)```.*?```", "", text))
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def files_with_links() -> list[Path]:
    """Return the site's pages, and the texts that mkdocs does not see."""
    others = [
        *ROOT.glob("*.md"),
        *(ROOT / "recipes").rglob("README.md"),
        *(ROOT / ".github").rglob("*.md"),
    ]
    return sorted([*PAGES, *others])


@pytest.mark.parametrize(
    "page", files_with_links(), ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_links_lead_somewhere_and_examples_are_python(page):
    text = page.read_text()
    prose = re.sub(r"(?s)```.*?```|`[^`\n]*`", "", text)
    for link in LINK.findall(prose):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target.read_text()), f"{page.name} links to {link}"
    for example in re.findall(r"(?s)```python\n(.*?)```", text):
        for node in ast.walk(ast.parse(example)):
            if isinstance(node, ast.ImportFrom) and node.module == "det_callbacks":
                assert {alias.name for alias in node.names} <= set(det_callbacks.__all__)


def test_the_readme_is_short_and_leads_to_every_page_of_use_and_so_does_the_site():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 200
    linked = set(re.findall(r"\]\(docs/([^)#]*\.md)", readme))
    # from the site's own navigation
    reached = {"index.md", "how-to/elsewhere.md", "reference/cli.md"}
    named = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert named == linked | reached == {page.relative_to(DOCS).as_posix() for page in PAGES}


def test_the_commands_of_the_decision_table_are_taken(monkeypatch):
    taken: list[str] = []

    class Commands:
        def __getattr__(self, name: str) -> Any:
            return lambda options: taken.append(options.command) or 0

    monkeypatch.setattr("det_callbacks.cli.parser.import_module", lambda name: Commands())
    commands = re.findall(r"\| `det-callbacks ([^`]*)` \|", (DOCS / "is-it-for-me.md").read_text())
    assert [cli.main(shlex.split(command)) for command in commands] == [0] * len(commands)
    assert set(taken) >= {
        "check",
        "record",
        "verify",
        "diff",
        "findings",
        "check-checkpoint",
        "ops",
    }


def test_the_number_of_bugs_is_that_of_the_gallery():
    entries = len(list((ROOT / "recipes" / "gallery").glob("*/README.md")))
    said = [
        re.findall(r"(\d+) (?:real )?bugs", page.read_text())
        for page in (ROOT / "README.md", DOCS / "is-it-for-me.md")
    ]
    assert said == [[str(entries)] * 2, [str(entries)]]


def test_arguments_are_listed():
    arguments = re.findall(r"(?m)^\| `(\w+)` \|", (DOCS / "reference" / "callback.md").read_text())
    parameters = inspect.signature(DeterminismCallback).parameters.values()
    assert arguments == [
        one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD
    ]


def test_the_page_of_the_command_line_is_its_help(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "98")
    page = (DOCS / "reference" / "cli.md").read_text()
    commands = "show findings diff record verify check find doctor ops check-checkpoint export"
    for command in commands.split():
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        assert f"## {command}\n\n```text\n{capsys.readouterr().out}```\n" in page


def test_the_api_page_names_everything_public():
    named = re.findall(
        r"(?m)^::: det_callbacks\.(\w+)$", (DOCS / "reference" / "api.md").read_text()
    )
    assert sorted(named) == sorted(det_callbacks.__all__)
