"""The commands that read runs and this machine; each returns its exit status."""

import argparse
import os
from pathlib import Path

from det_callbacks.checkpoint.messages import checkpoint_report
from det_callbacks.cli.export import export_run, export_trace
from det_callbacks.cli.found import print_found
from det_callbacks.environment.nondeterminism import read_op_facts
from det_callbacks.errors import SelectionError
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
from det_callbacks.runs.store import Run
from det_callbacks.text import count, size


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
        held = f"{count(len(steps), 'step')} from {steps[0]} to {steps[-1]}" if len(steps) else "no steps"
        place = f"{'' if options.step is None else f'step {options.step} of '}segment {options.segment}"
        raise SelectionError(f"{run.path} has no {place}, rank {rank.rank}; it has {held} there.")
    view = run.view(rank.rank, options.segment, options.step)
    return print_found(options, lambda: step_to_dict(view), lambda: step_report(view))


def diff(options: argparse.Namespace) -> int:
    from det_callbacks.verify.judge import compare_runs  # noqa: PLC0415  # takes longer to load than a run to show

    numbers = {name: getattr(options, name) for name in ("numerics", "tolerance", "names")}
    if not options.numerics and (options.tolerance or options.names):
        raise SelectionError("--tolerance and --names need --numerics.")
    console = make_console(stderr=True)
    with console.status("comparing steps"):
        verdict = compare_runs(options.reference, options.current, steps=options.steps or "all", **numbers)
    print_found(options, verdict.to_dict, lambda: verdict_report(verdict))
    if options.html is not None:
        from det_callbacks.report.page import write_report  # noqa: PLC0415  # loads jinja2, for a page alone

        path = write_report(options.html, verdict, reference=options.reference, current=options.current)
        print_line(console, f"det-callbacks: wrote {path}")
    return verdict.exit_code


def findings(options: argparse.Namespace) -> int:
    run = Run.open(options.run_folder, check_steps=False)
    found = find_findings(run)
    lines = [f"{run.path}: no findings"]
    if run.incomplete_reason:
        lines.append(f"The run is incomplete, and may lack evidence of its last steps: {run.incomplete_reason}")
    report = findings_report(found) or [Section(lines=lines)]
    return print_found(options, lambda: findings_to_dict(run.path, found), lambda: report, status=int(bool(found)))


def export(options: argparse.Namespace) -> int:
    is_trace = options.to == "perfetto"
    name = f"{Path(os.path.abspath(options.run_folder)).name}.perfetto.json"
    done = export_trace(options.run_folder, name) if is_trace else export_run(options.run_folder, options.to)
    note = f"\nThe run is incomplete: {done.incomplete_reason}" if done.incomplete_reason else ""
    print_line(
        make_console(),
        f"{done.path}: {count(done.num_rows, 'event' if is_trace else 'row')}, {size(done.num_bytes)}{note}",
    )
    return 0


def ops(options: argparse.Namespace) -> int:
    run = None if options.used_by is None else Run.open(options.used_by)
    content = ops_to_dict(read_op_facts(), run)
    return print_found(options, lambda: content, lambda: op_report(content, run))


def check_checkpoint(options: argparse.Namespace) -> int:
    from det_callbacks.checkpoint.check import check_checkpoint  # noqa: PLC0415  # loads torch

    found = check_checkpoint(options.checkpoint, options.other)
    return print_found(options, found.to_dict, lambda: checkpoint_report(found), status=found.exit_code)
