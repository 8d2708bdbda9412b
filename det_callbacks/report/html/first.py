"""The first divergence seen from near: what it read, what stands around it, and how it came to a parameter."""

from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from det_callbacks.compare.step_states import SiteDifferences
from det_callbacks.report.html.rows import SiteRow, SiteRows
from det_callbacks.report.html.source_text import SourceText, read_sources
from det_callbacks.verdict import Divergence

NEIGHBOURS = 6
MAX_INPUTS = 50
MAX_HOPS = 40
"""Sites shown of the way to a parameter; of a longer one its beginning and its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NearView:
    """One divergence with its surroundings.

    Attributes:
        site: the divergence as a row.
        arguments: how it was called, JSON; "" where it is no op.
        other_arguments: name -> reference, current, where it was called with others.
        inputs: what it read; the first fifty.
        num_inputs: all of them.
        neighbours: rows of the program around it, itself among them.
        sources: its lines, with their text where it can be read.
    """

    site: SiteRow
    arguments: str
    other_arguments: tuple[tuple[str, str, str], ...]
    inputs: tuple[SiteRow, ...]
    num_inputs: int
    neighbours: tuple[SiteRow, ...]
    sources: tuple[SourceText, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataflow:
    """The way from where a difference starts to the first parameter that it changed; one of the shortest.

    Attributes:
        before: its first sites; all of them where it is short.
        num_left_out: sites between.
        after: its last sites.
        reaches_state: whether it ends at a parameter, buffer or optimizer state after the update.
    """

    before: tuple[SiteRow, ...]
    num_left_out: int
    after: tuple[SiteRow, ...]
    reaches_state: bool


def find_row(sites: SiteDifferences, divergence: Divergence) -> int | None:
    """Return the row of a divergence among the rows that differ; None where it is not there."""
    wanted = (divergence.reference_digest, divergence.current_digest)
    for row in sites.rows.tolist():
        site = sites.site(row)
        place = (site.phase, site.module, site.op, site.occurrence, site.output)
        if place != (
            divergence.phase,
            divergence.module,
            divergence.op,
            divergence.occurrence,
            divergence.output,
        ):
            continue
        left, right = sites.places(row)
        found = tuple(
            None if at < 0 else f"{int(view.record.digests[at]):016x}"
            for view, at in ((sites.reference, left), (sites.current, right))
        )
        if found == wanted:
            return int(row)
    return None


def view_nearby(sites: SiteDifferences, rows: SiteRows, row: int, root: Path) -> NearView:
    """Return a divergence with its surroundings.

    Args:
        sites: how its step differs.
        rows: the same step as it is shown.
        row: of the divergence.
        root: where source files are looked for.
    """
    site = sites.site(row)
    shown = rows.row(row)
    known = sites.changes.arguments.get(row)
    values = () if known is None else known.values.items()
    inputs = rows.inputs(row)
    around = range(max(0, row - NEIGHBOURS), min(len(sites.alignment), row + NEIGHBOURS + 1))
    return NearView(
        site=shown,
        arguments=site.arguments if site.op else "",
        other_arguments=tuple((name, str(ours), str(theirs)) for name, (ours, theirs) in values),
        inputs=tuple(map(rows.row, inputs[:MAX_INPUTS])),
        num_inputs=len(inputs),
        neighbours=tuple(map(rows.row, around)),
        sources=read_sources(shown.source, root),
    )


def find_dataflow(sites: SiteDifferences, rows: SiteRows, start: int) -> Dataflow | None:
    """Return the way from a row to the first parameter that differs after it, through sites that differ.

    None where nothing that differs read it. Costs one pass over the edges of the step.
    """
    _, begin = sites.places(start)
    if begin < 0:
        return None
    program = sites.current.program
    row_of = np.full(len(program), -1, dtype=np.int64)
    there = sites.alignment.current >= 0
    row_of[sites.alignment.current[there]] = np.flatnonzero(there)
    differs = np.zeros(len(program), dtype=bool)
    differs[sites.alignment.current[sites.rows][sites.alignment.current[sites.rows] >= 0]] = True
    readers: dict[int, list[int]] = {}
    for place in np.flatnonzero(differs).tolist():
        for read in program.sites[place].inputs:
            if differs[read]:
                readers.setdefault(read, []).append(place)
    came_from = {begin: -1}
    queue = deque((begin,))
    while queue:
        place = queue.popleft()
        for reader in readers.get(place, ()):
            if reader not in came_from:
                came_from[reader] = place
                queue.append(reader)
    reached = sorted(place for place in came_from if place != begin)
    if not reached:
        return None
    end = next((place for place in reached if _is_state(sites, place)), None)
    reaches_state = end is not None
    if end is None:
        end = next((place for place in reached if program.sites[place].phase in ("optimizer", "gradient")), reached[-1])
    path = [end]
    while came_from[path[-1]] >= 0:
        path.append(came_from[path[-1]])
    shown = [rows.row(int(row_of[place])) for place in _ends(path[::-1])]
    num_before = len(shown) if len(path) <= MAX_HOPS else MAX_HOPS // 2
    return Dataflow(
        before=tuple(shown[:num_before]),
        num_left_out=len(path) - len(shown),
        after=tuple(shown[num_before:]),
        reaches_state=reaches_state,
    )


def _ends(path: list[int]) -> list[int]:
    return path if len(path) <= MAX_HOPS else [*path[: MAX_HOPS // 2], *path[-MAX_HOPS // 2 :]]


def _is_state(sites: SiteDifferences, place: int) -> bool:
    site = sites.current.program.sites[place]
    return site.phase == "state" and site.role == "named" and bool(site.inputs)
