"""A report as a browser would read it, without one: its tags, its text and its data."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


@dataclass
class Page:
    """One report.

    Attributes:
        tags: name and attributes of each element.
        text: what a person reads.
        data: what the heat map is drawn from.
        scripts: contents of those that run.
    """

    tags: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    text: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    scripts: list[str] = field(default_factory=list)
    styles: list[str] = field(default_factory=list)

    def state(self, step: int, module: str, *, number: int = 0, view: str = "modules") -> str:
        """Return the letter of a cell."""
        grid = self.data["maps"][number]
        column = next(index for index, (first, last) in enumerate(grid["columns"]) if first <= step <= last)
        letter: str = grid[view]["states"][self.data[view].index(module)][column]
        return letter

    def letters(self, *, number: int = 0) -> str:
        """Return the worst letter of each column."""
        rows = self.data["maps"][number]["modules"]["states"]
        return "".join(min(column, key="ocrm.".index) for column in zip(*rows, strict=True))

    def listed(self) -> list[dict[str, Any]]:
        """Return the sites that are listed."""
        texts, sites = self.data["texts"], self.data["sites"]
        return [
            {
                "step": step,
                "phase": self.data["phases"][sites[number][1]],
                "module": texts[sites[number][2]],
                "op": texts[sites[number][3]],
                "name": texts[sites[number][7]],
                "kind": kind,
                "role": role,
                "digests": (ours, theirs),
                "source": [texts[line] for line in sites[number][10]],
            }
            for _, step, number, kind, role, ours, theirs in self.data["entries"]
        ]


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page()
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.page.tags.append((tag, attributes))
        if tag in ("script", "style"):
            self._inside = "data" if attributes.get("id") == "data" else tag

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "data":
            self.page.data = json.loads(data)
        elif self._inside == "script":
            self.page.scripts.append(data)
        elif self._inside == "style":
            self.page.styles.append(data)
        else:
            self.page.text += data


def read_page(path: Path) -> Page:
    """Return a report."""
    parser = _Parser()
    parser.feed(path.read_text(encoding="utf-8"))
    parser.close()
    return parser.page


def assert_no_receiver_is_an_origin(folder: Path, verdict: Mapping[str, Any]) -> None:
    """The report of several ranks has a map of each, and shows an origin only where the verdict says one is."""
    page, first = read_page(folder / "report.html"), verdict["first_divergence"]
    ranks = [grid["rank"] for grid in page.data["maps"]]
    assert ranks == list(range(verdict["coverage"]["ranks"]))
    started = {origin["rank"] for origin in verdict["origins"]}
    for number, rank in enumerate(ranks):
        letters = page.letters(number=number)
        assert set(letters[: first["step"]]) == {"m"}
        if rank in started:
            assert "o" in letters
        elif rank != first["rank"]:
            assert "o" not in letters, f"rank {rank} only received the difference"
        elif first["is_origin"] is None:
            assert letters[first["step"]] == "c", "where it starts cannot be proven"
