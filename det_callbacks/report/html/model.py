"""What the HTML report shows beside the verdict: the two runs read once more, as plain data that is bounded.

The verdict says what is so. The runs tell what it leaves out: the state of each module in each step, and the first
sites of each step that differs.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from det_callbacks.compare.differences import StepDifference
from det_callbacks.compare.ranks import Outcome, walk_outcomes
from det_callbacks.compare.record import read_compared
from det_callbacks.report.console import Table, at_most, count
from det_callbacks.report.run import describe_site, describe_tensor
from det_callbacks.runs.program import Site
from det_callbacks.runs.store import Run
from det_callbacks.verdict import MAX_ORIGINS, Divergence, Verdict

MAX_MAPS, MAX_COLUMNS, MAX_ROWS = 16, 800, 100
"""Heat maps (one for each rank and fit), columns of all of them (200 of each at most), and rows of each."""
MAX_STEPS, FIRST_SITES, MAX_SITES = 120, 200, 20
"""Steps that are listed in all, sites of the first step of each map in all, and of any other step."""
MAX_SPANS = 50

STATES = ".mco"
"""Of a cell: not compared, match, carried on, origin; the worst is shown."""

_UNSEEN: Mapping[Outcome, str] = {
    "missing": "only in the reference",
    "extra": "only in the current run",
    "unkept": "differ, and were not kept: a verification keeps the first 100",
    "unknown": "not compared",
}
_SITE_COLUMNS = ("site", "state", "phase", "module", "op or name", "tensor", "reference", "current", "kind", "source")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDetails:
    """One step that differs: in how many sites, in words, and the first of them."""

    step: int
    text: str
    sites: Table
    num_left_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """The steps of one column of a heat map in words, a state for each row, and the step below that it leads to."""

    first: int
    text: str
    states: str
    leads_to: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """What became of each module in each step of one fit of one rank.

    Attributes:
        name: "Rank 1, segment 2".
        place: likewise, in addresses.
        is_first: whether the first divergence is of this rank.
        labels: of the rows, modules in the order in which they run; one that ends in * stands for several.
        columns: in order.
        steps: the first steps that differ.
        outcomes: how many steps are equal, differ, and so on.
        unseen: in words: the steps that were not compared site by site.
        ranks_row: what the table of ranks says of it, as in ``RANK_COLUMNS``.
    """

    name: str
    place: str
    is_first: bool
    labels: tuple[str, ...]
    columns: tuple[Column, ...]
    steps: tuple[StepDetails, ...]
    outcomes: Mapping[Outcome, int]
    unseen: tuple[str, ...]
    ranks_row: tuple[object, ...]


RANK_COLUMNS = ("rank", "fit", "first step", "steps differing", "sites differing", "starting here")


def build_maps(verdict: Verdict, reference: Run, current: Run) -> tuple[list[HeatMap], int]:
    """Return the heat maps of two runs, and how many there would be more; none of other numbers of processes.

    It takes 5 to 20 milliseconds for each step that differs, at 5,000 sites.

    Raises:
        ReferenceFormatError: a file of a run is damaged.
    """
    if reference.manifest.world_size != current.manifest.world_size:
        return [], 0
    builder = _Builder(verdict, reference, current)
    maps = builder.build()
    return maps, len(builder.fits) - len(maps)


class _Builder:
    """Reads two runs, a step at a time."""

    def __init__(self, verdict: Verdict, reference: Run, current: Run) -> None:
        self._verdict = verdict
        self._runs = reference, current
        self._compared = {rank: read_compared(current, rank) for rank in reference.ranks if rank in current.ranks}
        self._begun: set[int] = set()
        self._row_of: dict[str, int] = {}
        self._rows_of_program: dict[int, np.ndarray] = {}
        self.fits = [
            (rank, segment)
            for rank in self._compared
            for segment in sorted({*reference.rank(rank).segments, *current.rank(rank).segments})
            if self._steps(rank, segment)
        ]

    def build(self) -> list[HeatMap]:
        """Return the maps, of too many those of ranks where a difference starts."""
        started = (self._verdict.first_divergence, *self._verdict.origins)
        urgent = {one.rank for one in started if one is not None}
        shown = sorted(sorted(self.fits, key=lambda fit: fit[0] not in urgent)[:MAX_MAPS])
        labels = self._label_rows(shown)
        return [self._map(*fit, labels, share=len(shown)) for fit in shown]

    def _steps(self, rank: int, segment: int) -> list[int]:
        return sorted({int(step) for run in self._runs for step in run.rank(rank).steps(segment)})

    def _label_rows(self, fits: Sequence[tuple[int, int]]) -> tuple[str, ...]:
        """Find the row of each module of all programs, in the order in which they run, and return the labels."""
        programs = {
            int(identity): run.program(int(identity)).sites
            for run in self._runs
            for rank, segment in fits
            for identity in run.rank(rank).fit(segment).program_ids
        }
        found: dict[str, None] = {}
        for sites in programs.values():
            found.update((site.module, None) for site in sites if site.op)  # a step lists the state of all first
            found.update((site.module, None) for site in sites)
        labels = group_modules(sorted(found, key=lambda name: {"": 0, "?": 2}.get(name, 1)))
        rows = {label: row for row, label in enumerate(dict.fromkeys(labels.values()))}
        self._row_of = {name: rows[label] for name, label in labels.items()}
        self._rows_of_program = {identity: self._rows_of(sites) for identity, sites in programs.items()}
        return tuple(rows)

    def _rows_of(self, sites: Iterable[Site]) -> np.ndarray:
        return np.array([self._row_of[site.module] for site in sites], dtype=np.int64)

    def _map(self, rank: int, segment: int, labels: tuple[str, ...], *, share: int) -> HeatMap:
        """Return the heat map of a fit, one of so many that share what is listed."""
        steps = self._steps(rank, segment)
        num_columns = min(len(steps), 200, MAX_COLUMNS // share)
        bounds = [index * len(steps) // num_columns for index in range(num_columns + 1)]
        compared, differing, starting = cells = np.zeros((3, num_columns, len(labels)), dtype=np.int64)
        details: list[StepDetails] = []
        history: list[tuple[Outcome, int]] = []
        for index, done in enumerate(walk_outcomes(*self._runs, rank, segment, self._compared[rank])):
            column = int(np.searchsorted(bounds, index, side="right")) - 1
            history.append((done.outcome, done.step))
            if done.outcome in _UNSEEN:
                continue
            modules = self._rows_of_program[done.program_id]
            compared[column] += np.bincount(modules, minlength=len(labels))
            if done.sites is None:
                continue
            sites = [done.sites.site(row) for row in done.sites.rows.tolist()]
            places, starts = self._rows_of(sites), self._starting(done.sites, sites)
            differing[column] += np.bincount(places, minlength=len(labels))
            starting[column] += np.bincount(places[starts], minlength=len(labels))
            if len(details) < MAX_STEPS // share:
                limit = MAX_SITES if details else max(MAX_SITES, FIRST_SITES // share)
                listed = sorted(np.argsort(~starts, kind="stable")[:limit].tolist())  # where it starts comes first
                rows = [_site_row(done.sites, int(done.sites.rows[one]), starts=starts[one]) for one in listed]
                details.append(
                    StepDetails(
                        step=done.step,
                        text=_text((done.step, done.step), len(modules), len(sites), int(starts.sum())),
                        sites=Table(columns=_SITE_COLUMNS, rows=rows),
                        num_left_out=len(sites) - len(listed),
                    )
                )
        worst = np.maximum.reduce([compared > 0, 2 * (differing > 0), 3 * (starting > 0)])
        letters = np.array([*STATES])[worst]
        columns = []
        for number, (start, stop) in enumerate(pairwise(bounds)):
            span = steps[start], steps[stop - 1]
            text = _text(span, *(int(one.sum()) for one in cells[:, number]))
            leads_to = next((one.step for one in details if span[0] <= one.step <= span[1]), None)
            columns.append(Column(first=span[0], text=text, states="".join(letters[number]), leads_to=leads_to))
        spans = [(outcome, [step for _, step in group]) for outcome, group in groupby(history, key=lambda one: one[0])]
        unseen = [f"{_span(one[0], one[-1])}: {_UNSEEN[outcome]}" for outcome, one in spans if outcome in _UNSEEN]
        outcomes, first = Counter(outcome for outcome, _ in history), self._verdict.first_divergence
        began = next((step for outcome, step in history if outcome not in ("equal", "unknown")), "")
        shares = f"{outcomes['differs']:,} of {len(steps):,}", int(differing.sum()), int(starting.sum())
        return HeatMap(
            name=f"Rank {rank}{f', segment {segment}' if segment else ''}",
            place=f"s{rank}-{segment}",
            is_first=first is not None and first.rank == rank,
            labels=labels,
            columns=tuple(columns),
            steps=tuple(details),
            outcomes=outcomes,
            unseen=tuple(at_most(MAX_SPANS, unseen)),
            ranks_row=(rank, segment, began, *shares),
        )

    def _starting(self, sites: StepDifference, found: Sequence[Site]) -> np.ndarray:
        """Return at which of the differing sites a difference starts.

        In the first step of a rank that differs the verdict says which ops those are: it knows of other ranks, and of
        writers that nobody saw. What enters a later step was carried on to there.
        """
        rank, step, first = sites.current.rank, sites.current.record.step, self._verdict.first_divergence
        starting = np.isin(sites.rows, sites.starting("here"))
        if rank in self._begun:
            return starting
        self._begun.add(rank)
        if len(self._verdict.origins) < MAX_ORIGINS:
            origins = {_place(one) for one in self._verdict.origins if (one.rank, one.step) == (rank, step)}
            starting[:] = [_place(site) in origins for site in found]
        is_of_first = first is not None and first.rank == rank
        enters = np.isin(sites.rows, sites.starting("outside"))
        return starting | (enters & [is_of_first or site.name is not None for site in found])


def _site_row(sites: StepDifference, row: int, *, starts: bool) -> tuple[object, ...]:
    """Return a row of the alignment of a step that differs."""
    left, right = sites.places(row)
    site, kind = sites.site(row), sites.kinds.get(row, "")
    digests, tensors = [], []
    for view, place in ((sites.reference, left), (sites.current, right)):
        digests.append(f"{int(view.record.digests[place]):016x}" if place >= 0 else "-")
        tensors += [describe_tensor(view.layout.entries[place])] if place >= 0 else []
    is_proven = sites.starts.get(row) in ("here", "outside", None)
    state = "starts here" if starts else "carried on" if is_proven else "differs, start not proven"
    source = site.source or (sites.reference.program.sites[left].source if left >= 0 else ())
    return (
        *(left if right < 0 else right, state, site.phase, _label_of(site.module), describe_site(site)),
        f"{tensors[0]} in the reference, {tensors[-1]} now" if kind == "structure" else tensors[-1],
        *(*digests, kind, source[0] if source else ""),
    )


def group_modules(names: Sequence[str], limit: int = MAX_ROWS) -> dict[str, str]:
    """Return the label of each module's row: its name, or as deep into it as makes no more rows than there may be."""
    labels = {name: _label_of(name) for name in names}
    deepest = max((name.count(".") + 1 for name in names), default=1)
    for depth in range(deepest - 1, 0, -1):
        if len(set(labels.values())) <= limit:
            break
        labels |= {name: ".".join(name.split(".")[:depth]) + ".*" for name in names if name.count(".") >= depth}
    rest = frozenset(list(dict.fromkeys(labels.values()))[limit - 1 :])
    return {name: "(other modules)" if len(rest) > 1 and label in rest else label for name, label in labels.items()}


def _label_of(module: str) -> str:
    return {"": "(outside any module)", "?": "(module not known)"}.get(module, module)


def _span(first: int, last: int) -> str:
    return f"Step {first}" if first == last else f"Steps {first} to {last}"


def _text(span: tuple[int, int], num_sites: int, num_differing: int, num_starting: int) -> str:
    """Return "Step 3: 17 of 5,000 sites differ, starting at 2 of them"."""
    verb = "differs" if num_differing == 1 else "differ"
    starting = f", starting at {num_starting:,} of them" if num_starting else ""
    return f"{_span(*span)}: {num_differing:,} of {count(num_sites, 'site')} {verb}{starting}"


def _place(site: Site | Divergence) -> tuple[str, str, str, int, int]:
    return (site.phase, site.module, site.op, site.occurrence, site.output)
