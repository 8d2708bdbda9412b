"""The commands that read runs, and the export; each returns its exit status."""

import argparse
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from det_callbacks.checkpoint.messages import checkpoint_report
from det_callbacks.cli.parser import print_found
from det_callbacks.compare.record import VERDICT_FILE
from det_callbacks.environment.nondeterminism import read_op_facts
from det_callbacks.errors import ExportError, SelectionError
from det_callbacks.findings.table import find_findings
from det_callbacks.report.console import Section, make_console, print_line
from det_callbacks.report.machine import op_report, ops_to_dict
from det_callbacks.report.run import (
    findings_in_dict,
    findings_of,
    findings_report,
    findings_to_dict,
    run_report,
    run_to_dict,
    step_report,
    step_to_dict,
)
from det_callbacks.report.verdict import verdict_report
from det_callbacks.runs.files import (
    READ_ERRORS,
    damaged,
    list_folder,
    open_to_write,
    read_file,
    writing,
)
from det_callbacks.runs.program import Site
from det_callbacks.runs.store import Run
from det_callbacks.text import count, size

_TEXT = pa.dictionary(pa.int32(), pa.string())
_OF_STEP = {
    **{"attempt": pa.int32(), "segment": pa.int32(), "step": pa.int64(), "epoch": pa.int32()},
    **dict.fromkeys(("chain", "program", "layout"), pa.uint64()),
}
_OF_SITE = {
    **dict.fromkeys(("phase", "module", "op"), _TEXT),
    **dict.fromkeys(("occurrence", "output"), pa.int32()),
    **dict.fromkeys(("role", "name", "arguments"), _TEXT),
    **{"recomputed": pa.bool_(), "source": pa.list_(pa.string())},
}
_OF_LAYOUT = {"dtype": _TEXT, "shape": pa.list_(pa.int64()), "stride": pa.list_(pa.int64())}

# ``rank`` is in the path, ``rank=0/part-0.parquet``
EXPORT_SCHEMA = pa.schema(
    _OF_STEP | {"position": pa.int32()} | _OF_SITE | _OF_LAYOUT | {"digest": pa.uint64()}
)
GROUP_ROWS = 250_000  # per row group: some 25 MB in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    path: Path
    num_rows: int
    num_bytes: int
    incomplete_reason: str | None


def export_run(run_folder: str | Path, to: str | Path) -> Export:
    """Write a run to a new or empty folder, which appears when it is complete."""
    to = Path(os.path.abspath(to))  # "." has no name
    instead = "pass another folder (--to of det-callbacks export)"
    if os.path.exists(to) and not (to.is_dir() and not list_folder(to, instead=instead)):
        what = "is not empty" if to.is_dir() else "is a file, but a data set is a folder"
        raise ExportError(f"{to} {what}. Nothing was changed. Pass a new or empty folder.", str(to))
    run = _open(run_folder, to)
    ranks = [rank for rank in run.ranks if run.rank(rank).num_steps]
    temporary = to.with_name(f".{to.name}.{os.getpid()}.tmp")
    try:
        with writing(to, instead=instead):
            for rank in ranks:
                (temporary / f"rank={rank}").mkdir(parents=True)
            num_rows = sum(
                _write_rank(run, rank, temporary / f"rank={rank}" / "part-0.parquet")
                for rank in ranks
            )
            num_bytes = sum(file.stat().st_size for file in temporary.rglob("*.parquet"))
            temporary.replace(to)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Export(
        path=to, num_rows=num_rows, num_bytes=num_bytes, incomplete_reason=run.incomplete_reason
    )


def _open(run_folder: str | Path, to: Path) -> Run:
    run = Run.open(run_folder, check_steps=False)
    if not any(run.rank(rank).num_steps for rank in run.ranks):
        raise ExportError(
            f"{run_folder} holds no step, so there is nothing to export. {to} was not created.",
            str(to),
        )
    return run


def export_trace(run_folder: str | Path, to: str | Path) -> Export:
    """Write a run as a JSON trace: steps, phases, modules and ops as slices, the first divergence
    as an instant event.

    A run records no times: a site takes one microsecond, in the order of the run.
    """
    to = Path(os.path.abspath(to))
    if os.path.lexists(to):
        raise ExportError(
            f"{to} exists. Nothing was changed. Remove it, or start in another folder.", str(to)
        )
    run = _open(run_folder, to)
    temporary, num_rows = to.with_name(f".{to.name}.{os.getpid()}.tmp"), 0
    try:
        with writing(to, instead="start in another folder"):
            with open_to_write(temporary, "wb") as file:
                for event in _events(run):
                    file.write(b",\n" if num_rows else b'{"traceEvents": [\n')
                    file.write(json.dumps(event, separators=(",", ":")).encode())
                    num_rows += 1
                file.write(b"\n]}\n")
            temporary.replace(to)
    finally:
        with writing(to, instead="start in another folder"):
            temporary.unlink(missing_ok=True)
    return Export(
        path=to,
        num_rows=num_rows,
        num_bytes=to.stat().st_size,
        incomplete_reason=run.incomplete_reason,
    )


def _events(run: Run) -> Iterator[Mapping[str, Any]]:
    first, title, explanation = _first_divergence(run.path)
    for rank in run.ranks:
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        steps, now = run.rank(rank), 0
        places = [(fit, int(step)) for fit in steps.segments for step in steps.steps(fit)]
        of_first = [
            place for place in places if (rank, place[1]) == (first.get("rank"), first.get("step"))
        ]
        for segment, step in places:
            view, begin = run.view(rank, segment, step), now
            sites = view.program.sites
            yield from _slices(f"step {step}", rank, sites, begin)
            if (segment, step) in of_first[-1:]:
                found = [index for index, site in enumerate(sites) if _is_at(site, first)]
                at = {"ts": begin + (found[0] if found else 0), "pid": rank, "tid": 0}
                yield {
                    "ph": "i",
                    "s": "g",
                    "name": title,
                    **at,
                    "args": {"explanation": explanation},
                }
            now += max(1, len(sites))


def _slices(
    step: str, rank: int, sites: tuple[Site, ...], begin: int
) -> Iterator[Mapping[str, Any]]:
    """Yield the slices of a step: a frame lasts while the sites that follow are in it too."""
    frames = list[tuple[str, int]]()
    for now, site in enumerate((*sites, None), start=begin):
        parts = [] if site is None else [step, site.phase, *_modules(site.module)]
        shared = 0
        while shared < min(len(parts), len(frames)) and frames[shared][0] == parts[shared]:
            shared += 1
        for name, since in reversed(frames[shared:]):
            yield {"ph": "X", "name": name, "ts": since, "dur": now - since, "pid": rank, "tid": 0}
        frames = [*frames[:shared], *((name, now) for name in parts[shared:])]
        if site is not None:
            about = {"role": site.role, "name": site.name, "source": list(site.source)}
            name = site.op or site.name or site.role
            yield {
                "ph": "X",
                "name": name,
                "ts": now,
                "dur": 1,
                "pid": rank,
                "tid": 0,
                "args": about,
            }


def _modules(name: str) -> list[str]:
    """Return a module and those that hold it: net, net.0, net.0.norm."""
    parts = name.split(".") if name else []
    return [".".join(parts[: index + 1]) for index in range(len(parts))]


def _is_at(site: Site, divergence: Mapping[str, Any]) -> bool:
    fields = ("phase", "module", "op", "occurrence", "output", "name")
    return all(getattr(site, name) == divergence.get(name) for name in fields)


def _first_divergence(run: Path) -> tuple[Mapping[str, Any], str, str]:
    """Return the first divergence, title and explanation of the verdict that a
    verification left in the run.
    """
    file = run / VERDICT_FILE
    if not file.is_file():
        return {}, "", ""
    try:
        verdict = json.loads(read_file(file))
        title = f"{verdict['verdict']}: {verdict['cause']}"
        return dict(verdict["first_divergence"] or {}), title, str(verdict["explanation"])
    except READ_ERRORS as error:
        raise damaged(file, error) from error


def _write_rank(run: Run, rank: int, path: Path) -> int:
    # pyarrow.dataset.write_dataset would hold all rows in memory, at a third of the speed
    num_rows, pending = 0, list[pa.RecordBatch]()
    with pq.ParquetWriter(path, EXPORT_SCHEMA, compression="zstd") as file:

        def flush() -> None:
            table = pa.Table.from_batches(pending, EXPORT_SCHEMA).unify_dictionaries()
            file.write_table(table, row_group_size=max(1, len(table)))
            pending.clear()

        for batch in _batches(run, rank):
            pending.append(batch)
            num_rows += len(batch)
            if sum(map(len, pending)) >= GROUP_ROWS:
                flush()
        flush()
    return num_rows


def _batches(run: Run, rank: int) -> Iterator[pa.RecordBatch]:
    steps = run.rank(rank)

    @lru_cache(maxsize=16)
    def of_program(program_id: int, layout_id: int) -> list[pa.Array]:
        sites, entries = run.program(program_id).sites, run.layout(layout_id).entries
        columns = [pa.array(range(len(sites)), pa.int32())]
        columns += [
            _array([getattr(site, name) for site in sites], kind) for name, kind in _OF_SITE.items()
        ]
        for name, kind in _OF_LAYOUT.items():
            columns.append(
                _array([None if entry is None else getattr(entry, name) for entry in entries], kind)
            )
        return columns

    for segment, step in [(fit, int(step)) for fit in steps.segments for step in steps.steps(fit)]:
        record, attempt = run.view(rank, segment, step).record, steps.file_of(segment, step).attempt
        numbers = (
            attempt,
            segment,
            step,
            record.epoch,
            record.chain,
            record.program_id,
            record.layout_id,
        )
        columns = [
            pa.repeat(pa.scalar(number, kind), len(record.digests))
            for number, kind in zip(numbers, _OF_STEP.values(), strict=True)
        ]
        columns += [*of_program(record.program_id, record.layout_id), pa.array(record.digests)]
        yield pa.RecordBatch.from_arrays(columns, schema=EXPORT_SCHEMA)


def _array(values: list[object], kind: pa.DataType) -> pa.Array:
    return (
        pa.array(values, pa.string()).dictionary_encode()
        if kind == _TEXT
        else pa.array(values, kind)
    )


def show(options: argparse.Namespace) -> int:
    run = Run.open(options.run_folder)
    rank = run.rank(options.rank)
    if options.step is None and options.segment in (0, *run.segments):
        return print_found(
            options,
            lambda: run_to_dict(run, rank) | findings_in_dict(run),
            lambda: [*run_report(run, rank), *findings_of(run)],
        )
    steps = rank.steps(options.segment)
    if options.step is None or options.step not in steps:
        held = (
            f"{count(len(steps), 'step')} from {steps[0]} to {steps[-1]}"
            if len(steps)
            else "no steps"
        )
        place = (
            f"{'' if options.step is None else f'step {options.step} of '}segment {options.segment}"
        )
        raise SelectionError(f"{run.path} has no {place}, rank {rank.rank}; it has {held} there.")
    view = run.view(rank.rank, options.segment, options.step)
    return print_found(options, lambda: step_to_dict(view), lambda: step_report(view))


def diff(options: argparse.Namespace) -> int:
    # takes longer to load than a run to show
    from det_callbacks.verify.judge import compare_runs  # noqa: PLC0415

    numbers = {name: getattr(options, name) for name in ("numerics", "tolerance", "names")}
    if not options.numerics and (options.tolerance or options.names):
        raise SelectionError("--tolerance and --names need --numerics.")
    console = make_console(stderr=True)
    with console.status("comparing steps"):
        verdict = compare_runs(
            options.reference, options.current, steps=options.steps or "all", **numbers
        )
    print_found(options, verdict.to_dict, lambda: verdict_report(verdict))
    if options.html is not None:
        # loads jinja2, for a page alone
        from det_callbacks.report.page import write_report  # noqa: PLC0415

        path = write_report(
            options.html, verdict, reference=options.reference, current=options.current
        )
        print_line(console, f"det-callbacks: wrote {path}")
    return verdict.exit_code


def findings(options: argparse.Namespace) -> int:
    run = Run.open(options.run_folder, check_steps=False)
    found = find_findings(run)
    lines = [f"{run.path}: no findings"]
    if run.incomplete_reason:
        lines.append(
            "The run is incomplete, and may lack evidence of its last steps: "
            f"{run.incomplete_reason}"
        )
    report = findings_report(found) or [Section(lines=lines)]
    return print_found(
        options, lambda: findings_to_dict(run.path, found), lambda: report, status=int(bool(found))
    )


def export(options: argparse.Namespace) -> int:
    is_trace = options.to == "perfetto"
    name = f"{Path(os.path.abspath(options.run_folder)).name}.perfetto.json"
    done = (
        export_trace(options.run_folder, name)
        if is_trace
        else export_run(options.run_folder, options.to)
    )
    note = f"\nThe run is incomplete: {done.incomplete_reason}" if done.incomplete_reason else ""
    print_line(
        make_console(),
        f"{done.path}: {count(done.num_rows, 'event' if is_trace else 'row')}, "
        f"{size(done.num_bytes)}{note}",
    )
    return 0


def ops(options: argparse.Namespace) -> int:
    run = None if options.used_by is None else Run.open(options.used_by)
    content = ops_to_dict(read_op_facts(), run)
    return print_found(options, lambda: content, lambda: op_report(content, run))


def check_checkpoint(options: argparse.Namespace) -> int:
    from det_callbacks.checkpoint.check import check_checkpoint  # noqa: PLC0415  # loads torch

    found = check_checkpoint(options.checkpoint, options.other)
    return print_found(
        options, found.to_dict, lambda: checkpoint_report(found), status=found.exit_code
    )
