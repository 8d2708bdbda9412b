"""A report as one HTML file without scripts; Jinja2 escapes all text of a run."""

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from det_callbacks.compare.differences import StepDifference, compare_steps
from det_callbacks.compare.ranks import num_equal_steps
from det_callbacks.compare.record import read_record
from det_callbacks.report.console import Table
from det_callbacks.report.run import describe_site
from det_callbacks.report.verdict import details_report, head_report
from det_callbacks.runs.files import make_folder, replace_atomically
from det_callbacks.runs.program import Site, describe_tensor
from det_callbacks.runs.store import Run
from det_callbacks.text import count, visible
from det_callbacks.verdict import MAX_ORIGINS, Divergence, Verdict

# heat maps (one a rank and fit), their columns and rows
MAX_MAPS, MAX_COLUMNS, MAX_ROWS = 8, 100, 60
NUM_BEFORE = 10  # columns before the first step that differs, if not all steps fit
MAX_STEPS, MAX_SITES = 10, 25  # steps of a map whose sites are listed, and sites of each

_INSTEAD = (
    "pass another file for the report (--html of det-callbacks diff); the verdict is still valid"
)
_COLUMNS = (
    "site",
    "state",
    "phase",
    "module",
    "op or name",
    "tensor",
    "reference",
    "current",
    "kind",
    "source",
)
_STATES = np.array([*".mco"])  # ascending: not compared, match, carried on, origin


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A step in a heat map."""

    step: int
    text: str
    states: str  # a letter of ``_STATES`` for each row
    sites: Table | None = None  # that differ, if they are listed
    num_left_out: int = 0  # differing sites that the table lacks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Map:
    """The heat map of one fit on one rank: a column for each step, and a row for each module."""

    name: str
    place: str  # in addresses
    text: str
    num_differing: int
    labels: Sequence[str]
    columns: Sequence[_Column]


def write_report(
    path: str | Path, verdict: Verdict, *, reference: str | Path, current: str | Path
) -> Path:
    """Write the HTML report on two runs, atomically."""
    path, runs = Path(path), [Run.open(run, check_steps=False) for run in (reference, current)]
    maps, num_left_out = _build_maps(verdict, *runs)
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, finalize=_visible
    )
    environment.filters.update(count=count, number="{:,}".format, shell_quoted=shlex.quote)
    head, sections = head_report(verdict)[1:], details_report(verdict, lists_all=True)
    content = environment.get_template("report.html.j2").render(
        verdict=verdict, head=head, sections=sections, maps=maps, num_left_out=num_left_out
    )
    make_folder(path.parent, instead=_INSTEAD)
    replace_atomically(path, content.encode(errors="backslashreplace"), instead=_INSTEAD)
    return path


def _visible(value: object) -> object:
    return visible(value) if type(value) is str else value  # Markup is made of such values


def _build_maps(verdict: Verdict, reference: Run, current: Run) -> tuple[list[_Map], int]:
    """Return the heat maps, first of ranks where a difference starts, and how many are left out."""
    if reference.manifest.world_size != current.manifest.world_size:
        return [], 0
    common = {*reference.ranks} & {*current.ranks}
    ranks = [run.rank(rank) for run in (reference, current) for rank in common]
    fits = {(rank.rank, fit) for rank in ranks for fit in rank.segments if len(rank.steps(fit))}
    urgent = {site.rank for site in (verdict.first_divergence, *verdict.origins) if site}
    shown = sorted(sorted(fits, key=lambda fit: (fit[0] not in urgent, fit))[:MAX_MAPS])
    begun: set[int] = set()
    maps = [_build_map(verdict, (reference, current), *fit, begun) for fit in shown]
    return maps, len(fits) - len(maps)


def _build_map(
    verdict: Verdict, runs: tuple[Run, Run], rank: int, segment: int, begun: set[int]
) -> _Map:
    """Return the heat map of one fit; the rank is added to ``begun``,
    the ranks that differ already.
    """
    programs = {
        int(identity): run.program(int(identity)).sites
        for run in runs
        for identity in run.rank(rank).fit(segment).program_ids
    }
    row_of, labels = _rows_of_modules(programs.values())

    def cells(sites: Iterable[Site]) -> np.ndarray:
        return np.bincount([row_of[site.module] for site in sites], minlength=len(labels))

    totals = {identity: cells(sites) for identity, sites in programs.items()}
    columns, outcomes, num_listed = list[_Column](), list[str](), 0
    for step, program_id, outcome, difference in _outcomes(*runs, rank, segment):
        outcomes.append(outcome)
        total = totals[program_id]
        if difference is None or outcome == "agree":
            states = _STATES[np.minimum(total, int(outcome == "agree"))]
            columns.append(_Column(step=step, text=outcome, states="".join(states)))
            continue
        sites = [difference.site(row) for row in difference.rows.tolist()]
        starts = _starting(verdict, difference, sites, is_first=rank not in begun)
        begun.add(rank)
        starting = list(compress(sites, starts))
        worst = np.maximum.reduce([total > 0, 2 * (cells(sites) > 0), 3 * (cells(starting) > 0)])
        text = f"{len(sites):,} of {count(int(total.sum()), 'site')} differ"
        if starting:
            text += f", starting at {len(starting):,} of them"
        table, num_left_out = None, 0
        if num_listed < MAX_STEPS:
            num_listed += 1
            table, num_left_out = _table_of(difference, starts)
        states = _STATES[worst]
        columns.append(
            _Column(
                step=step,
                text=text,
                states="".join(states),
                sites=table,
                num_left_out=num_left_out,
            )
        )
    began = next((place for place, outcome in enumerate(outcomes) if outcome != "agree"), 0)
    since, numbers = max(0, min(began - NUM_BEFORE, len(columns) - MAX_COLUMNS)), Counter(outcomes)
    return _Map(
        name=f"Rank {rank}{f', segment {segment}' if segment else ''}",
        place=f"s{rank}-{segment}",
        text=", ".join(f"{number:,} {outcome}" for outcome, number in numbers.items()),
        num_differing=numbers["differ"],
        labels=labels,
        columns=columns[since : since + MAX_COLUMNS],
    )


def _outcomes(
    reference: Run, current: Run, rank: int, segment: int
) -> Iterator[tuple[int, int, str, StepDifference | None]]:
    """Yield the steps of a fit: number, program, outcome in words, and how the two runs differ.

    A verification keeps only its diverging steps; its record has the others.
    """
    reference_fit, current_fit = reference.rank(rank).fit(segment), current.rank(rank).fit(segment)
    is_whole = current.keeps == "all"
    num_equal = num_equal_steps(reference_fit, current_fit) if is_whole else 0
    known = None if is_whole else read_record(current, rank).fit(segment)
    compared, differing = (known.compared, known.differing) if known is not None else (set(), set())
    reference_indices = {int(step): index for index, step in enumerate(reference_fit.steps)}
    current_indices = {int(step): index for index, step in enumerate(current_fit.steps)}
    for step in sorted({*reference_indices, *current_indices}):
        reference_index = reference_indices.get(step, -1)
        current_index = current_indices.get(step, -1)
        found = None
        if current_index < 0 and is_whole:
            outcome = "only in the reference"
        elif current_index < 0 and step not in compared:
            outcome = "not compared"
        elif current_index < 0:
            outcome = (
                "differ, and were not kept: a verification keeps the first 100"
                if step in differing
                else "agree"
            )
        elif reference_index < 0:
            outcome = "only in the current run"
        else:
            if reference_index >= num_equal:
                found = compare_steps(
                    reference.view(rank, segment, step), current.view(rank, segment, step)
                )
            outcome = "differ" if found is not None and found.kinds else "agree"
        if current_index >= 0:
            program_id = current_fit.program_ids[current_index]
        else:
            program_id = reference_fit.program_ids[reference_index]
        yield step, int(program_id), outcome, found


def _starting(
    verdict: Verdict, step: StepDifference, sites: Sequence[Site], *, is_first: bool
) -> np.ndarray:
    """Return which of the differing sites start a difference."""
    starting = np.isin(step.rows, step.starting("here"))
    if not is_first:
        return starting  # a difference that enters a later step was carried on
    # the verdict knows the other ranks
    rank, number, first = step.rank, step.step, verdict.first_divergence
    if len(verdict.origins) < MAX_ORIGINS:
        origins = {_place(one) for one in verdict.origins if (one.rank, one.step) == (rank, number)}
        starting[:] = [_place(site) in origins for site in sites]
    enters = np.isin(step.rows, step.starting("outside"))
    is_of_first = first is not None and first.rank == rank
    return starting | (enters & [is_of_first or site.name is not None for site in sites])


def _place(site: Site | Divergence) -> tuple[str, str, str, int, int]:
    return (site.phase, site.module, site.op, site.occurrence, site.output)


def _table_of(step: StepDifference, starts: np.ndarray) -> tuple[Table, int]:
    """Return the differing sites, where it starts first, and how many the table lacks."""
    listed = sorted(np.argsort(~starts, kind="stable")[:MAX_SITES].tolist())
    rows = [_site_row(step, int(step.rows[place]), starts=starts[place]) for place in listed]
    return Table(columns=_COLUMNS, rows=rows), len(starts) - len(listed)


def _site_row(step: StepDifference, row: int, *, starts: bool) -> tuple[object, ...]:
    shown, kind = step.describe(row), step.kinds[row]
    reference_place, current_place = step.pairs[row]
    sides = (step.reference, reference_place), (step.current, current_place)
    tensors = [describe_tensor(view.layout.entries[place]) for view, place in sides if place >= 0]
    is_proven = step.starts.get(row) in ("here", "outside", None)
    if starts:
        origin = "starts here"
    else:
        origin = "carried on" if is_proven else "differs, start not proven"
    return (
        current_place if current_place >= 0 else reference_place,
        origin,
        shown.phase,
        _label_of(shown.module),
        describe_site(step.site(row)),
        f"{tensors[0]} in the reference, {tensors[-1]} in the current run"
        if kind == "structure"
        else tensors[-1],
        shown.reference_digest or "-",
        shown.current_digest or "-",
        kind,
        shown.source[0] if shown.source else "",
    )


def _rows_of_modules(programs: Iterable[Sequence[Site]]) -> tuple[dict[str, int], list[str]]:
    """Return the row of each module and the labels of rows,
    cut at the depth that fits ``MAX_ROWS``.
    """
    # state comes first
    sites = sorted((site for known in programs for site in known), key=lambda site: not site.op)
    modules = sorted(
        dict.fromkeys(site.module for site in sites), key=lambda name: {"": 0, "?": 2}.get(name, 1)
    )
    parts, labels, rows = {name: name.split(".") for name in modules}, dict[str, str](), list[str]()
    for depth in range(max(map(len, parts.values()), default=1), 0, -1):
        labels = {
            name: ".".join(known[:depth]) + ".*" * (len(known) > depth)
            for name, known in parts.items()
        }
        rows = list(dict.fromkeys(labels.values()))
        if len(rows) <= MAX_ROWS:
            break
    if len(rows) > MAX_ROWS:
        shown = [*rows[: MAX_ROWS - 1], "(other modules)"]
    else:
        shown = [_label_of(row) for row in rows]
    return {name: min(rows.index(label), len(shown) - 1) for name, label in labels.items()}, shown


def _label_of(module: str) -> str:
    return {"": "(no submodule)", "?": "(module not known)"}.get(module, module)
