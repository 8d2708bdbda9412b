"""``det-callbacks record``, ``verify`` and ``check``: a script that is started, and what it came to."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from det_callbacks.check import FACTORS, PLAIN, CheckedRun, Script, check_script, new_folder
from det_callbacks.cli.parser import INTERRUPTED, SCRIPT_OPTIONS
from det_callbacks.compare.record import REPORT_FILE
from det_callbacks.errors import CheckError
from det_callbacks.patterns import as_patterns
from det_callbacks.report.console import Section, Table, make_console, print_line, print_report
from det_callbacks.report.verdict import verdict_report
from det_callbacks.runs.selection import Selection
from det_callbacks.runs.store import Run

_STYLES = {0: "bold green", 1: "bold red", 2: "bold red", 3: "bold yellow"}
_OF_SCRIPT = {
    "match": "the script repeats itself, bit for bit",
    "diverged": "the script does not repeat itself",
    "not_comparable": "the two runs differ, and so does what they ran on",
    "failed": "it could not be checked whether the script repeats itself",
}


def record(options: argparse.Namespace) -> int:
    """Run a script and record it."""
    script, run = _script(options), Path(options.run_folder).absolute()
    try:
        done = script.record(run, overwrite=options.overwrite)
    except KeyboardInterrupt:
        print_line(make_console(), f"det-callbacks record: interrupted; what there is: det-callbacks show {run}")
        return INTERRUPTED
    return _end("record", [done], "" if done.exit_code else f"; the run: {run}")


def verify(options: argparse.Namespace) -> int:
    """Run a script and verify it against a run."""
    script, reference = _script(options), Path(options.run_folder).absolute()
    Run.open(reference)  # before a training is started for nothing
    current = new_folder(options.current, "determinism-verify")
    done = script.verify(reference, current / "run")
    if done.verdict is not None:
        print_report([Section(), *verdict_report(done.verdict), Section()])
    report = current / "run" / REPORT_FILE
    return _end("verify", [done], f"; kept in {current}" + (f"; report: {report}" if report.exists() else ""))


def check(options: argparse.Namespace) -> int:
    """Run a script twice and say what differs: verdicts that are no match, and a table of what was varied."""
    script, vary = _script(options), options.vary.split(",") if options.vary else []
    if unknown := [factor for factor in vary if factor not in FACTORS]:
        raise CheckError(f"There is no {unknown[0]!r} to vary; there are {', '.join(FACTORS)}.")
    home = new_folder(options.to, "determinism-check")
    runs = check_script(script, home, vary=vary)
    is_varied, sections = len(runs) > 2, [Section()]
    for run in runs:
        if run.output is not None and (options.verbose or run.outcome == "failed"):
            print_line(make_console(), f"{run.name} printed:", "bold")
            sys.stdout.write(run.output.read_text(encoding="utf-8", errors="replace"))
        if run.verdict is not None and (run.outcome in ("diverged", "not_comparable") or not is_varied):
            sections += [Section(title=f"{run.name}: {run.change}")] * is_varied + verdict_report(run.verdict)
    if is_varied:
        columns = ("run", "changed", "outcome", "first divergence", "cause")
        sections.append(Section(table=Table(columns=columns, rows=[_row(run) for run in runs[1:]])))
    print_report([*sections, Section()])
    facts = _OF_SCRIPT[{run.name: run.outcome for run in runs}.get(PLAIN, "failed")]
    if names := [run.name for run in runs[2:] if run.outcome == "diverged"]:
        facts += f"; its bits depend on {', '.join(names)}"
    return _end("check", runs, f"; {facts}; kept in {home}")


def _row(run: CheckedRun) -> tuple[str, ...]:
    first, cause = (run.verdict.first_divergence, run.verdict.cause) if run.verdict is not None else (None, None)
    place = "-" if first is None else f"step {first.step}, {first.phase}: {first.name or first.op or first.kind}"
    return (run.name, run.change, run.outcome.replace("_", " "), place, cause or "-")


def _end(command: str, runs: Sequence[CheckedRun], facts: str) -> int:
    """Print why runs failed, and the closing line; return the status: diverged before failed before not comparable."""
    console, worst = make_console(), max(reversed(runs), key=lambda run: [0, 3, 2, 1].index(run.exit_code))
    for run in runs:
        if run.reason:
            print_line(console, f"{run.name}: {run.reason}." if len(runs) > 1 else f"{run.reason}.")
    word = f"{worst.outcome.replace('_', ' ')} (exit status {worst.exit_code})"
    print_line(console, f"det-callbacks {command}: {word}{facts}", _STYLES[worst.exit_code])
    return worst.exit_code


def _script(options: argparse.Namespace) -> Script:
    """Return the script with its arguments; a wrong one is an error now, and not only when the script trains."""
    names = [option.removeprefix("--").replace("-", "_") for option in SCRIPT_OPTIONS]
    given = {name: getattr(options, name) for name in names}
    arguments = {name: value for name, value in given.items() if value is not None and value is not False}
    settings: dict[str, Any] = {name: arguments.pop(name) for name in ("seed", "deterministic") if name in arguments}
    if "keep" in arguments:
        arguments["keep_tensors"] = arguments.pop("keep")
    for name in ("replay", "keep_tensors"):
        if isinstance(patterns := arguments.get(name), list):
            as_patterns(name, patterns)
    Selection(**{name: value for name, value in arguments.items() if name in Selection.__dataclass_fields__})
    return Script(words=options.words, arguments=arguments, settings=settings)
