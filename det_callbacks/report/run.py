"""A recorded run as JSON and in tables: its steps, the sites of a step, and its findings."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msgspec import structs

from det_callbacks.compare.nonfinite import first_nonfinite
from det_callbacks.digest.host import format_digest
from det_callbacks.errors import ReferenceFormatError
from det_callbacks.findings.table import find_findings
from det_callbacks.report.console import Section, Table
from det_callbacks.report.numerics import nonfinite_sentence, output_text
from det_callbacks.runs.metrics import read_metrics
from det_callbacks.runs.program import (
    Program,
    Site,
    StepRecord,
    StepView,
    TensorLayout,
    describe_tensor,
)
from det_callbacks.runs.store import RankRun, Run
from det_callbacks.text import at_most, count, listed
from det_callbacks.verdict import Coverage, Finding, as_json

HEAD = 10  # rows shown from either end of a long table


def run_to_dict(run: Run, rank: RankRun) -> dict[str, Any]:
    readings = [
        (segment, one)
        for segment in run.segments
        for one in read_metrics(run, segment).by_key.values()
    ]
    found = first_nonfinite(run)
    return {
        "schema": 1,
        "path": str(run.path),
        "run_id": run.manifest.run_id,
        "complete": run.is_complete,
        "incomplete_reason": run.incomplete_reason,
        "keeps": run.keeps,
        "world_size": run.manifest.world_size,
        "rank": rank.rank,
        "selection": run.manifest.selection.to_dict(),
        "attempts": len(run.manifest.attempts),
        "resumed_from": [
            {"segment": segment, "step": step} for segment, step in sorted(run.resumed_steps)
        ],
        "replay": list(run.manifest.replay),
        "keep_tensors": list(run.manifest.keep_tensors),
        "first_nonfinite": None if found is None else asdict(found),
        "metrics": [{"segment": segment, **asdict(reading)} for segment, reading in readings],
        "steps": [_record_to_dict(record) for record in rank.iterate()],
    }


def step_to_dict(view: StepView) -> dict[str, Any]:
    program = view.program
    sites = []
    for position, (site, entry, bits) in enumerate(_sites(view)):
        layout = {name: getattr(entry, name, None) for name in ("shape", "dtype")}
        sites.append({"position": position, **structs.asdict(site), **layout, "digest": bits})
    counts: dict[str, Any] = {"ops_seen": program.ops_seen, "ops_digested": program.ops_digested}
    counts["ops_skipped"] = dict(program.ops_skipped)
    return {
        "schema": 1,
        "rank": view.rank,
        **_record_to_dict(view.record),
        **counts,
        "sites": sites,
    }


def _record_to_dict(record: StepRecord) -> dict[str, Any]:
    ids = {"program": record.program_id, "layout": record.layout_id, "chain": record.chain}
    place = {"segment": record.segment, "step": record.step, "epoch": record.epoch}
    return {
        **place,
        **{name: format_digest(one) for name, one in ids.items()},
        "num_sites": len(record.digests),
    }


def _sites(view: StepView) -> Iterator[tuple[Site, TensorLayout | None, str]]:
    return zip(
        view.program.sites,
        view.layout.entries,
        map(format_digest, view.record.digests.tolist()),
        strict=True,
    )


def head_lines(run: Run) -> list[str]:
    chosen = run.manifest.selection.to_dict()
    shown = ", ".join(f"{name} {value}" for name, value in chosen.items() if value is not None)
    state = "complete" if run.is_complete else f"INCOMPLETE: {run.incomplete_reason}"
    return [
        f"run {run.manifest.run_id} in {run.path}: {state}",
        f"recorded: {shown}; keeps {run.keeps} steps; {count(run.manifest.world_size, 'rank')}",
    ]


def run_report(run: Run, rank: RankRun) -> list[Section]:
    """Return the description of a run, and a table of its steps:
    the first and last of a long one.
    """
    places = [(segment, int(step)) for segment in rank.segments for step in rank.steps(segment)]
    num_fits = len({segment for segment, _ in places})
    lines = [
        *head_lines(run),
        f"rank {rank.rank}: {count(rank.num_steps, 'step')} in {count(num_fits, 'fit')}",
    ]
    for found in run.nondeterministic_ops(rank.rank):
        allowed = "on the allow-list" if found.is_allowed else "not on the allow-list"
        lines.append(
            f"no deterministic implementation: {found.place}, {count(found.num_calls, 'call')}, "
            f"{allowed}"
        )
    for segment, step in sorted(run.resumed_steps):
        lines.append(f"resumed: segment {segment} continued from a checkpoint with step {step}")
    chosen = {"saved for replay": run.manifest.replay, "tensors kept": run.manifest.keep_tensors}
    lines += [f"{what}: {', '.join(patterns)}" for what, patterns in chosen.items() if patterns]
    if (nonfinite := first_nonfinite(run)) is not None:
        lines.append(nonfinite_sentence(nonfinite))
    metrics = [read_metrics(run, segment).by_key.values() for segment in run.segments]
    if names := sorted(
        {name for readings in metrics for reading in readings for name in reading.metrics}
    ):
        lines.append(f"metrics (--json has their values): {', '.join(at_most(HEAD, names))}")
    fields = ("segment", "step", "epoch", "num_sites", "program", "layout", "chain")
    is_long = len(places) > 2 * HEAD + 1
    shown = [*places[:HEAD], *places[-HEAD:]] if is_long else places
    records = (_record_to_dict(rank.read(*place)) for place in shown)
    rows = [[record[name] for name in fields] for record in records]
    if is_long:
        rows.insert(HEAD, ["..."] * len(fields))
    columns = ("fit", "step", "epoch", "sites", *fields[4:])
    return [Section(code=lines, table=Table(columns=columns, rows=rows, is_wide=True))]


def step_report(view: StepView) -> list[Section]:
    record, program = view.record, view.program
    place = f"step {record.step} (epoch {record.epoch}, rank {view.rank})"
    line = f"{place}: {count(len(program), 'site')}, {ops_text(program)}"
    rows = []
    for position, (site, entry, bits) in enumerate(_sites(view)):
        reads, source = ",".join(map(str, site.inputs)) or "-", next(iter(site.source), "-")
        what = site.phase, site.module or "-", describe_site(site), describe_tensor(entry)
        rows.append((position, *what, bits, reads, source))
    columns = ("site", "phase", "module", "op or name", "tensor", "digest", "reads", "source")
    return [Section(code=[line], table=Table(columns=columns, rows=rows, is_wide=True))]


def ops_text(counts: Program | Coverage) -> str:
    """Return "9 ops seen, 8 digested, 1 skipped (view)"."""
    skipped = "".join(
        f", {number:,} skipped ({why})" for why, number in sorted(counts.ops_skipped.items())
    )
    return f"{count(counts.ops_seen, 'op')} seen, {counts.ops_digested:,} digested{skipped}"


def describe_site(site: Site) -> str:
    """Return "aten.mm.default#3", "input net.head.weight"."""
    if site.op:
        what = " argument" if site.role == "argument" else ""
        name = f" [{site.name}]" if site.name else ""
        return f"{output_text(site)}{what}{name}{' (recomputed)' if site.recomputed else ''}"
    role = "" if site.role == "named" else f"{site.role} "
    return f"{role}{site.name or '(made outside the trace)'}"


FINDINGS_SCHEMA = 1


def findings_to_dict(path: Path, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "schema": FINDINGS_SCHEMA,
        "run": str(path),
        "findings": [as_json(finding) for finding in findings],
    }


def findings_report(findings: Sequence[Finding]) -> list[Section]:
    if not findings:
        return []
    columns = ("finding", "ranks", "steps", "what, and what to do")
    rows = [
        (one.finding, _shown(one.ranks), _shown(one.steps), one.explanation) for one in findings
    ]
    return [Section(title=count(len(findings), "finding"), table=Table(columns=columns, rows=rows))]


def findings_in_dict(run: Run) -> dict[str, Any]:
    """Return the findings in the JSON of ``show``; null if the evidence cannot be read."""
    try:
        return {"findings": [as_json(finding) for finding in find_findings(run)]}
    except ReferenceFormatError:
        return {"findings": None}


def findings_of(run: Run) -> list[Section]:
    """Return the findings of a run, or why its evidence cannot be read."""
    try:
        return findings_report(find_findings(run))
    except ReferenceFormatError as error:
        return [Section(title="Findings", lines=[f"They cannot be read: {error}"])]


def findings_line(path: Path, *, shown: Path) -> str:
    """Return the line on findings at the end of a recording, or "";
    ``shown`` is where the run will be.
    """
    command = f"det-callbacks findings {shlex.quote(str(shown))}"
    try:
        findings = find_findings(Run.open(path, check_steps=False))
    except ReferenceFormatError as error:  # the recording itself is complete
        return f"det_callbacks: findings cannot be read: {error} See {command}"
    if not findings:
        return ""
    words = listed((entry.finding for entry in findings), limit=len(findings))
    return f"det_callbacks: {count(len(findings), 'finding')}: {words}; see {command}"


def _shown(numbers: Sequence[int]) -> str:
    return " to ".join(map(str, dict.fromkeys(numbers))) or "-"
