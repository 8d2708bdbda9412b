"""The differing sites that a report lists: each text and each site once, and no more of them than fit."""

from typing import Any

import numpy as np

from det_callbacks.compare.step_states import SiteDifferences
from det_callbacks.report.html.grid import Places, Placing
from det_callbacks.report.html.rows import source_of
from det_callbacks.report.run_text import describe_tensor
from det_callbacks.runs.program import TensorLayout

MAX_LISTED = 20_000
"""Sites listed in one report."""
FIRST_STEP, LATER_STEP = 2_000, 20
"""Sites listed of the first step that differs; and of a later one, where many steps share what may be listed."""
FIRST_STEP_PER_CELL = 100
"""Of the first step that differs, sites listed of one module in one phase."""

KINDS = ("content", "argument", "structure", "missing", "extra")
STARTS, CARRIED, UNPROVEN = range(3)


class Listing:
    """Collects differing sites of all heat maps.

    Args:
        placing: rows of the sites.
        per_map: sites listed of one heat map.
        num_steps: of the longest of them.
    """

    def __init__(self, placing: Placing, *, per_map: int, num_steps: int) -> None:
        self._placing = placing
        self._per_map = per_map
        self._num_steps = max(1, num_steps)
        self._texts: dict[str, int] = {}
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._sites: list[list[Any]] = []
        self._entries: list[list[Any]] = []
        self._left: dict[int, int] = {}

    def add(self, number: int, step: int, sites: SiteDifferences, places: Places, starting: np.ndarray) -> None:
        """List sites of a step: where differences start, then the first ones of each module and phase.

        Args:
            number: of the heat map.
            step: training batch.
            sites: how they differ.
            places: of the sites that differ.
            starting: bool by differing row.
        """
        is_first = number not in self._left
        left = self._left.setdefault(number, self._per_map)
        most = min(left, FIRST_STEP if is_first else max(LATER_STEP, self._per_map // self._num_steps))
        both = places.modules * len(self._placing.phases.labels) + places.phases
        order = (
            np.flatnonzero(starting),
            _first_of_each(places.modules, 1),
            _first_of_each(places.phases, 1),
            _first_of_each(both, FIRST_STEP_PER_CELL if is_first else 1),
        )
        chosen = list(dict.fromkeys(np.concatenate(order).tolist()))[:most]
        self._left[number] = left - len(chosen)
        for index in sorted(chosen):
            role = STARTS if starting[index] else UNPROVEN if sites.unproven[index] else CARRIED
            self._entries.append([number, step, *self._entry(sites, int(sites.rows[index]), role)])

    def to_dict(self) -> dict[str, Any]:
        """Return what the page reads."""
        return {"texts": list(self._texts), "sites": self._sites, "entries": self._entries}

    @property
    def num_listed(self) -> int:
        """Sites that are listed."""
        return len(self._entries)

    def _entry(self, sites: SiteDifferences, row: int, role: int) -> list[Any]:
        left, right = sites.places(row)
        view, place = (sites.current, right) if right >= 0 else (sites.reference, left)
        digests = [
            "" if at < 0 else f"{int(side.record.digests[at]):016x}"
            for side, at in ((sites.reference, left), (sites.current, right))
        ]
        kind = KINDS.index(sites.changes.kinds[row])
        layout = _shown_layout(sites, left, right, kind, view.layout.entries[place])
        return [self._site(sites, row, left, layout), kind, role, *digests]

    def _site(self, sites: SiteDifferences, row: int, left: int, layout: str) -> int:
        site = sites.site(row)
        source = source_of(site, sites.reference, left)
        key = (
            site.phase,
            site.module,
            site.op,
            site.occurrence,
            site.output,
            site.role,
            site.name,
            site.recomputed,
            source,
            layout,
        )
        known = self._numbers.get(key)
        if known is None:
            known = self._numbers[key] = len(self._sites)
            self._sites.append(
                [
                    self._placing.modules.of[site.module],
                    self._placing.phases.of[site.phase],
                    self._text(site.module),
                    self._text(site.op),
                    site.occurrence,
                    site.output,
                    self._text(site.role),
                    self._text(site.name or ""),
                    self._text(layout),
                    int(site.recomputed),
                    [self._text(line) for line in source],
                ]
            )
        return known

    def _text(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))


def _shown_layout(sites: SiteDifferences, left: int, right: int, kind: int, entry: TensorLayout | None) -> str:
    if KINDS[kind] != "structure":
        return describe_tensor(entry)
    ours, theirs = sites.reference.layout.entries[left], sites.current.layout.entries[right]
    return f"{describe_tensor(ours)} in the reference, {describe_tensor(theirs)} now"


def _first_of_each(groups: np.ndarray, limit: int) -> np.ndarray:
    """Return the indices of the first entries of each group, at most so many of one, ascending."""
    order = np.argsort(groups, kind="stable")
    index = np.arange(len(groups))
    is_start = np.append(True, groups[order][1:] != groups[order][:-1])[: len(groups)]
    number = index - np.maximum.accumulate(np.where(is_start, index, 0))
    return np.sort(order[number < limit])
