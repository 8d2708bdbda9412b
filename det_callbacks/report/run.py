"""A recorded run as JSON-able data and in tables: its steps, the sites of a step, and where a digest appears."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from typing import Any, TypeVar

import numpy as np
from rich.console import Console

from det_callbacks.host_digest import format_digest
from det_callbacks.report.console import count, print_line, print_table
from det_callbacks.runs.metrics import read_metrics
from det_callbacks.runs.program import Site, StepRecord, StepView, TensorLayout
from det_callbacks.runs.store import RankRun, Run
from det_callbacks.tensors.kept import not_kept

Row = TypeVar("Row")

HEAD = 10
"""Rows shown from either end of a long table."""


def run_to_dict(run: Run, rank: RankRun) -> dict[str, Any]:
    """Return what a run holds: identity, selection, and a row for each step of a rank."""
    return {
        "schema": 1,
        "path": str(run.path),
        "run_id": run.run_id,
        "complete": run.is_complete,
        "incomplete_reason": run.incomplete_reason,
        "keeps": run.keeps,
        "world_size": run.world_size,
        "rank": rank.rank,
        "selection": run.selection.to_dict(),
        "attempts": len(run.manifest.attempts),
        "resumed_from": [{"segment": segment, "step": step} for segment, step in sorted(run.resumed_steps)],
        "replay": list(run.manifest.replay),
        "keep_tensors": list(run.manifest.keep_tensors),
        "metrics": [
            {"segment": segment, **asdict(reading)}
            for segment in run.segments
            for reading in read_metrics(run, segment).by_key.values()
        ],
        "steps": [_record_to_dict(record) for record in rank.iterate()],
    }


def step_to_dict(view: StepView) -> dict[str, Any]:
    """Return one step: its record and a row for each site."""
    return {
        "schema": 1,
        "rank": view.rank,
        **_record_to_dict(view.record),
        "ops_seen": view.program.ops_seen,
        "ops_digested": view.program.ops_digested,
        "ops_skipped": dict(view.program.ops_skipped),
        "sites": [
            {
                "position": position,
                **asdict(site),
                "shape": None if entry is None else entry.shape,
                "dtype": None if entry is None else entry.dtype,
                "digest": format_digest(int(digest)),
            }
            for position, (site, entry, digest) in enumerate(
                zip(view.program.sites, view.layout.entries, view.record.digests, strict=True)
            )
        ],
    }


def _record_to_dict(record: StepRecord) -> dict[str, Any]:
    return {
        "segment": record.segment,
        "step": record.step,
        "epoch": record.epoch,
        "program": format_digest(record.program_id),
        "layout": format_digest(record.layout_id),
        "chain": format_digest(record.chain),
        "num_sites": len(record.digests),
    }


def render_head(run: Run, console: Console) -> None:
    """Print what a run is."""
    shown = ", ".join(f"{name} {value}" for name, value in run.selection.to_dict().items() if value is not None)
    state = "complete" if run.is_complete else f"INCOMPLETE: {run.incomplete_reason}"
    print_line(console, f"run {run.run_id} in {run.path}: {state}")
    print_line(console, f"recorded: {shown}; keeps {run.keeps} steps; {count(run.world_size, 'rank')}")


def render_run(run: Run, rank: RankRun, console: Console, *, is_all: bool = False) -> None:
    """Print what a run is and a table of its steps; of a long one the first and last ten, unless all are asked for."""
    render_head(run, console)
    num_fits = sum(len(rank.steps(segment)) > 0 for segment in rank.segments)
    lines = [f"rank {rank.rank}: {count(rank.num_steps, 'step')} in {count(num_fits, 'fit')}"]
    for found in run.nondeterministic_ops(rank.rank):
        allowed = "let through by the allow-list" if found.is_allowed else "not on the allow-list"
        lines.append(f"no deterministic implementation: {found.place}, {count(found.num_calls, 'call')}, {allowed}")
    for segment, step in sorted(run.resumed_steps):
        lines.append(f"resumed: fit {segment} went on from a checkpoint with step {step}")
    for title, field in (("saved for replay", "replay"), ("tensors kept", "keep_tensors")):
        if patterns := getattr(run.manifest, field):
            lines.append(f"{title}: {', '.join(patterns)}")
    if run.manifest.keep_tensors and (kept := not_kept(run, rank.rank)).num_missing:
        missing = f"{count(kept.num_missing, 'call')} from step {kept.first_missing} on"
        lines.append(f"NOT kept: {missing}: {kept.reason}")
    for line in lines:
        print_line(console, line)
    places = [(segment, int(step)) for segment in rank.segments for step in rank.steps(segment)]
    rows = [("...",) * 7 if place is None else _step_row(rank.read(*place)) for place in _ends(places, is_all=is_all)]
    columns = ("fit", "step", "epoch", "sites", "program", "layout", "chain")
    print_table(console, columns, rows, numbers="fit step epoch sites")
    metrics: list[tuple[object, ...]] = [
        (segment, reading.step, f"metric {name}", reading.place, metric.value, metric.digest)
        for segment in run.segments
        for reading in read_metrics(run, segment).by_key.values()
        for name, metric in reading.metrics.items()
    ]
    if metrics and rank.rank == 0:
        rows = [("...",) * 6 if row is None else row for row in _ends(metrics, is_all=is_all)]
        print_table(console, ("fit", "step", "metric", "where", "value", "digest"), rows, numbers="fit step")


def render_step(view: StepView, console: Console) -> None:
    """Print the sites of a step."""
    record, program = view.record, view.program
    skipped = ", ".join(f"{number} {reason}" for reason, number in program.ops_skipped.items())
    print_line(
        console,
        f"step {record.step} (epoch {record.epoch}, rank {view.rank}): {count(len(program), 'site')}, "
        f"{count(program.ops_seen, 'op')} seen, {program.ops_digested} digested{skipped and f'; skipped: {skipped}'}",
    )
    rows = [
        (
            *_site_cells(view, position),
            format_digest(int(record.digests[position])),
            ",".join(map(str, site.inputs)) or "-",
            site.source[0] if site.source else "-",
        )
        for position, site in enumerate(program.sites)
    ]
    columns = ("site", "phase", "module", "op or name", "tensor", "digest", "reads", "source")
    print_table(console, columns, rows, numbers="site")


def render_digest_places(run: Run, rank: RankRun, digest: int, console: Console) -> int:
    """Print where a digest appears and return how often; reads every step of a rank."""
    rows: list[tuple[object, ...]] = []
    for record in rank.iterate():
        for position in np.flatnonzero(record.digests == np.uint64(digest)).tolist():
            view = run.view(rank.rank, record.segment, record.step)
            rows.append((rank.rank, record.step, *_site_cells(view, position)))
    if rows:
        columns = ("rank", "step", "site", "phase", "module", "op or name", "tensor")
        print_table(console, columns, rows, numbers="rank step site")
    else:
        print_line(console, f"{format_digest(digest)} appears nowhere in rank {rank.rank}.")
    return len(rows)


def render_ops(view: StepView, console: Console) -> None:
    """Print the ops of a step, the most frequent first, with the elements that they produced."""
    calls: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    modules: dict[str, set[str]] = defaultdict(set)
    for site, entry in zip(view.program.sites, view.layout.entries, strict=True):
        if site.op and site.role != "argument":
            calls[site.op] += site.output == 0
            modules[site.op].add(site.module)
            elements[site.op] += 0 if entry is None else prod(entry.shape)
    rows = [
        (op, calls[op], len(modules[op]), f"{elements[op]:,}") for op in sorted(calls, key=lambda op: (-calls[op], op))
    ]
    print_table(console, ("op", "calls", "modules", "elements"), rows, numbers="calls modules elements")


def describe_site(site: Site) -> str:
    """Return what a site is in a few words: "aten.mm.default#3", "input net.head.weight"."""
    if site.op:
        output = f" output {site.output}" if site.output else ""
        what = " argument" if site.role == "argument" else ""
        name = f" [{site.name}]" if site.name else ""
        return f"{site.op}#{site.occurrence}{output}{what}{name}{' (recomputed)' if site.recomputed else ''}"
    role = "" if site.role == "named" else f"{site.role} "
    return f"{role}{site.name or '(made outside the trace)'}"


def describe_tensor(entry: TensorLayout | None) -> str:
    """Return "float32 [8, 64]", or "-" where there is no tensor."""
    if entry is None:
        return "-"
    shape = f" {list(entry.shape)}" if entry.shape or entry.stride else ""
    return f"{entry.dtype}{shape}" + (f" {entry.detail}" if entry.detail else "")


def _site_cells(view: StepView, position: int) -> tuple[object, ...]:
    site = view.program.sites[position]
    tensor = describe_tensor(view.layout.entries[position])
    return (position, site.phase, site.module or "-", describe_site(site), tensor)


def _step_row(record: StepRecord) -> tuple[object, ...]:
    row = _record_to_dict(record)
    return tuple(row[name] for name in ("segment", "step", "epoch", "num_sites", "program", "layout", "chain"))


def _ends(rows: Sequence[Row], *, is_all: bool) -> list[Row | None]:
    """Return the rows, of many those at either end with None between them."""
    return list(rows) if is_all or len(rows) <= 2 * HEAD + 1 else [*rows[:HEAD], None, *rows[-HEAD:]]
