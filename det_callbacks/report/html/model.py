"""What the page shows beside the verdict: what became of each module in each step, and the first sites that differ."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby

import numpy as np

from det_callbacks.compare.differences import StepDifference
from det_callbacks.compare.ranks import Outcome, walk_outcomes
from det_callbacks.compare.record import read_compared
from det_callbacks.report.console import Table, at_most, count
from det_callbacks.report.run import describe_site, describe_tensor
from det_callbacks.runs.program import Site
from det_callbacks.runs.store import Run
from det_callbacks.verdict import MAX_ORIGINS, Divergence, Verdict

MAX_MAPS, MAX_COLUMNS, MAX_ROWS = 8, 100, 60
"""Heat maps (one for each rank and fit), and the columns and rows of each."""
NUM_BEFORE = 10
"""Columns before the first step that is not equal."""
MAX_STEPS, FIRST_SITES, MAX_SITES = 10, 100, 20
"""Steps of each map whose sites are listed, sites of the first of them, and of any other."""
MAX_SPANS = 50

RANK_COLUMNS = ("rank", "fit", "first step", "steps differing", "sites differing", "starting here")
_SITE_COLUMNS = ("site", "state", "phase", "module", "op or name", "tensor", "reference", "current", "kind", "source")
_STATES = np.array([*".mco"])
"""Of a cell, each worse than the one before: not compared, match, carried on, origin."""
_UNSEEN: Mapping[Outcome, str] = {
    "missing": "only in the reference",
    "extra": "only in the current run",
    "unkept": "differ, and were not kept: a verification keeps the first 100",
    "unknown": "not compared",
}


@dataclass(slots=True, kw_only=True)
class Column:
    """One step: in words, as a state for each row, and the first sites that differ in it, where they are listed."""

    step: int
    text: str = ""
    states: str = ""
    sites: Table | None = None
    num_left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """What became of each module in the steps of one fit of one rank, from shortly before the first difference on.

    Attributes:
        place: rank and fit, in addresses.
        is_first: whether the first divergence is of this rank.
        labels: of the rows, modules in the order in which they run; one that ends in * stands for several.
        outcomes: how many steps of the fit are equal, differ, and so on.
        unseen: in words: the steps that were not compared site by site.
        ranks_row: what the table of ranks says of it, as in ``RANK_COLUMNS``.
    """

    name: str
    place: str
    is_first: bool
    labels: Sequence[str]
    columns: Sequence[Column]
    outcomes: Mapping[Outcome, int]
    unseen: Sequence[str]
    ranks_row: Sequence[object]


def build_maps(verdict: Verdict, reference: Run, current: Run) -> tuple[list[HeatMap], int]:
    """Return the heat maps of two runs, and how many there would be more; none of other numbers of processes.

    Of too many, those of ranks where a difference starts are shown. It takes 5 to 20 milliseconds for each step that
    differs, at 5,000 sites. Raises ReferenceFormatError where a file of a run is damaged.
    """
    if reference.manifest.world_size != current.manifest.world_size:
        return [], 0
    ranks = [(rank, run.rank(rank)) for run in (reference, current) for rank in run.ranks]
    fits = {(number, fit) for number, rank in ranks for fit in rank.segments if len(rank.steps(fit))}
    urgent = {one.rank for one in (verdict.first_divergence, *verdict.origins) if one is not None}
    shown = sorted(sorted(fits, key=lambda fit: (fit[0] not in urgent, fit))[:MAX_MAPS])
    begun: set[int] = set()
    return [_build_map(verdict, (reference, current), *fit, begun) for fit in shown], len(fits) - len(shown)


def _build_map(verdict: Verdict, runs: tuple[Run, Run], rank: int, segment: int, begun: set[int]) -> HeatMap:
    """Return the heat map of one fit; ``begun`` has the ranks that differ already, and this one from then on."""
    programs = {
        int(identity): run.program(int(identity)).sites
        for run in runs
        for identity in run.rank(rank).fit(segment).program_ids
    }
    row_of, labels = _rows_of_modules(programs.values())

    def cells(sites: Iterable[Site]) -> np.ndarray:
        return np.bincount([row_of[site.module] for site in sites], minlength=len(labels))

    totals = {identity: cells(sites) for identity, sites in programs.items()}
    columns, outcomes, num_listed, sums = list[Column](), list[tuple[Outcome, int]](), 0, [0, 0]
    for done in walk_outcomes(*runs, rank, segment, read_compared(runs[1], rank)):
        outcomes.append((done.outcome, done.step))
        if done.outcome in _UNSEEN:
            text = f"Step {done.step}: {_UNSEEN[done.outcome]}"
            columns.append(Column(step=done.step, text=text, states="." * len(labels)))
            continue
        total, column = totals[done.program_id], Column(step=done.step)
        worst, counts = np.minimum(total, 1), (0, 0)
        if done.sites is not None:
            sites = [done.sites.site(row) for row in done.sites.rows.tolist()]
            starts = _starting(verdict, done.sites, sites, is_first=rank not in begun)
            begun.add(rank)
            starting = list(compress(sites, starts))
            worst = np.maximum.reduce([worst, 2 * (cells(sites) > 0), 3 * (cells(starting) > 0)])
            counts = len(sites), len(starting)
            sums = [one + other for one, other in zip(sums, counts, strict=True)]
            if num_listed < MAX_STEPS:
                limit = MAX_SITES if num_listed else FIRST_SITES
                listed = sorted(np.argsort(~starts, kind="stable")[:limit].tolist())  # where it starts comes first
                rows = [_site_row(done.sites, int(done.sites.rows[one]), starts=starts[one]) for one in listed]
                column.sites, column.num_left_out = Table(columns=_SITE_COLUMNS, rows=rows), len(sites) - len(listed)
                num_listed += 1
        column.text, column.states = _text(done.step, int(total.sum()), *counts), "".join(_STATES[worst])
        columns.append(column)
    began = next((place for place, (outcome, _) in enumerate(outcomes) if outcome != "equal"), 0)
    since = max(0, began - NUM_BEFORE)
    spans = [(outcome, [step for _, step in group]) for outcome, group in groupby(outcomes, key=lambda one: one[0])]
    unseen = [f"{_span(one[0], one[-1])}: {_UNSEEN[outcome]}" for outcome, one in spans if outcome in _UNSEEN]
    numbers, first = Counter(outcome for outcome, _ in outcomes), verdict.first_divergence
    first_step = next((step for outcome, step in outcomes if outcome not in ("equal", "unknown")), "")
    return HeatMap(
        name=f"Rank {rank}{f', segment {segment}' if segment else ''}",
        place=f"s{rank}-{segment}",
        is_first=first is not None and first.rank == rank,
        labels=labels,
        columns=columns[since : since + MAX_COLUMNS],
        outcomes=numbers,
        unseen=at_most(MAX_SPANS, unseen),
        ranks_row=(rank, segment, first_step, f"{numbers['differs']:,} of {len(outcomes):,}", *sums),
    )


def _starting(verdict: Verdict, step: StepDifference, sites: Sequence[Site], *, is_first: bool) -> np.ndarray:
    """Return at which of the differing sites a difference starts.

    In the first step of a rank that differs the verdict says which ops those are: it knows of other ranks, and of
    writers that nobody saw. What enters a later step was carried on to there.
    """
    starting = np.isin(step.rows, step.starting("here"))
    if not is_first:
        return starting
    rank, number, first = step.rank, step.step, verdict.first_divergence
    if len(verdict.origins) < MAX_ORIGINS:
        origins = {_place(one) for one in verdict.origins if (one.rank, one.step) == (rank, number)}
        starting[:] = [_place(site) in origins for site in sites]
    enters = np.isin(step.rows, step.starting("outside"))
    is_of_first = first is not None and first.rank == rank
    return starting | (enters & [is_of_first or site.name is not None for site in sites])


def _place(site: Site | Divergence) -> tuple[str, str, str, int, int]:
    return (site.phase, site.module, site.op, site.occurrence, site.output)


def _site_row(step: StepDifference, row: int, *, starts: bool) -> tuple[object, ...]:
    """Return a row of the table of a step's sites."""
    shown, kind, (left, right) = step.describe(row), step.kinds[row], step.places(row)
    sides = (step.reference, left), (step.current, right)
    tensors = [describe_tensor(view.layout.entries[place]) for view, place in sides if place >= 0]
    is_proven = step.starts.get(row) in ("here", "outside", None)
    return (
        right if right >= 0 else left,
        "starts here" if starts else "carried on" if is_proven else "differs, start not proven",
        *(shown.phase, _label_of(shown.module), describe_site(step.site(row))),
        f"{tensors[0]} in the reference, {tensors[-1]} now" if kind == "structure" else tensors[-1],
        *(shown.reference_digest or "-", shown.current_digest or "-", kind, next(iter(shown.source), "")),
    )


def _rows_of_modules(programs: Iterable[Sequence[Site]]) -> tuple[dict[str, int], list[str]]:
    """Return the row of each module, in the order in which they run, and the labels of the rows."""
    sites = [site for known in programs for site in known]
    modules = dict.fromkeys(
        site.module for site in sorted(sites, key=lambda site: not site.op)
    )  # state is listed first
    names = group_modules(sorted(modules, key=lambda name: {"": 0, "?": 2}.get(name, 1)))
    labels = list(dict.fromkeys(names.values()))
    return {module: labels.index(label) for module, label in names.items()}, labels


def group_modules(names: Sequence[str], limit: int = MAX_ROWS) -> dict[str, str]:
    """Return the label of each module's row: its name, or as deep into it as makes no more rows than there may be."""
    labels = {name: _label_of(name) for name in names}
    for depth in range(max((name.count(".") for name in names), default=0), 0, -1):
        if len(set(labels.values())) <= limit:
            break
        labels |= {name: ".".join(name.split(".")[:depth]) + ".*" for name in names if name.count(".") >= depth}
    rest = list(dict.fromkeys(labels.values()))[limit - 1 :]
    return {name: "(other modules)" if len(rest) > 1 and label in rest else label for name, label in labels.items()}


def _label_of(module: str) -> str:
    return {"": "(outside any module)", "?": "(module not known)"}.get(module, module)


def _span(first: int, last: int) -> str:
    return f"Step {first}" if first == last else f"Steps {first} to {last}"


def _text(step: int, num_sites: int, num_differing: int, num_starting: int) -> str:
    """Return "Step 3: 17 of 5,000 sites differ, starting at 2 of them"."""
    verb = "differs" if num_differing == 1 else "differ"
    starting = f", starting at {num_starting:,} of them" if num_starting else ""
    return f"Step {step}: {num_differing:,} of {count(num_sites, 'site')} {verb}{starting}"
