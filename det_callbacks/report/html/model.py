"""What the HTML report shows: from a verdict and the two runs that it is on to plain data, bounded whatever their size.

The verdict says what is so; the runs are walked through once more for what it leaves out: the state of each module in
each step, what the first divergence read, and the way that it took.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from det_callbacks.compare.compared import read_compared
from det_callbacks.compare.live import reference_environment
from det_callbacks.compare.step_states import Outcome, SiteDifferences, first_difference, walk_outcomes
from det_callbacks.patterns import OpPattern
from det_callbacks.report.html.first import Dataflow, NearView, find_dataflow, find_row, view_nearby
from det_callbacks.report.html.grid import MAX_COLUMNS, Grid, Placing, group_modules, phase_rows
from det_callbacks.report.html.listing import MAX_LISTED, Listing
from det_callbacks.report.html.rows import SiteRows
from det_callbacks.report.html.settings_table import Setting, list_settings
from det_callbacks.report.html.step_table import MAX_STEPS, StepTable
from det_callbacks.runs.store import Run
from det_callbacks.verdict import Divergence, Verdict

MAX_MAPS = 32
"""Heat maps: one a fit and rank, those of the ranks that differ first."""
WIDE_MAPS = 8
"""Heat maps that may have all columns; of more, each has fewer, so that the file stays small."""
MAX_RANKS = 512
MAX_ORIGINS = 100
"""Origins that a verdict lists; one with as many may have left some out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One fit of one rank in a line.

    Attributes:
        rank: process.
        segment: fit.
        number: of its heat map; None where it has none.
        first: the first step that differs; None where none does.
        num_steps: steps that either run has; counts below are of them.
        outcomes: outcome -> number of steps; None without a heat map.
        num_sites: sites that differ; None without a heat map.
        num_starting: those of them where a difference starts.
    """

    rank: int
    segment: int
    number: int | None
    first: int | None
    num_steps: int
    outcomes: dict[Outcome, int] | None = None
    num_sites: int | None = None
    num_starting: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that a report shows.

    Attributes:
        verdict: what it is on.
        evidence: sentences that led to the cause.
        ranks: a line each, the first ones.
        num_ranks_left_out: fits of ranks without a line.
        maps: what the page draws: heat maps and the sites listed for them, JSON-able.
        num_listed: sites listed.
        is_grouped: whether several modules share a row of a heat map.
        has_ranges: whether several steps share a column.
        has_replayed: whether bits of the reference were put back anywhere.
        steps: what became of the steps of each heat map.
        near: the first divergence with its surroundings; None where it is a whole step, or there is none.
        dataflow: from it to a parameter; None where it reaches nothing.
        settings: environment and settings of both runs.
        notes: what is not shown, and why.
    """

    verdict: Verdict
    evidence: tuple[str, ...] = ()
    ranks: tuple[RankSummary, ...] = ()
    num_ranks_left_out: int = 0
    maps: dict[str, Any] = field(default_factory=lambda: {"maps": []})
    num_listed: int = 0
    is_grouped: bool = False
    has_ranges: bool = False
    has_replayed: bool = False
    steps: tuple[StepTable, ...] = ()
    near: NearView | None = None
    dataflow: Dataflow | None = None
    settings: tuple[Setting, ...] = ()
    notes: tuple[str, ...] = ()


def build_report(verdict: Verdict, reference: Run, current: Run, *, root: Path) -> Report:
    """Return the report on two runs; it takes 5 to 20 milliseconds for each step that differs, at 5,000 sites.

    Args:
        verdict: on them.
        reference: the run that was compared with.
        current: the run that was compared, or the folder of a verification.
        root: where source files are looked for.

    Raises:
        ReferenceFormatError: a file of a run is damaged.
    """
    evidence = verdict.evidence
    settings = list_settings(reference_environment(reference), reference_environment(current))
    if reference.world_size != current.world_size:
        note = "The runs had another number of processes, so that no step of one is a step of the other."
        return Report(verdict=verdict, evidence=evidence, settings=settings, notes=(note,))
    return _Builder(verdict, reference, current, root).build(evidence, settings)


class _Builder:
    """Walks through two runs."""

    def __init__(self, verdict: Verdict, reference: Run, current: Run, root: Path) -> None:
        self._verdict = verdict
        self._runs = reference, current
        self._root = root
        ranks = [rank for rank in reference.ranks if rank in current.ranks]
        self._compared = {rank: read_compared(current.path, rank) for rank in ranks}
        self._fits = [
            (rank, segment)
            for rank in ranks
            for segment in sorted({*reference.rank(rank).segments, *current.rank(rank).segments})
            if any(len(run.rank(rank).fit(segment).steps) for run in self._runs)
        ]
        self._first_steps = {
            fit: first_difference(reference, current, *fit, self._compared[fit[0]]) for fit in self._fits
        }
        self._origins = frozenset(map(_key, verdict.origins))
        self._known_names: dict[int, set[str]] = {}
        self._max_columns = MAX_COLUMNS
        self._near: NearView | None = None
        self._dataflow: Dataflow | None = None

    def build(self, evidence: tuple[str, ...], settings: tuple[Setting, ...]) -> Report:
        mapped = sorted(self._fits, key=self._urgency)[:MAX_MAPS]
        mapped.sort()
        self._max_columns = MAX_COLUMNS * WIDE_MAPS // max(WIDE_MAPS, len(mapped))
        modules, phases = self._names(mapped)
        placing = Placing(group_modules(modules), phase_rows(phases), **self._replayed())
        most_steps = max((self._runs[0].rank(rank).fit(segment).steps.size for rank, segment in mapped), default=0)
        listing = Listing(placing, per_map=MAX_LISTED // max(1, len(mapped)), num_steps=most_steps)
        grids, tables, summaries = [], [], {}
        for number, fit in enumerate(mapped):
            table = StepTable(rank=fit[0], segment=fit[1], max_steps=max(5, MAX_STEPS // len(mapped)))
            grid = self._walk(number, fit, placing, listing, table)
            grids.append(_grid_to_dict(grid, *fit))
            tables.append(table)
            summaries[fit] = RankSummary(
                rank=fit[0],
                segment=fit[1],
                number=number,
                first=self._first_steps[fit],
                num_steps=sum(table.outcomes.values()),
                outcomes=dict(table.outcomes),
                num_sites=int(grid.modules.differing.sum()),
                num_starting=int(grid.modules.starting.sum()),
            )
        lines = [summaries.get(fit) or self._unmapped(fit) for fit in self._fits[:MAX_RANKS]]
        maps = {
            "modules": list(placing.modules.labels),
            "phases": list(placing.phases.labels),
            "maps": grids,
            **listing.to_dict(),
        }
        return Report(
            verdict=self._verdict,
            evidence=evidence,
            ranks=tuple(lines),
            num_ranks_left_out=max(0, len(self._fits) - MAX_RANKS),
            maps=maps,
            num_listed=listing.num_listed,
            is_grouped=placing.modules.is_grouped,
            has_ranges=any(first != last for grid in grids for first, last in grid["columns"]),
            has_replayed=bool(self._replayed()),
            steps=tuple(tables),
            near=self._near,
            dataflow=self._dataflow,
            settings=settings,
            notes=self._notes(),
        )

    def _walk(self, number: int, fit: tuple[int, int], placing: Placing, listing: Listing, table: StepTable) -> Grid:
        reference, current = self._runs
        rank, segment = fit
        steps = sorted({*reference.rank(rank).steps(segment).tolist(), *current.rank(rank).steps(segment).tolist()})
        grid = Grid(steps, placing, max_columns=self._max_columns)
        for done in walk_outcomes(reference, current, rank, segment, self._compared[rank]):
            if done.outcome in ("equal", "differs"):
                grid.add_compared(done.run, done.program_id, done.step)
            if done.sites is None:
                table.add(done.step, done.outcome)
                continue
            places = placing.of_differing(done.sites, reference, current)
            starting = self._starting(done.sites, places.named)
            grid.add_differing(done.step, places, starting)
            listing.add(number, done.step, done.sites, places, starting)
            table.add_differing(done.step, done.sites, starting)
            self._look_closer(done.sites, starting)
        return grid

    def _starting(self, sites: SiteDifferences, named: np.ndarray) -> np.ndarray:
        """Return at which differing rows a difference starts.

        In the first step of a rank that differs the verdict says which ops those are: it knows of other ranks, and of
        writers that nobody saw. What enters a later step with a name that differed before was carried on to there.

        Args:
            sites: how a step differs; the steps of a rank come in order.
            named: bool by differing row, whether its tensor has a name.
        """
        rank = sites.current.rank
        is_first = rank not in self._known_names
        known_names = self._known_names.setdefault(rank, set())
        first = self._verdict.first_divergence
        starting = sites.origins.copy()
        if is_first and len(self._verdict.origins) < MAX_ORIGINS:
            keys = (_site_key(sites, row) for row in sites.rows.tolist())
            starting = np.fromiter((key in self._origins for key in keys), dtype=bool, count=len(sites.rows))
        is_of_first = is_first and first is not None and first.rank == rank
        for index in np.flatnonzero(sites.sources).tolist():
            name = sites.site(int(sites.rows[index])).name
            starting[index] |= is_of_first if name is None else name not in known_names
        known_names.update(str(sites.site(row).name) for row in sites.rows[named].tolist())
        return starting

    def _look_closer(self, sites: SiteDifferences, starting: np.ndarray) -> None:
        first = self._verdict.first_divergence
        place = (sites.current.rank, sites.current.record.step)
        if self._near is not None or first is None or place != (first.rank, first.step):
            return
        row = find_row(sites, first)
        if row is None:
            return
        rows = SiteRows(sites, frozenset(sites.rows[starting].tolist()))
        self._near = view_nearby(sites, rows, row, self._root)
        start = row if row in sites.rows[starting] or not starting.any() else int(sites.rows[starting][0])
        self._dataflow = find_dataflow(sites, rows, start)

    def _names(self, fits: Sequence[tuple[int, int]]) -> tuple[list[str], set[str]]:
        """Return the modules of all programs in their order, and the phases."""
        modules: dict[str, None] = {}
        phases: set[str] = set()
        seen: set[int] = set()
        for run in self._runs:
            for rank, segment in fits:
                for program_id in np.unique(run.rank(rank).fit(segment).program_ids).tolist():
                    if program_id in seen:
                        continue
                    seen.add(program_id)
                    sites = run.program(program_id).sites
                    # in the order in which they run: a step lists the state of all of them first
                    modules.update((site.module, None) for site in sites if site.op)
                    modules.update((site.module, None) for site in sites)
                    phases.update(site.phase for site in sites)
        named = [name for name in modules if name not in ("", "?")]
        return [name for name in ("",) if name in modules] + named + [
            name for name in ("?",) if name in modules
        ], phases

    def _replayed(self) -> dict[str, Any]:
        """Return whose bits were put back: a verification does that with what its reference saved."""
        reference, current = self._runs
        if current.manifest.get("purpose") != "verify":
            return {}
        patterns = tuple(map(OpPattern.parse, reference.manifest.get("replay", ())))
        names = frozenset(self._verdict.coverage.replayed)
        return {"patterns": patterns, "names": names} if patterns or names else {}

    def _urgency(self, fit: tuple[int, int]) -> tuple[bool, bool, int, int, int]:
        """Return by what the fits are sorted of which there are heat maps: the first divergence, then who differs."""
        first, step = self._verdict.first_divergence, self._first_steps[fit]
        is_first = first is not None and first.rank == fit[0]
        return (not is_first, step is None, fit[1], -1 if step is None else step, fit[0])

    def _unmapped(self, fit: tuple[int, int]) -> RankSummary:
        reference, current = self._runs
        steps = {*reference.rank(fit[0]).steps(fit[1]).tolist(), *current.rank(fit[0]).steps(fit[1]).tolist()}
        return RankSummary(rank=fit[0], segment=fit[1], number=None, first=self._first_steps[fit], num_steps=len(steps))

    def _notes(self) -> tuple[str, ...]:
        reference, current = self._runs
        notes = []
        for run, name in ((reference, "The reference"), (current, "The current run")):
            if not run.is_complete and run.keeps == "all":
                notes.append(f"{name} is incomplete: {run.incomplete_reason}")
        absent = [rank for rank in range(reference.world_size) if rank not in self._compared]
        if absent:
            notes.append(f"Not here, so not shown: {len(absent)} of {reference.world_size} ranks, from {absent[0]} on.")
        if current.keeps != "all" and not all(self._compared.values()):
            notes.append(
                "The current run kept its diverging steps only and does not say which others it compared; they are "
                "shown as not compared."
            )
        if len(self._fits) > MAX_MAPS:
            notes.append(f"Heat maps of {MAX_MAPS} of {len(self._fits)}: those of the ranks that differ first.")
        return tuple(notes)


_Key = tuple[int, int, str, str, str, int, int, str | None]


def _key(divergence: Divergence) -> _Key:
    return (
        divergence.rank,
        divergence.step,
        divergence.phase,
        divergence.module,
        divergence.op,
        divergence.occurrence,
        divergence.output,
        divergence.current_digest,
    )


def _site_key(sites: SiteDifferences, row: int) -> _Key:
    site, (_, right) = sites.site(row), sites.places(row)
    digest = None if right < 0 else f"{int(sites.current.record.digests[right]):016x}"
    step = sites.current.record.step
    return (sites.current.rank, step, site.phase, site.module, site.op, site.occurrence, site.output, digest)


def _grid_to_dict(grid: Grid, rank: int, segment: int) -> dict[str, Any]:
    views = {
        name: {
            "states": cells.states(),
            "compared": [_runs(row) for row in cells.compared],
            "differing": [_runs(row) for row in cells.differing],
            "starting": [_runs(row) for row in cells.starting],
        }
        for name, cells in (("modules", grid.modules), ("phases", grid.phases))
    }
    return {"rank": rank, "fit": segment, "columns": [list(span) for span in grid.columns], **views}


def _runs(values: np.ndarray) -> list[int]:
    """Return numbers as value, count, value, count: most are as the one before."""
    if not len(values):
        return []
    starts = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
    counts = np.diff(np.append(starts, len(values)))
    return np.stack((values[starts], counts), axis=1).ravel().tolist()
