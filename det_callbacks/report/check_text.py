"""What a check of a script found, while it runs and at its end."""

import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from det_callbacks.check import PLAIN, RECORDING, CheckedRun, CheckReport
from det_callbacks.report.tables import print_table
from det_callbacks.report.verdict_text import render_verdict

_WORDS = {0: "match", 1: "diverged", 2: "failed", 3: "not_comparable"}
_STYLES = {0: "bold green", 1: "bold red", 2: "bold red", 3: "bold yellow"}
EXPECTED = (
    "check expects a Hydra application with pkg://det_callbacks.conf in hydra.searchpath, which builds cfg.callbacks "
    "and passes them to the Trainer; it adds +determinism=record determinism.reference=... to its arguments."
)


def announce_run(title: str, words: Sequence[str], console: Console) -> None:
    """Print what is about to run."""
    _line(console, f"det-callbacks check: {title}: {shlex.join(words)}", "bold")


def render_check(report: CheckReport, console: Console) -> None:
    """Print the verdicts of the runs that are no match, what failed, a table, and what it comes to."""
    varied = report.runs[2:]
    for run in report.runs:
        if run.verdict is not None and (run.outcome in ("diverged", "not_comparable") or not varied):
            _line(console, "")
            if varied:
                _line(console, f"{run.name}: {run.change or 'nothing changed'}", "bold")
            render_verdict(run.verdict, console)
    _line(console, "")
    if varied:
        print_table(
            console, ("run", "changed", "outcome", "first divergence", "cause"), [_row(run) for run in report.runs[1:]]
        )
        _line(console, "")
    for run in report.runs:
        if run.reason:
            _line(console, f"{run.name}: {run.reason}.")
            if run.name == RECORDING:
                _line(console, EXPECTED)
    conclusion = f"{_WORDS[report.exit_code]}: {_conclusion(report)}; kept in {report.folder}"
    _line(console, f"det-callbacks check: {conclusion}", _STYLES[report.exit_code])


def _conclusion(report: CheckReport) -> str:
    outcome = {run.name: run.outcome for run in report.runs}.get(PLAIN, "failed")
    text = {
        "failed": "it could not be checked whether the script repeats itself",
        "not_comparable": "the two runs differ, and so does what they ran on",
        "diverged": "the script does not repeat itself",
        "match": "the script repeats itself, bit for bit",
    }[outcome]
    parts = {"diverged": "bits depend on", "match": "bits do not depend on", "failed": "could not be varied or checked"}
    for word, part in {**parts, "not_comparable": "not comparable"}.items():
        if names := [run.name for run in report.runs[2:] if run.outcome == word]:
            text += f"; {part}: {', '.join(names)}"
    return f"{text}; not run: {', '.join(report.not_run)}" if report.not_run else text


def _row(run: CheckedRun) -> tuple[str, ...]:
    first = None if run.verdict is None else run.verdict.first_divergence
    place = "-" if first is None else f"step {first.step}, {first.phase}: {first.name or first.op or first.kind}"
    cause = None if run.verdict is None else run.verdict.cause
    return (run.name, run.change or "nothing", run.outcome.replace("_", " "), place, cause or "-")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
