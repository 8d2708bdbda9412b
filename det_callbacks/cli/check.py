"""``det-callbacks record``, ``verify`` and ``check``: a script that is started, and what it came to."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from det_callbacks.check import FACTORS, PLAIN, CheckedRun, CheckReport, Script, check_script, new_folder
from det_callbacks.cli.options import read_options
from det_callbacks.compare.record import REPORT_FILE
from det_callbacks.errors import CheckError
from det_callbacks.report.console import make_console, print_line, print_table
from det_callbacks.report.verdict import render_verdict
from det_callbacks.runs.store import Run

_WORDS = {0: "match", 1: "diverged", 2: "failed", 3: "not_comparable"}
_STYLES = {0: "bold green", 1: "bold red", 2: "bold red", 3: "bold yellow"}
_OF_SCRIPT = {
    "match": "the script repeats itself, bit for bit",
    "diverged": "the script does not repeat itself",
    "not_comparable": "the two runs differ, and so does what they ran on",
    "failed": "it could not be checked whether the script repeats itself",
}
_OF_FACTORS = {
    "diverged": "bits depend on",
    "match": "bits do not depend on",
    "failed": "could not be varied or checked",
    "not_comparable": "not comparable",
}


def render_check(report: CheckReport, console: Console) -> None:
    """Print the verdicts of the runs that are no match, what failed, a table, and what it comes to."""
    varied = report.runs[2:]
    for run in report.runs:
        if run.verdict is not None and (run.outcome in ("diverged", "not_comparable") or not varied):
            print_line(console)
            if varied:
                print_line(console, f"{run.name}: {run.change or 'nothing changed'}", "bold")
            render_verdict(run.verdict, console)
    print_line(console)
    if varied:
        rows = [_row(run) for run in report.runs[1:]]
        print_table(console, ("run", "changed", "outcome", "first divergence", "cause"), rows)
        print_line(console)
    for run in report.runs:
        if run.reason:
            print_line(console, f"{run.name}: {run.reason}.")
    parts = [_OF_SCRIPT[{run.name: run.outcome for run in report.runs}.get(PLAIN, "failed")]]
    for outcome, text in _OF_FACTORS.items():
        if names := [run.name for run in varied if run.outcome == outcome]:
            parts.append(f"{text}: {', '.join(names)}")
    if report.not_run:
        parts.append(f"not run: {', '.join(report.not_run)}")
    line = f"det-callbacks check: {_WORDS[report.exit_code]}: {'; '.join(parts)}; kept in {report.folder}"
    print_line(console, line, _STYLES[report.exit_code])


def record(options: argparse.Namespace) -> int:
    """Run a script and record it."""
    console = make_console()
    script, run = _script(options, console), Path(options.run_folder).absolute()
    done = script.record(run, overwrite=options.overwrite)
    _print_end(console, "record", done, f"; the run: {run}" if not done.exit_code else "")
    return done.exit_code


def verify(options: argparse.Namespace) -> int:
    """Run a script and verify it against a run."""
    console = make_console()
    script, reference = _script(options, console), Path(options.reference).absolute()
    Run.open(reference)  # before a training is started for nothing
    current = new_folder(options.current, "determinism-verify")
    done = script.verify(reference, current / "run")
    if done.verdict is not None:
        print_line(console)
        render_verdict(done.verdict, console)
        print_line(console)
    report = current / "run" / REPORT_FILE
    shown = f"; report: {report}" if report.exists() else ""
    _print_end(console, "verify", done, f"; kept in {current}{shown}")
    return done.exit_code


def check(options: argparse.Namespace) -> int:
    """Run a script twice and say what differs."""
    vary = options.vary.split(",") if options.vary else ()
    if unknown := [name for name in vary if name not in FACTORS]:
        raise CheckError(f"There is no {unknown[0]!r} to vary; there are {', '.join(FACTORS)}.")
    console = make_console()
    factors = tuple(factor for factor in FACTORS if factor in vary)
    report = check_script(_script(options, console), to=options.to, vary=factors)
    for run in report.runs:
        if run.output is not None and (options.verbose or run.outcome == "failed"):
            print_line(console, f"{run.name} printed:", "bold")
            console.file.flush()
            sys.stdout.write(run.output.read_text(encoding="utf-8", errors="replace"))
    render_check(report, console)
    return report.exit_code


def _script(options: argparse.Namespace, console: Console) -> Script:
    def announce(title: str, words: Sequence[str]) -> None:
        print_line(console, f"det-callbacks: {title}: {shlex.join(words)}", "bold")
        console.file.flush()  # before the process writes to the same place

    arguments, settings = read_options(options)
    return Script(words=options.words, arguments=arguments, settings=settings, announce=announce)


def _print_end(console: Console, command: str, run: CheckedRun, place: str) -> None:
    if run.reason:
        print_line(console, f"{run.reason}.")
    word = f"{run.outcome.replace('_', ' ')} (exit status {run.exit_code})"
    print_line(console, f"det-callbacks {command}: {word}{place}", _STYLES[run.exit_code])


def _row(run: CheckedRun) -> tuple[str, ...]:
    first = None if run.verdict is None else run.verdict.first_divergence
    place = "-" if first is None else f"step {first.step}, {first.phase}: {first.name or first.op or first.kind}"
    cause = None if run.verdict is None else run.verdict.cause
    return (run.name, run.change or "nothing", run.outcome.replace("_", " "), place, cause or "-")
