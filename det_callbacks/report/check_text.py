"""What a check of a script found, while it runs and at its end."""

import shlex
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from det_callbacks.check import CheckedRun, CheckReport
from det_callbacks.check.model import PLAIN, RECORDING, Outcome
from det_callbacks.report.tables import print_table
from det_callbacks.report.verdict_text import render_verdict
from det_callbacks.verdict import Divergence

_STYLES = {"match": "bold green", "diverged": "bold red", "not_comparable": "bold yellow", "failed": "bold red"}
_LEFT_OUT = {"not_comparable": "not comparable", "failed": "could not be checked", "not_run": "not run"}
EXPECTED = (
    "check expects a Hydra application with pkg://det_callbacks.conf in hydra.searchpath, which builds cfg.callbacks "
    "and passes them to the Trainer; it adds +determinism=record determinism.reference=... to its arguments."
)


def announce_run(run: CheckedRun, console: Console) -> None:
    """Print what is about to run, or why it cannot."""
    title = {RECORDING: "record", PLAIN: "verify"}.get(run.name, f"verify, {run.name}")
    change = f", {run.change}" if run.change else ""
    if run.command:
        _line(console, f"det-callbacks check: {title}{change}: {shlex.join(run.command)}", "bold")
    else:
        _line(console, f"det-callbacks check: {title}: {_why(run)}", "bold")


def render_check(report: CheckReport, console: Console) -> None:
    """Print the verdicts of the runs that are no match, what could not be done, a table, and what it comes to."""
    is_alone = len(report.runs) <= 2
    for run in report.runs:
        if run.verdict is not None and (run.outcome in ("diverged", "not_comparable") or is_alone):
            _line(console, "")
            if not is_alone:
                _line(console, _title(run), "bold")
            render_verdict(run.verdict, console)
    if not is_alone:
        _line(console, "")
        rows = [_row(run) for run in report.runs if run.name != RECORDING]
        print_table(console, ("run", "changed", "outcome", "first divergence", "cause"), rows)
    _line(console, "")
    for run in report.runs:
        if run.outcome == "failed":
            _line(console, f"{_name(run)}: {_why(run)}")
        elif run.detail:
            _line(console, f"{_name(run)}: {run.detail}.")
    for line in _hints(report):
        _line(console, line)
    word = {0: "match", 1: "diverged", 2: "failed", 3: "not_comparable"}[report.exit_code]
    _line(console, f"det-callbacks check: {_conclusion(report)}; kept in {_shown(report.folder)}", _STYLES[word])


def _conclusion(report: CheckReport) -> str:
    plain = next((run for run in report.runs if run.name == PLAIN), None)
    if plain is None or plain.outcome == "failed":
        return "failed: it could not be checked whether the script repeats itself"
    varied = [run for run in report.runs if run.name not in (RECORDING, PLAIN)]
    if plain.outcome == "not_comparable":
        return "not_comparable: the two runs differ, and so does what they ran on"
    word = {0: "match", 1: "diverged", 2: "failed", 3: "not_comparable"}[report.exit_code]
    parts = ["the script does not repeat itself" if plain.breaks_bits else "the script repeats itself, bit for bit"]
    if plain.breaks_bits:
        run_all_the_same = [run.name for run in varied if run.outcome in ("match", "diverged", "not_comparable")]
        parts += [f"whether {_changes(run_all_the_same)} cannot be told"] if run_all_the_same else []
        return f"{word}: {'; '.join([*parts, *_left_out(varied, ('failed', 'not_run'))])}"
    if breaking := [run.name for run in varied if run.breaks_bits]:
        parts.append(_changes(breaking))
    if equal := [f"{run.name}{' (in part)' if run.detail else ''}" for run in varied if run.outcome == "match"]:
        parts.append(f"{_names(equal)} {'do' if _is_plural(equal) else 'does'} not change the bits")
    return f"{word}: {'; '.join([*parts, *_left_out(varied, ('not_comparable', 'failed', 'not_run'))])}"


def _left_out(varied: Sequence[CheckedRun], outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield which factors led to nothing, one text an outcome."""
    for outcome in outcomes:
        if names := [run.name for run in varied if run.outcome == outcome and not run.breaks_bits]:
            yield f"{_LEFT_OUT[outcome]}: {_names(names)}"


def _changes(names: Sequence[str]) -> str:
    """Return that factors change the bits, "threads change the bits here"."""
    return f"{_names(names)} {'change' if _is_plural(names) else 'changes'} the bits here"


def _is_plural(names: Sequence[str]) -> bool:
    return len(names) > 1 or names[0].endswith("s")


def _names(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _title(run: CheckedRun) -> str:
    change = f": {run.change}" if run.change else ""
    if run.breaks_bits and run.outcome == "not_comparable":
        change += f". That was changed on purpose, and excuses nothing: {_changes([run.name])}"
    return f"{_name(run)}{change}"


def _name(run: CheckedRun) -> str:
    return "plain pair" if run.name == PLAIN else run.name


def _row(run: CheckedRun) -> tuple[str, ...]:
    outcome = run.outcome.replace("_", " ")
    if run.breaks_bits and run.outcome == "not_comparable":
        outcome = "diverged"  # it was changed on purpose, so that nothing is excused by it
    verdict = run.verdict
    first = "-" if verdict is None or verdict.first_divergence is None else _place(verdict.first_divergence)
    cause = "-" if verdict is None or verdict.cause is None else verdict.cause
    return (run.name, run.change or ("-" if run.outcome == "not_run" else "nothing"), outcome, first, cause)


def _place(divergence: Divergence) -> str:
    rank = f"rank {divergence.rank}, " if divergence.rank else ""
    where = f" in {divergence.module}" if divergence.module and divergence.op else ""
    return f"{rank}step {divergence.step}, {divergence.phase}: {divergence.name or divergence.op}{where}"


def _why(run: CheckedRun) -> str:
    """Return why a run led to nothing, and what to do."""
    elsewhere = " It may need the folder it is started in: give it absolute paths." if run.name == "cwd" else ""
    if run.problem == "killed":
        return f"the process was killed by {_signal(run)}.{_agreed(run)}"
    if run.problem == "ended":
        expected = f" {EXPECTED}" if run.name == RECORDING else ""
        how = "from elsewhere" if run.name == "cwd" else "by itself"
        if run.verdict is not None:
            return f"the script failed after the training, with status {run.status}: see what it printed.{_agreed(run)}"
        return (
            f"the script failed {how}, with status {run.status}, and there is no verdict: see what it printed."
            f"{elsewhere}{expected}"
        )
    if run.problem == "nothing recorded":
        return f"the script ended well, and no DeterminismCallback recorded anything. {EXPECTED}"
    if run.problem == "incomplete":
        return f"the script ended well, and its recording is incomplete: {run.detail}"
    if run.problem == "no verdict":
        return f"the script ended well, and no DeterminismCallback verified anything.{elsewhere}"
    if run.problem == "not varied":
        return f"it could not be varied: {run.detail}."
    return run.detail


def _agreed(run: CheckedRun) -> str:
    return "" if run.verdict is None else " What was compared before agrees."


def _signal(run: CheckedRun) -> str:
    assert run.status is not None, "it was started"
    try:
        return signal.Signals(-run.status).name
    except ValueError:
        return f"signal {-run.status}"


def _hints(report: CheckReport) -> list[str]:
    hints = []
    plain = next((run for run in report.runs if run.name == PLAIN), None)
    if any(run.outcome == "not_run" for run in report.runs):
        hints.append(
            "What is to be varied was not run, since nothing can be told of it before the plain pair agrees; --all "
            "runs it all the same."
        )
    if plain is not None and plain.breaks_bits and report.is_hash_seed_random:
        hints.append(
            "PYTHONHASHSEED is not set, and sets of text have another order in each process; whether that is why, "
            "--vary hash-seed tells."
        )
    for name, value in report.variables.items():
        hints.append(f"All runs had {name}={value}, but for the one in which it was varied.")
    return hints


def _shown(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
