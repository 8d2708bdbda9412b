"""A report as a browser would read it, without one: its tags, its text and the cells of its heat maps."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


@dataclass
class HeatMap:
    """One heat map: the labels of its rows, and of each column its first and last step and a letter a row."""

    name: str = ""
    labels: list[str] = field(default_factory=list)
    columns: list[tuple[int, int, dict[int, str]]] = field(default_factory=list)

    def state(self, step: int, module: str) -> str:
        """Return the letter of a cell."""
        cells = next(cells for first, last, cells in self.columns if first <= step <= last)
        return cells.get(self.labels.index(module), ".")

    def letters(self) -> str:
        """Return the worst letter of each column."""
        return "".join(min(cells.values(), key="ocm".index, default=".") for _, _, cells in self.columns)


@dataclass
class Page:
    """One report: name and attributes of each element, what a person reads, and the heat maps."""

    tags: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    text: str = ""
    style: str = ""
    maps: list[HeatMap] = field(default_factory=list)


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page()
        self._inside: list[str] = []
        self._height = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.page.tags.append((tag, attributes))
        self._inside.append(tag)
        if attributes.get("class") == "heat":
            self.page.maps.append(HeatMap())
        elif attributes.get("class") == "labels":
            self._height = int(re.search(r"(\d+)px", attributes["style"])[1])
        elif tag == "li" and self.page.maps and "title" in attributes:
            self.page.maps[-1].labels.append(attributes["title"])
        elif tag == "path" and attributes["class"] in ("m", "c", "o"):
            for y in re.findall(r"M0 (\d+)", attributes["d"]):
                self.page.maps[-1].columns[-1][2][int(y) // self._height] = attributes["class"]

    def handle_endtag(self, tag: str) -> None:
        while tag in self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        inside = self._inside[-1] if self._inside else ""
        if inside == "style":
            self.page.style += data
        elif inside == "title" and self.page.maps:
            first, last = re.match(r"Steps? (\d+)(?: to (\d+))?: ", data).groups()
            self.page.maps[-1].columns.append((int(first), int(last or first), {}))
        elif inside == "summary" and self.page.maps and not self.page.maps[-1].labels:
            self.page.maps[-1].name += data.partition(":")[0]
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
    assert [heat_map.name for heat_map in page.maps] == [f"Rank {rank}" for rank in range(verdict["coverage"]["ranks"])]
    started = {origin["rank"] for origin in verdict["origins"]}
    for rank, heat_map in enumerate(page.maps):
        letters = heat_map.letters()
        assert set(letters[: first["step"]]) == {"m"}
        if rank in started:
            assert "o" in letters
        elif rank != first["rank"]:
            assert "o" not in letters, f"rank {rank} only received the difference"
        elif first["is_origin"] is None:
            assert letters[first["step"]] == "c", "where it starts cannot be proven"
