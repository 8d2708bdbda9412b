"""The processes of a check, one after the other."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from det_callbacks.check.command import Command, override, parse_command
from det_callbacks.check.factors import (
    FACTORS,
    THREADS_ENTRY,
    Change,
    Factor,
    fixed_variables,
    is_hash_seed_random,
    make_change,
)
from det_callbacks.check.model import PLAIN, RECORDING, CheckedRun, CheckReport, Outcome, Problem
from det_callbacks.check.process import run_process
from det_callbacks.compare.live import VERDICT_FILE
from det_callbacks.errors import CheckError, ReferenceFormatError, ReferenceNotFoundError
from det_callbacks.trace.store import Run
from det_callbacks.verdict import Verdict

FOLDER = "determinism-check"
REFERENCE = "reference"
REPORT_FILE = "check.json"

_OUTCOMES: Mapping[str, Outcome] = {"match": "match", "diverged": "diverged", "not_comparable": "not_comparable"}


def check_script(
    words: Sequence[str],
    *,
    to: str | Path | None = None,
    vary: Sequence[Factor] = (),
    go_on: bool = False,
    announce: Callable[[CheckedRun], object] = lambda run: None,
    output: int | None = None,
) -> CheckReport:
    """Run a Hydra application twice in fresh processes, the second verified against the first, bit for bit.

    The script takes the presets of ``pkg://det_callbacks.conf``: it is started as given, with ``+determinism=record``
    and then ``+determinism=verify`` added. That takes the time of so many trainings, less where one differs.

    Args:
        words: program and arguments, such as ``["python", "train.py", "model.lr=0.1"]``; no shell reads them.
        to: folder for the runs; it must not exist, or be empty. None is a new one below ``determinism-check``.
        vary: what is changed, one at a time, in a further process each: "workers", "threads", "hash-seed", "cwd",
            "locale".
        go_on: vary it also where the plain pair is no match.
        announce: called before each process is started, and for what cannot be.
        output: file descriptor for the processes' standard output; None for that of this one.

    Returns:
        What every process came to; also in ``check.json`` in the folder.

    Raises:
        CheckError: the script is not there, or the arguments are not what a check can do. Nothing was run.
        KeyboardInterrupt: the process under way was ended, too.
    """
    if unknown := [factor for factor in vary if factor not in FACTORS]:
        raise CheckError(f"There is no {unknown[0]!r} to vary; there are {', '.join(FACTORS)}.")
    folder = Path.cwd()
    factors = tuple(dict.fromkeys(vary))
    command = parse_command(words, folder)
    fixed = fixed_variables(factors, os.environ)
    check = _Check(
        command=command,
        folder=folder,
        home=_make_home(to, folder),
        variables={**os.environ, **fixed},
        announce=announce,
        output=output,
    )
    runs = check.run(factors, go_on=go_on)
    report = CheckReport(
        command=tuple(words),
        folder=check.home,
        runs=tuple(runs),
        variables=fixed,
        is_hash_seed_random=is_hash_seed_random({**os.environ, **fixed}),
    )
    temporary = check.home / f"{REPORT_FILE}.tmp"
    temporary.write_text(json.dumps(report.to_dict(), indent=1), encoding="utf-8")
    temporary.replace(check.home / REPORT_FILE)
    return report


class _Check:
    """The processes of one check."""

    def __init__(
        self,
        *,
        command: Command,
        folder: Path,
        home: Path,
        variables: Mapping[str, str],
        announce: Callable[[CheckedRun], object],
        output: int | None,
    ) -> None:
        self.home = home
        self._command = command
        self._folder = folder
        self._variables = variables
        self._announce = announce
        self._output = output

    def run(self, factors: Sequence[Factor], *, go_on: bool) -> list[CheckedRun]:
        recorded, run = self._record()
        if run is None:
            return [recorded]
        plain = self._verify(PLAIN, Change(text=""))
        runs = [recorded, plain]
        for factor in factors:
            if plain.outcome != "match" and not go_on:
                runs.append(CheckedRun(name=factor, folder=self._folder, outcome="not_run", problem="plain pair"))
                continue
            try:
                change = make_change(
                    factor,
                    command=self._command,
                    run=run,
                    variables=self._variables,
                    folder=self._folder,
                    home=self.home,
                )
            except (CheckError, ReferenceFormatError) as error:
                runs.append(_failed(factor, self._folder, "not varied", str(error)))
                self._announce(runs[-1])
                continue
            varied = self._verify(factor, change)
            # beside a pair that differs by itself, nothing can be told of what was changed
            runs.append(varied if plain.outcome == "match" else replace(varied, breaks_bits=False))
        return runs

    def _record(self) -> tuple[CheckedRun, Run | None]:
        path = self.home / REFERENCE
        words = (*self._command.words, "+determinism=record", override("determinism.reference", path))
        begun = CheckedRun(name=RECORDING, command=words, folder=self._folder, outcome="recorded")
        done = self._start(begun, self._variables)
        if done.outcome == "failed":
            return done, None
        try:
            run = Run.open(path)
        except ReferenceNotFoundError:
            return replace(done, outcome="failed", problem="nothing recorded"), None
        except ReferenceFormatError as error:
            return replace(done, outcome="failed", problem="unreadable", detail=str(error)), None
        if not run.is_complete:
            return replace(done, outcome="failed", problem="incomplete", detail=run.incomplete_reason or ""), None
        return done, run

    def _verify(self, name: str, change: Change) -> CheckedRun:
        current = self.home / name
        words = (
            *self._command.words,
            "+determinism=verify",
            override("determinism.reference", self.home / REFERENCE),
            override("determinism.current", current),
            *change.overrides,
        )
        begun = CheckedRun(
            name=name,
            change=change.text,
            command=words,
            folder=change.folder or self._folder,
            outcome="match",
            detail=change.remark,
        )
        done = self._start(begun, {**self._variables, **change.variables})
        try:
            verdict = _read_verdict(current / VERDICT_FILE)
        except ReferenceFormatError as error:
            return replace(done, outcome="failed", problem="unreadable", detail=str(error))
        if verdict is None:
            return done if done.outcome == "failed" else replace(done, outcome="failed", problem="no verdict")
        verdict = replace(
            verdict,
            reference=_shown(self.home / REFERENCE, self._folder),
            current=_shown(current, self._folder),
        )
        done = replace(done, verdict=verdict)
        if verdict.verdict == "match" and done.outcome == "failed":
            return done  # the training agrees, and the script failed after it
        is_changed = not change.entry or change.entry in {entry.name for entry in verdict.environment}
        if verdict.verdict == "match" and not is_changed:
            detail = f"{change.entry} was the same after all: the script sets it by itself"
            return replace(done, outcome="failed", problem="not varied", detail=detail)
        return replace(done, outcome=_OUTCOMES[verdict.verdict], breaks_bits=_breaks_bits(verdict, change), problem="")

    def _start(self, run: CheckedRun, variables: Mapping[str, str]) -> CheckedRun:
        """Run a process to its end; "failed" unless its status is 0."""
        self._announce(run)
        try:
            status = run_process(run.command, folder=run.folder, variables=variables, output=self._output)
        except OSError as error:
            raise CheckError(f"{run.command[0]} cannot be started: {error}") from error
        if not status:
            return replace(run, status=status)
        return replace(run, status=status, outcome="failed", problem="killed" if status < 0 else "ended")


def _breaks_bits(verdict: Verdict, change: Change) -> bool:
    """Return whether other bits came out, and what was changed is all that may have changed them.

    A number of threads is a fact of the machine, which excuses other bits by the rules of a verdict; here it is what
    was asked about.
    """
    if verdict.verdict != "not_comparable":
        return verdict.verdict == "diverged"
    excuses = {entry.name for entry in verdict.environment if entry.is_machine and entry.changes_bits}
    return change.entry == THREADS_ENTRY and excuses == {THREADS_ENTRY} and verdict.first_divergence is not None


def _read_verdict(path: Path) -> Verdict | None:
    """Return the verdict that a verification wrote; None where there is none."""
    try:
        return Verdict.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except ValueError as error:  # no JSON, no text, or no verdict
        raise ReferenceFormatError(f"{path} cannot be read: {error}", str(path)) from error


def _failed(name: str, folder: Path, problem: Problem, detail: str) -> CheckedRun:
    return CheckedRun(name=name, folder=folder, outcome="failed", problem=problem, detail=detail)


def _shown(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def _make_home(to: str | Path | None, folder: Path) -> Path:
    """Make the folder of a check: what is in it is kept, and git does not look at it."""
    if to is not None:
        home = Path(os.path.abspath(folder / to))  # links stay as they were given
        if home.exists() and (not home.is_dir() or any(home.iterdir())):
            raise CheckError(f"{home} is there already, and is not an empty folder; nothing was run. Name another one.")
        home.mkdir(parents=True, exist_ok=True)
    else:
        home = _new_folder(folder / FOLDER, datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
    (home / ".gitignore").write_text("*\n", encoding="utf-8")
    return home


def _new_folder(parent: Path, name: str) -> Path:
    number = 0
    while True:
        home = parent / f"{name}-{number}"
        try:
            home.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return home
