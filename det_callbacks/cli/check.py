"""``det-callbacks record``, ``verify`` and ``check``: run a script in fresh processes."""

import argparse
import contextlib
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal

from det_callbacks.cli.parser import SCRIPT_OPTIONS
from det_callbacks.compare.evidence import read_window
from det_callbacks.compare.numerics import compare_numerics
from det_callbacks.compare.record import REPORT_FILE, VERDICT_FILE
from det_callbacks.compare.rounding import write_rounding
from det_callbacks.environment.variables import (
    FILL_MEMORY,
    LAST_STEP,
    LAUNCH,
    NUM_WORKERS,
    PERTURB,
    REFUSAL,
    SEEN,
)
from det_callbacks.errors import CheckError, ReferenceFormatError, RunExistsError
from det_callbacks.report.console import (
    STYLES,
    Section,
    Table,
    encodable,
    make_console,
    print_line,
    print_report,
)
from det_callbacks.report.numerics import rounding_sentence
from det_callbacks.report.verdict import verdict_report
from det_callbacks.runs.files import (
    MANIFEST,
    READ_ERRORS,
    REPLACEMENT,
    list_folder,
    make_folder,
    read_file,
    writing,
)
from det_callbacks.runs.manifest import note_failure
from det_callbacks.runs.replacement import loses_steps, replace_run
from det_callbacks.runs.selection import Selection, as_patterns
from det_callbacks.runs.store import Run, remove_run, remove_verification
from det_callbacks.verdict import EXIT_CODES, Verdict

RECORDING, PLAIN, PERTURBED = "recording", "plain", "perturbed"
INTERRUPTED, RESUMED = "interrupted", "resumed"
FACTORS = ("workers", "threads", "hash-seed", "memory")  # in this order
GRACE_SECONDS = 20.0  # time for an interrupted script to end

_HASH_SEED = "PYTHONHASHSEED"
_FILL = "MALLOC_PERTURB_"
_WITHOUT_CACHE = "glibc.malloc.tcache_count=0"  # glibc does not fill small cached blocks
_STARTUP = Path(__file__).parents[1] / "integrations" / "startup"
_OF_SCRIPT = {
    "match": "the script is reproducible, bit for bit",
    "diverged": "the script is not reproducible",
    "not_comparable": "the two runs differ, and so do their machines",
    "failed": "the script could not be checked",
}
_OF_RESUME = {
    "match": "the resume is exact, bit for bit",
    "diverged": "the resume is not exact",
    "not_comparable": "the resumed run differs, and so does its machine",
    "failed": "the resume could not be checked",
}
_UNSEEN = (
    "no process told what it did with torch: the Python that trains has no det_callbacks "
    "installed, or ignores PYTHONPATH (its flags -E and -I), or its processes were killed"
)
_ANOTHER_WAY = (
    "If the script updates parameters without an optimizer of torch.optim, put its loop into a "
    "TrainingRun (docs/how-to/plain-loop.md)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    name: str  # or the varied factor
    change: str = "nothing"  # "2 instead of 0"
    outcome: Literal["recorded", "match", "diverged", "not_comparable", "failed", "not_run"]
    reason: str = ""  # reason of a failure
    verdict: Verdict | None = None
    output: Path | None = None  # file of its output, if not the terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    words: Sequence[str]
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of DeterminismCallback
    settings: Mapping[str, Any] = field(default_factory=dict)  # "seed", "deterministic"
    variables: Mapping[str, str] = field(default_factory=dict)
    name: str = PLAIN
    change: str = "nothing"
    entry: str = ""  # entry of the environment that must differ if varied

    def record(
        self, run: Path, *, overwrite: bool = False, output: Path | None = None
    ) -> CheckedRun:
        places = run, run / REPLACEMENT
        before = [*map(_manifest, places)]
        title = "record" if self.name == PLAIN else f"record, {self.name}, {self.change}"
        try:
            reason, nothing = self._start(
                title, output, mode="record", reference=str(run), overwrite=overwrite
            )
        except CheckError:
            if not before[0] and _manifest(run):  # of a part of what the command trained
                remove_run(run)
            raise
        new = [
            place
            for place, was in zip(places, before, strict=True)
            if _manifest(place) not in (b"", was)
        ]
        if reason and new:
            note_failure(new[-1])
        elif not reason and (not new or (new[-1] != run and loses_steps(run))):
            reason = nothing
        elif not reason and (incomplete := Run.open(new[-1]).incomplete_reason):
            reason = f"The script succeeded, but its recording is incomplete: {incomplete}"
        elif not reason and new[-1] != run:
            replace_run(run)  # now, since only here is the script's status known
        name = RECORDING if self.name == PLAIN else self.name
        return CheckedRun(
            name=name, outcome="failed" if reason else "recorded", reason=reason, output=output
        )

    def verify(self, reference: Path, current: Path, output: Path | None = None) -> CheckedRun:
        title = "verify" if self.name == PLAIN else f"verify, {self.name}, {self.change}"
        try:
            reason, nothing = self._start(
                title, output, mode="verify", reference=str(reference), current=str(current)
            )
        except CheckError:
            remove_verification(current)  # a verdict on a part of what the command trained
            raise
        done = CheckedRun(
            name=self.name, change=self.change, outcome="failed", reason=reason, output=output
        )
        try:
            verdict = Verdict.from_dict(json.loads(read_file(current / VERDICT_FILE)))
        except FileNotFoundError:
            if _manifest(current):
                nothing = (
                    "The script succeeded, but its verification is incomplete: the process did not "
                    "end as it should, so there is no verdict"
                )
            return replace(done, reason=reason or nothing)
        except READ_ERRORS as error:  # not JSON, or not a verdict
            return replace(done, reason=f"{current / VERDICT_FILE} cannot be read: {error}")
        done = replace(done, verdict=verdict)
        if verdict.verdict == "match" and reason:
            if _manifest(current) and note_failure(current):
                (current / VERDICT_FILE).unlink(missing_ok=True)
            return replace(done, reason=f"{reason}. The steps compared before that match")
        if verdict.verdict == "match" and self.entry not in {
            "",
            *(one.name for one in verdict.environment),
        }:
            return replace(
                done, reason=f"The script sets {self.entry} itself, so --vary had no effect"
            )
        return replace(done, outcome=verdict.verdict, reason="")

    def _start(self, title: str, output: Path | None, **arguments: Any) -> tuple[str, str]:
        """Run a process; return its failure, or "", and the message for a
        process that left no files.
        """
        print_line(make_console(), f"det-callbacks: {title}: {shlex.join(self.words)}", "bold")
        sys.stdout.flush()  # before the process writes there
        variables = {**os.environ, **self.variables}
        variables["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(_STARTUP), variables.get("PYTHONPATH")))
        )
        with contextlib.ExitStack() as files:
            with writing(
                os.environ.get("TMPDIR") or "/tmp", instead="set TMPDIR to a writable folder"
            ):
                claim = Path(
                    files.enter_context(tempfile.TemporaryDirectory(prefix="det_callbacks-")),
                    "claim",
                )
            of_callback = {**self.arguments, **arguments}
            launch = {"arguments": of_callback, "settings": self.settings, "claim": str(claim)}
            variables[LAUNCH] = json.dumps(launch)
            file = None
            if output is not None:
                with writing(output, instead="pass another folder (--to)"):
                    file = files.enter_context(output.open("wb"))
            try:
                status = run_process(self.words, variables=variables, output=file)
            except OSError as error:
                raise CheckError(
                    f"{self.words[0]} cannot be started: {error}{_how_to_start(self.words)}"
                ) from error
            if claim.exists() and (text := claim.read_text(encoding="utf-8")):
                raise CheckError(
                    f"{text}, so the run would lack a part of the training, and was not kept. "
                    "Start det-callbacks for each of them, or train in one process."
                )
            done = "recorded" if arguments["mode"] == "record" else "verified"
            nothing = (
                f"The script succeeded, but nothing was {done}: {_seen(claim.parent)}. "
                f"{_ANOTHER_WAY}"
            )
            refusal = claim.with_name(REFUSAL)
            if status > 0 and refusal.exists():
                return refusal.read_text(encoding="utf-8"), nothing
        if status < 0:
            return (
                f"The process was killed by signal {-status} ({signal.strsignal(-status)})",
                nothing,
            )
        failed = f"The script exited with status {status}; its output shows the error"
        return failed if status else "", nothing


def _seen(folder: Path) -> str:
    """Return what the processes of the script did; those without torch count only
    if none has it.
    """
    seen = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"{SEEN}*"))
    ]
    of_torch = [text for is_of_torch, text in seen if is_of_torch]
    return "; ".join(dict.fromkeys(of_torch or [text for _, text in seen])) or _UNSEEN


def _how_to_start(words: Sequence[str]) -> str:
    return (
        f". Start it with Python: -- python {shlex.join(words)}" if words[0].endswith(".py") else ""
    )


def _manifest(run: Path) -> bytes:
    path = run / MANIFEST
    return read_file(path) if os.path.isfile(path) else b""


def check_script(script: Script, home: Path, vary: Sequence[str]) -> list[CheckedRun]:
    script = with_hash_seed(script, vary)
    reference = home / "reference"
    runs = [script.record(reference, output=home / f"{RECORDING}.txt")]
    if runs[0].outcome == "recorded":
        runs.append(script.verify(reference, home / PLAIN, home / f"{PLAIN}.txt"))
    is_repeated = runs[-1].outcome == "match"
    for name in (factor for factor in FACTORS if factor in vary):
        done = CheckedRun(name=name, change="-", outcome="not_run")
        if is_repeated:
            done = varied(script, name, Run.open(reference)).verify(
                reference, home / name, home / f"{name}.txt"
            )
        runs.append(done)
    return runs


def with_hash_seed(script: Script, vary: Sequence[str]) -> Script:
    """Return the script with a fixed hash seed if that varies;
    otherwise each process has a different one.
    """
    is_unset = os.environ.get(_HASH_SEED, "") in ("", "random")
    return (
        replace(script, variables={_HASH_SEED: "0"}) if "hash-seed" in vary and is_unset else script
    )


def varied(script: Script, name: str, run: Run) -> Script:
    """Return the script with one factor changed from its value in a recorded run."""
    variables, settings, entry = dict(script.variables), dict(script.settings), ""
    if name == "workers":
        steps = run.rank(0).steps(0)
        window = read_window(run, 0, 0, int(steps[0])) if len(steps) else None
        noted = {} if window is None else window.settings
        before = sorted({text for (_, setting), text in noted.items() if setting == "num_workers"})
        # a script without a torch DataLoader fails
        variables[NUM_WORKERS] = now = "0" if before and before != ["0"] else "2"
        change = f"{now} instead of {' and '.join(before) or 'none'}"
    elif name == "threads":
        entry = "torch.num_threads"
        threads = run.manifest.environment.get(entry)
        had = None if threads is None else threads.value
        settings["num_threads"] = number = 2 if had == 1 else 1
        variables["OMP_NUM_THREADS"] = str(number)  # for NumPy's libraries
        change = f"{number} instead of {had}"
    elif name == "memory":
        entry = f"env.{_FILL}"
        given = os.environ.get(_FILL, "")
        # glibc fills with the complement: 0xa5 or 0x3c
        variables[_FILL] = now = "90" if given != "90" else "195"
        variables["GLIBC_TUNABLES"] = ":".join(
            filter(None, (os.environ.get("GLIBC_TUNABLES"), _WITHOUT_CACHE))
        )
        variables[FILL_MEMORY] = str(255 - int(now))
        change = f"filled with {255 - int(now):#x} when allocated"
    else:
        entry, seed = f"env.{_HASH_SEED}", variables.get(_HASH_SEED, os.environ.get(_HASH_SEED, ""))
        variables[_HASH_SEED] = other = "1" if seed == "0" else "0"
        change = f"{_HASH_SEED} {other} instead of {seed}"
    return replace(
        script, variables=variables, settings=settings, name=name, change=change, entry=entry
    )


def record(options: argparse.Namespace) -> int:
    script, run = script_of(options), Path(options.run_folder).absolute()
    if not options.overwrite:
        _require_no_whole_run(run)
    done = script.record(run, overwrite=options.overwrite)
    facts = f"; the run: {run}"
    if done.reason:
        waiting = run / REPLACEMENT
        facts = (
            f"; {run} is unchanged, and the new run is in {waiting}" if _manifest(waiting) else ""
        )
    return _end("record", [done], facts)


def _require_no_whole_run(run: Path) -> None:
    if not _manifest(run):
        return
    try:
        is_whole = Run.open(run, check_steps=False).is_complete
    except ReferenceFormatError:
        is_whole = True  # there is nothing to continue
    if is_whole:
        raise RunExistsError(
            f"{run} already holds a run. Nothing was run or changed. Record to another folder, "
            "replace the run with --overwrite, or verify against it with det-callbacks verify. To "
            "continue it from a checkpoint, add a DeterminismCallback or a TrainingRun to the "
            "script.",
            str(run),
        )


def verify(options: argparse.Namespace) -> int:
    script, reference = script_of(options), Path(options.run_folder).absolute()
    Run.open(reference)  # fail before training
    current = new_folder(options.current, "determinism-verify", option="--current")
    done = script.verify(reference, current / "run")
    if done.verdict is not None:
        print_report([Section(), *verdict_report(done.verdict), Section()])
    report = current / "run" / REPORT_FILE
    return _end(
        "verify",
        [done],
        f"; kept in {current}" + (f"; report: {report}" if report.exists() else ""),
    )


def check(options: argparse.Namespace) -> int:
    """Run a script twice; print the verdicts other than a match,
    and a table of the varied factors.
    """
    script, vary = script_of(options), varied_factors(options)
    if options.resume is not None or options.until is not None:
        return _check_resume(script, options)
    if options.numerics:
        return _measure(script, options, vary)
    home = new_folder(options.to, "determinism-check", option="--to")
    runs = check_script(script, home, vary)
    is_varied, sections = len(runs) > 2, [Section()]
    print_outputs(runs, is_verbose=options.verbose)
    for run in runs:
        if run.verdict is not None and (
            run.outcome in ("diverged", "not_comparable") or not is_varied
        ):
            sections += [Section(title=f"{run.name}: {run.change}")] * is_varied + verdict_report(
                run.verdict
            )
    if is_varied:
        columns = ("run", "changed", "outcome", "first divergence", "cause")
        sections.append(Section(table=Table(columns=columns, rows=[*map(_row, runs[1:])])))
    if any(run.verdict is not None and run.verdict.record_next is not None for run in runs):
        varied_words = ["--vary", options.vary] if options.vary else []
        command = shlex.join(["det-callbacks", "find", *varied_words, "--", *options.words])
        sections.append(
            Section(
                lines=[
                    "To find the op, by how much it differs, and whether it does so alone: "
                    f"{command}"
                ]
            )
        )
    print_report([*sections, Section()])
    facts = _OF_SCRIPT[{run.name: run.outcome for run in runs}.get(PLAIN, "failed")]
    if (
        facts == _OF_SCRIPT["diverged"]
        and Run.open(home / "reference").manifest.settings.get("seed") is None
    ):
        facts += "; the script sets no seed: add --seed 0"
    if names := [run.name for run in runs[2:] if run.outcome == "diverged"]:
        facts += f"; its results depend on {', '.join(names)}"
    return _end("check", runs, f"; {facts}; kept in {home}")


def _check_resume(script: Script, options: argparse.Namespace) -> int:
    """Record a script, and verify the command that resumes it from a checkpoint,
    or refuse that it resumed.
    """
    words = shlex.split(options.resume or "")
    if not words or options.vary or options.numerics:
        raise CheckError(
            'check --resume "COMMAND" -- PROGRAM needs the command that resumes the program. '
            "--until goes with it, --vary and --numerics do not: run them one after the other."
        )
    home = new_folder(options.to, "determinism-check", option="--to")
    reference = home / "reference"
    runs = [script.record(reference, output=home / f"{RECORDING}.txt")]
    if options.until is not None and not runs[0].reason:
        arguments, variables = (
            {**script.arguments, "steps": "common"},
            {LAST_STEP: str(options.until)},
        )
        again = replace(
            script, name=INTERRUPTED, change=f"after step {options.until}", arguments=arguments
        )
        again = replace(again, variables={**script.variables, **variables})
        runs.append(again.verify(reference, home / INTERRUPTED, home / f"{INTERRUPTED}.txt"))
    if runs[-1].outcome in ("recorded", "match"):
        resumed = replace(script, words=words, name=RESUMED, change="from a checkpoint")
        done = resumed.verify(reference, home / RESUMED, home / f"{RESUMED}.txt")
        if done.verdict is not None and done.verdict.resume is None:
            reason = (
                f"It did not begin with the state that a step of {shlex.join(script.words)} left"
            )
            outcome = "failed" if done.outcome == "match" else done.outcome
            done = replace(
                done, outcome=outcome, reason=f"{reason}, so it resumed from no checkpoint of it"
            )
        runs.append(done)
    print_outputs(runs, is_verbose=options.verbose)
    verdict = runs[-1].verdict
    print_report([Section(), *([] if verdict is None else verdict_report(verdict)), Section()])
    facts = (
        _OF_RESUME[runs[-1].outcome] if runs[-1].name == RESUMED else _OF_SCRIPT[runs[-1].outcome]
    )
    return _end("check", runs, f"; {facts}; kept in {home}")


def varied_factors(options: argparse.Namespace) -> list[str]:
    """Return the factors of ``--vary``; raise ``CheckError`` for one that is unknown
    or cannot be varied here.
    """
    vary: list[str] = options.vary.split(",") if options.vary else []
    if unknown := [factor for factor in vary if factor not in FACTORS]:
        raise CheckError(f"--vary does not know {unknown[0]!r}. Use {', '.join(FACTORS)}.")
    if "memory" in vary and platform.libc_ver()[0] != "glibc":
        raise CheckError(
            "--vary memory needs glibc, which fills allocated memory. Leave memory out of --vary."
        )
    return vary


def _measure(script: Script, options: argparse.Namespace, vary: Sequence[str]) -> int:
    """Record a script twice, once with a changed last bit in its first inputs,
    and keep how much that changes.
    """
    if vary:
        raise CheckError(
            "--vary compares bits, and --numerics measures rounding. Run them one after the other."
        )
    home = new_folder(options.to, "determinism-check", option="--to")
    script = replace(
        script, arguments={"keep_tensors": ["*"], "only_steps": [0], **script.arguments}
    )
    other = replace(
        script, variables={PERTURB: "1"}, name=PERTURBED, change="the last bit of the first inputs"
    )
    runs = [script.record(home / "reference", output=home / f"{RECORDING}.txt")]
    if runs[0].outcome == "recorded":
        runs.append(other.record(home / PERTURBED, output=home / f"{PERTURBED}.txt"))
    print_outputs(runs, is_verbose=options.verbose)
    if runs[-1].outcome == "failed":
        return _end("check", runs, f"; kept in {home}")
    numerics = compare_numerics(Run.open(home / "reference"), Run.open(home / PERTURBED))
    if not numerics.num_differing:
        raise CheckError(
            f"The last bit of the first inputs changed no tensor in {home}, so there is no "
            "rounding to measure."
        )
    write_rounding(home, numerics)
    print_report([Section(), Section(lines=[rounding_sentence(numerics)]), Section()])
    return _end(
        "check",
        runs,
        f"; det-callbacks diff REFERENCE CURRENT --numerics --tolerance {shlex.quote(str(home))}",
    )


def print_outputs(runs: Sequence[CheckedRun], *, is_verbose: bool) -> None:
    for run in runs:
        if run.output is not None and (is_verbose or run.outcome == "failed"):
            print_line(make_console(), f"{run.name} printed:", "bold")
            printed = run.output.read_text(encoding="utf-8", errors="replace")
            sys.stdout.write(encodable(printed, sys.stdout))


def _row(run: CheckedRun) -> tuple[str, ...]:
    place = cause = "-"
    if run.verdict is not None:
        cause = run.verdict.cause or "-"
        if (first := run.verdict.first_divergence) is not None:
            place = f"step {first.step}, {first.phase}: {first.name or first.op or first.kind}"
    return (run.name, run.change, run.outcome.replace("_", " "), place, cause)


def _end(command: str, runs: Sequence[CheckedRun], facts: str) -> int:
    console, status = make_console(), {**EXIT_CODES, "recorded": 0, "not_run": 0, "failed": 2}
    worst = max(reversed(runs), key=lambda run: [0, 3, 2, 1].index(status[run.outcome]))
    for run in runs:
        if run.reason:
            reason = f"{run.reason.rstrip('.')}."
            print_line(console, f"{run.name}: {reason}" if len(runs) > 1 else reason)
    word = f"{worst.outcome.replace('_', ' ')} (exit status {status[worst.outcome]})"
    style = {**STYLES, "failed": "bold red"}.get(worst.outcome, "bold")
    print_line(console, f"det-callbacks {command}: {word}{facts}", style)
    return status[worst.outcome]


def script_of(options: argparse.Namespace) -> Script:
    names = [option.removeprefix("--").replace("-", "_") for option in SCRIPT_OPTIONS]
    given = {name: getattr(options, name) for name in names}
    arguments = {
        name: value for name, value in given.items() if value is not None and value is not False
    }
    of_process = [name for name in ("seed", "deterministic") if name in arguments]
    settings: dict[str, Any] = {name: arguments.pop(name) for name in of_process}
    if "keep" in arguments:
        arguments["keep_tensors"] = arguments.pop("keep")
    for name in ("replay", "keep_tensors"):
        if isinstance(patterns := arguments.get(name), list):
            as_patterns(name, patterns)
    Selection(
        **{
            name: value
            for name, value in arguments.items()
            if name in Selection.__dataclass_fields__
        }
    )
    return Script(words=options.words, arguments=arguments, settings=settings)


def new_folder(to: str | Path | None, kind: str, *, option: str) -> Path:
    """Make a folder for runs that git ignores: ``to``, or one named by the time."""
    home = Path.cwd() / (to or f"{kind}/{datetime.now():%Y-%m-%d_%H-%M-%S-%f}")
    instead = f"nothing was run; pass another folder ({option})"
    if os.path.isdir(home) and list_folder(home, instead=instead):
        raise CheckError(f"{home} exists and is not empty; {instead}.")
    make_folder(home, instead=instead)
    with writing(home, instead=instead):
        (home / ".gitignore").write_text("*\n", encoding="utf-8")
    return home


def run_process(
    words: Sequence[str], *, variables: Mapping[str, str], output: IO[bytes] | None = None
) -> int:
    """Run a program and return its status: negative for the signal that ended it.

    Ctrl-C reaches both processes. SIGTERM is forwarded, so that no training keeps running.
    """
    both: dict[str, Any] = {} if output is None else {"stdout": output, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(words, env=dict(variables), stdin=subprocess.DEVNULL, **both)
    before = signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
    try:
        return process.wait()
    except KeyboardInterrupt:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        raise
    finally:
        process.kill()
        process.wait()
        signal.signal(signal.SIGTERM, before)
