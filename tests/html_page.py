"""A report as a browser would read it, without one: its tags,
its text and the cells of its heat maps.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


@dataclass
class HeatMap:
    """One heat map: how many steps agree, differ and so on,
    and the letters of each step's column by row.
    """

    name: str = ""
    outcomes: str = ""
    labels: list[str] = field(default_factory=list)
    columns: dict[int, dict[int, str]] = field(default_factory=dict)

    def state(self, step: int, module: str) -> str:
        return self.columns[step].get(self.labels.index(module), ".")

    def letters(self) -> str:
        """Return the worst letter of each column."""
        return "".join(
            min(cells.values(), key="ocm".index, default=".") for cells in self.columns.values()
        )


class Page(HTMLParser):
    """One report: name and attributes of each element, what a person reads, and the heat maps."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = self.style = ""
        self.maps: list[HeatMap] = []
        self._inside, self._cells = [""], dict[int, str]()
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.tags.append((tag, attributes))
        self._inside.append(tag)
        if attributes.get("class") == "heat":
            self.maps.append(HeatMap())
        elif tag == "li" and self.maps and "title" in attributes:
            self.maps[-1].labels.append(attributes["title"])
        elif tag == "path" and attributes["class"] in ("m", "c", "o"):
            rows = re.findall(r"M0 (\d+)", attributes["d"])
            self._cells.update({int(row) // 16: attributes["class"] for row in rows})

    def handle_endtag(self, tag: str) -> None:
        while tag in self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._inside[-1] == "style":
            self.style += data
        elif self._inside[-1] == "title" and self.maps:
            self._cells = self.maps[-1].columns.setdefault(
                int(re.match(r"Step (\d+): ", data)[1]), {}
            )
        elif self._inside[-1] == "summary" and self.maps and not self.maps[-1].labels:
            self.maps[-1].name, _, self.maps[-1].outcomes = data.partition(", steps: ")
        else:
            self.text += data


def assert_no_receiver_is_an_origin(folder: Path, verdict: Mapping[str, Any]) -> None:
    """The report of several ranks has a map of each, and shows an origin only
    where the verdict says one is.
    """
    page, first = Page(folder / "report.html"), verdict["first_divergence"]
    assert [heat_map.name for heat_map in page.maps] == [
        f"Rank {rank}" for rank in range(verdict["coverage"]["ranks"])
    ]
    started = {origin["rank"] for origin in verdict["origins"]}
    for rank, heat_map in enumerate(page.maps):
        letters = heat_map.letters()
        assert list(letters[: first["step"]]) == ["m"] * first["step"]
        if rank in started or rank != first["rank"]:
            assert ("o" in letters) is (rank in started), (
                f"rank {rank} only received the difference"
            )
        elif first["is_origin"] is None:
            assert letters[first["step"]] == "c", "where it starts cannot be proven"
