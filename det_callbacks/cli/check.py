"""``det-callbacks record``, ``verify`` and ``check``: a script that is started, and what it came to."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from det_callbacks.check import PLAIN, CheckedRun, CheckReport, Script, check_script, new_folder
from det_callbacks.cli.parser import ARGUMENTS, INTERRUPTED, SCRIPT_SETTINGS
from det_callbacks.compare.record import REPORT_FILE
from det_callbacks.errors import ReferenceFormatError, ReferenceNotFoundError
from det_callbacks.patterns import as_patterns
from det_callbacks.report.console import Report, Section, Table, count, make_console, print_line, print_report
from det_callbacks.report.verdict import verdict_report
from det_callbacks.runs.selection import Selection
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


def check_sections(report: CheckReport) -> Report:
    """Return the verdicts of the runs that are no match, a table, what failed, and what it comes to."""
    varied, sections = report.runs[2:], [Section()]
    for run in report.runs:
        if run.verdict is not None and (run.outcome in ("diverged", "not_comparable") or not varied):
            title = Section(title=f"{run.name}: {run.change or 'nothing changed'}")
            sections += [title] * bool(varied) + [*verdict_report(run.verdict)]
    if varied:
        columns = ("run", "changed", "outcome", "first divergence", "cause")
        sections.append(Section(table=Table(columns=columns, rows=[_row(run) for run in report.runs[1:]])))
    parts = [_OF_SCRIPT[{run.name: run.outcome for run in report.runs}.get(PLAIN, "failed")]]
    for outcome, text in _OF_FACTORS.items():
        if names := [run.name for run in varied if run.outcome == outcome]:
            parts.append(f"{text}: {', '.join(names)}")
    if report.not_run:
        parts.append(f"not run: {', '.join(report.not_run)}")
    if reasons := [f"{run.name}: {run.reason}." for run in report.runs if run.reason]:
        sections.append(Section(lines=reasons))
    line = f"det-callbacks check: {_WORDS[report.exit_code]}: {'; '.join(parts)}; kept in {report.folder}"
    return [*sections, Section(title=line, style=_STYLES[report.exit_code])]


def _row(run: CheckedRun) -> tuple[str, ...]:
    first = None if run.verdict is None else run.verdict.first_divergence
    place = "-" if first is None else f"step {first.step}, {first.phase}: {first.name or first.op or first.kind}"
    cause = None if run.verdict is None else run.verdict.cause
    return (run.name, run.change or "nothing", run.outcome.replace("_", " "), place, cause or "-")


def record(options: argparse.Namespace) -> int:
    """Run a script and record it."""
    script, run = _script(options), Path(options.run_folder).absolute()
    try:
        done = script.record(run, overwrite=options.overwrite)
    except KeyboardInterrupt:
        print_line(make_console(), f"det-callbacks record: interrupted; {_held(run)}", "bold red")
        return INTERRUPTED
    _print_end("record", done, f"; the run: {run}" if not done.exit_code else "")
    return done.exit_code


def verify(options: argparse.Namespace) -> int:
    """Run a script and verify it against a run."""
    script, reference = _script(options), Path(options.reference).absolute()
    Run.open(reference)  # before a training is started for nothing
    current = new_folder(options.current, "determinism-verify")
    done = script.verify(reference, current / "run")
    if done.verdict is not None:
        print_report([Section(), *verdict_report(done.verdict), Section()])
    report = current / "run" / REPORT_FILE
    shown = f"; report: {report}" if report.exists() else ""
    _print_end("verify", done, f"; kept in {current}{shown}")
    return done.exit_code


def check(options: argparse.Namespace) -> int:
    """Run a script twice and say what differs."""
    script = _script(options)
    report = check_script(script, to=options.to, vary=options.vary.split(",") if options.vary else ())
    for run in report.runs:
        if run.output is not None and (options.verbose or run.outcome == "failed"):
            print_line(make_console(), f"{run.name} printed:", "bold")
            sys.stdout.write(run.output.read_text(encoding="utf-8", errors="replace"))
    print_report(check_sections(report))
    return report.exit_code


def _script(options: argparse.Namespace) -> Script:
    def announce(title: str, words: Sequence[str]) -> None:
        print_line(make_console(), f"det-callbacks: {title}: {shlex.join(words)}", "bold")
        sys.stdout.flush()  # before the process writes to the same place

    given = {name: value for name, value in vars(options).items() if value is not None and value is not False}
    arguments, settings = (
        {name: given[name] for name in names if name in given} for names in (ARGUMENTS, SCRIPT_SETTINGS)
    )
    # a wrong one is an error now, and not only when the script trains
    for name in ("replay", "keep_tensors"):
        if isinstance(patterns := arguments.get(name), list):
            as_patterns(name, patterns)
    Selection(**{name: value for name, value in arguments.items() if name in Selection.__dataclass_fields__})
    return Script(words=options.words, arguments=arguments, settings=settings, announce=announce)


def _held(run: Path) -> str:
    """Return what a folder holds whose recording was interrupted."""
    try:
        found = Run.open(run, check_steps=False)
    except (ReferenceNotFoundError, ReferenceFormatError):
        return f"{run} holds no run"
    steps = count(sum(found.rank(rank).num_steps for rank in found.ranks), "whole step")
    return f"{run} holds {steps}{'' if found.is_complete else ', and is incomplete'}"


def _print_end(command: str, run: CheckedRun, place: str) -> None:
    console = make_console()
    if run.reason:
        print_line(console, f"{run.reason}.")
    word = f"{run.outcome.replace('_', ' ')} (exit status {run.exit_code})"
    print_line(console, f"det-callbacks {command}: {word}{place}", _STYLES[run.exit_code])
