"""A script recorded, verified, or both in fresh processes, and again with one thing changed that must not matter."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal

from det_callbacks.compare.evidence import read_window
from det_callbacks.compare.record import VERDICT_FILE
from det_callbacks.errors import CheckError, ReferenceFormatError
from det_callbacks.runs.files import MANIFEST
from det_callbacks.runs.store import Run
from det_callbacks.variables import LAUNCH, NUM_WORKERS
from det_callbacks.verdict import Verdict

RECORDING = "recording"
PLAIN = "plain"
GRACE_SECONDS = 20.0
"""For an interrupted script to end by itself; a second Ctrl-C ends the wait."""

_HASH_SEED = "PYTHONHASHSEED"
_THREADS_ENTRY = "torch.num_threads"
_NUM_WORKERS = "num_workers of "
_IGNORES_VARIABLES = re.compile(r"-[A-Za-z]*[EI][A-Za-z]*")
_STARTUP = Path(__file__).with_name("startup")
_NOTHING = (
    "the script ended well, and nothing was {}: no Trainer had a fit, or each had a DeterminismCallback of the "
    "script's own, or the Python that trains has no det_callbacks installed"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """One process and what it came to.

    Attributes:
        name: of a check: "recording", "plain" (the verification with nothing changed) or the factor.
        change: what it has different ("2 instead of 0").
        outcome: "failed" also where the script failed by itself after what was compared agreed.
        reason: why it failed.
        verdict: of a verification, where it came to one.
        output: file with what it printed; None where that went to the terminal.
    """

    name: str
    change: str = ""
    outcome: Literal["recorded", "match", "diverged", "not_comparable", "failed"]
    reason: str = ""
    verdict: Verdict | None = None
    output: Path | None = None

    @property
    def exit_code(self) -> int:
        """0 recorded or match, 1 diverged, 2 failed, 3 not comparable."""
        return {"diverged": 1, "failed": 2, "not_comparable": 3}.get(self.outcome, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The runs of a check in their folder; factors are ``not_run`` where the plain verification is no match."""

    folder: Path
    runs: tuple[CheckedRun, ...]
    not_run: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """1 where a run diverged, else 2 where one failed, else 3 where one is not comparable, else 0."""
        codes = {run.exit_code for run in self.runs}
        return next((code for code in (1, 2, 3) if code in codes), 0 if len(self.runs) > 1 else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """What a process has different: in words, its variables, its settings and the entry of run.json that shows it."""

    name: str = PLAIN
    text: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    entry: str = ""


_NO_CHANGE = _Change()


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A program that trains, started as it is; Lightning gives its Trainers a DeterminismCallback.

    Attributes:
        words: program and arguments, such as ``["python", "train.py", "model.lr=0.1"]``; no shell reads them.
        arguments: of ``DeterminismCallback``, but for the mode and the folders.
        settings: what is set before the script's first line: "seed", and "deterministic" for the defaults of
            ``DeterminismSettings``; nothing where both are missing.
        variables: the environment.
        announce: called with a title and the words of each process before it is started.

    Raises:
        CheckError: no words, or (of the methods) the program cannot be started.
    """

    words: Sequence[str]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    announce: Callable[[str, Sequence[str]], object] = lambda title, words: None

    def __post_init__(self) -> None:
        if not self.words:
            raise CheckError("No command was given. Name the script after --: det-callbacks check -- python train.py")

    def record(self, run: Path, *, overwrite: bool = False, output: Path | None = None) -> CheckedRun:
        """Run the script, and record it into a folder; what it prints goes to ``output``, or is printed."""
        asked = {"mode": "record", "reference": str(run), "overwrite": overwrite}
        before = _manifest(run)
        reason = self._start("record", asked, _NO_CHANGE, output)
        if not reason:
            reason = _NOTHING.format("recorded") if _manifest(run) == before else _unfinished(run)
        return CheckedRun(name=RECORDING, outcome="failed" if reason else "recorded", reason=reason, output=output)

    def verify(
        self, reference: Path, current: Path, *, change: _Change = _NO_CHANGE, output: Path | None = None
    ) -> CheckedRun:
        """Run the script with a change, and verify it against a run, into a folder that is empty or not there."""
        asked = {"mode": "verify", "reference": str(reference), "current": str(current)}
        title = "verify" if not change.text else f"verify, {change.name}, {change.text}"
        reason = self._start(title, asked, change, output)
        done = CheckedRun(name=change.name, change=change.text, outcome="failed", reason=reason, output=output)
        try:
            verdict = Verdict.from_dict(json.loads((current / VERDICT_FILE).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return replace(done, reason=reason or _NOTHING.format("verified"))
        except ValueError as error:  # no JSON, no text, or no verdict
            return replace(done, reason=f"{current / VERDICT_FILE} cannot be read: {error}")
        done, outcome = replace(done, verdict=verdict), verdict.verdict
        if outcome == "match" and reason:
            return replace(done, reason=f"{reason}. What was compared before agrees")
        if outcome == "match" and change.entry and change.entry not in {it.name for it in verdict.environment}:
            return replace(done, reason=f"it could not be varied: the script sets {change.entry} by itself")
        return replace(done, outcome=outcome, reason="")

    def _start(self, title: str, asked: Mapping[str, Any], change: _Change, output: Path | None) -> str:
        """Run a process to its end; return what was wrong with that, "" for nothing."""
        self.announce(title, self.words)
        settings = {**self.settings, **change.settings}
        variables = {**self.variables, **change.variables}
        if settings:
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_STARTUP), variables.get("PYTHONPATH"))))
        with contextlib.ExitStack() as files:
            claim = Path(files.enter_context(tempfile.TemporaryDirectory(prefix="det_callbacks-")), "claim")
            launch = {"arguments": {**self.arguments, **asked}, "settings": settings, "claim": str(claim)}
            variables[LAUNCH] = json.dumps(launch)
            try:
                file = None if output is None else files.enter_context(output.open("wb"))
                status = run_process(self.words, variables=variables, output=file)
            except OSError as error:
                raise CheckError(f"{self.words[0]} cannot be started: {error}") from error
            if claim.exists() and (text := claim.read_text(encoding="utf-8")):
                return text
        if status < 0:
            return f"the process was killed by signal {-status} ({signal.strsignal(-status)})"
        return f"the script failed with status {status}: see what it printed" if status else ""


def _manifest(run: Path) -> bytes:
    """Return what a recording always changes; nothing where there is no run."""
    path = run / MANIFEST
    return path.read_bytes() if path.is_file() else b""


def _unfinished(path: Path) -> str:
    """Return why a recording is none that can be used; "" where it is one."""
    try:
        run = Run.open(path)
    except ReferenceFormatError as error:
        return str(error)
    if run.is_complete:
        return ""
    return f"the script ended well, and its recording is incomplete: {run.incomplete_reason}"


def check_script(script: Script, *, to: str | Path | None = None, vary: Sequence[str] = ()) -> CheckReport:
    """Run a script twice in fresh processes, the second verified against the first, bit for bit.

    That takes the time of so many trainings, less where one differs. What the scripts print is kept beside the runs.

    Args:
        script: the script.
        to: folder for the runs; it must not exist, or be empty. None is a new one below ``determinism-check``.
        vary: what is changed, one at a time, in a further process each, where the plain verification is a match:
            workers, threads, hash-seed.

    Raises:
        CheckError: the arguments are not what a check can do, or the program cannot be started.
    """
    if unknown := [factor for factor in vary if factor not in _CHANGES]:
        raise CheckError(f"There is no {unknown[0]!r} to vary; there are {', '.join(_CHANGES)}.")
    factors = tuple(factor for factor in _CHANGES if factor in vary)
    home = new_folder(to, "determinism-check")
    if "hash-seed" in factors and script.variables.get(_HASH_SEED, "") in ("", "random"):
        # else each process has another one, also two that are to be the same
        script = replace(script, variables={**script.variables, _HASH_SEED: "0"})
    reference = home / "reference"
    runs = [script.record(reference, output=home / f"{RECORDING}.txt")]
    if runs[0].outcome == "recorded":
        runs.append(script.verify(reference, home / PLAIN, output=home / f"{PLAIN}.txt"))
        if runs[-1].outcome == "match":
            runs += [_vary(script, factor, home, reference) for factor in factors]
            factors = ()
    return CheckReport(folder=home, runs=tuple(runs), not_run=factors)


def new_folder(to: str | Path | None, kind: str) -> Path:
    """Make a folder for runs that git does not see: ``to``, or one named by the time below ``kind``.

    Raises:
        CheckError: it is there, and is not an empty folder.
    """
    home = Path.cwd() / (to or f"{kind}/{datetime.now():%Y-%m-%d_%H-%M-%S-%f}")
    if home.exists() and (not home.is_dir() or any(home.iterdir())):
        raise CheckError(f"{home} is there already, and is not an empty folder; nothing was run. Name another one.")
    home.mkdir(parents=True, exist_ok=True)
    (home / ".gitignore").write_text("*\n", encoding="utf-8")
    return home


def _vary(script: Script, factor: str, home: Path, reference: Path) -> CheckedRun:
    try:
        change = _CHANGES[factor](script, Run.open(reference))
    except (CheckError, ReferenceFormatError) as error:
        return CheckedRun(name=factor, outcome="failed", reason=f"it could not be varied: {error}")
    return script.verify(reference, home / factor, change=change, output=home / f"{factor}.txt")


def _workers(script: Script, run: Run) -> _Change:
    steps = run.rank(0).steps(0)
    window = read_window(run, 0, 0, int(steps[0])) if len(steps) else None
    settings = {} if window is None else window.settings
    known = {int(text) for name, text in settings.items() if name.startswith(_NUM_WORKERS) and text.isdecimal()}
    if not known:
        raise CheckError("the training has no torch DataLoader, whose workers could be others")
    number = next(number for number in (0, 2, *range(1, len(known) + 2)) if number not in known)
    text = f"{number} instead of {' and '.join(map(str, sorted(known)))}"
    return _Change(name="workers", text=text, variables={NUM_WORKERS: str(number)})


def _threads(script: Script, run: Run) -> _Change:
    entry = run.manifest.environment.get(_THREADS_ENTRY)
    if entry is None or not isinstance(entry.value, int):
        raise CheckError("the reference does not say how many threads computed it")
    number = 2 if entry.value == 1 else 1
    text = f"{number} instead of {entry.value}"
    return _Change(
        name="threads",
        text=text,
        variables={"OMP_NUM_THREADS": str(number)},  # what NumPy's libraries ask
        settings={"num_threads": number},
        entry=_THREADS_ENTRY,
    )


def _hash_seed(script: Script, run: Run) -> _Change:
    if any(map(_IGNORES_VARIABLES.fullmatch, script.words)):
        raise CheckError("Python was asked to ignore its environment variables (-E or -I)")
    before = script.variables[_HASH_SEED]
    after = str((int(before) + 1) % 2**32)
    text = f"{_HASH_SEED} {after} instead of {before}"
    return _Change(name="hash-seed", text=text, variables={_HASH_SEED: after}, entry=f"env.{_HASH_SEED}")


_CHANGES: Mapping[str, Callable[[Script, Run], _Change]] = {
    "workers": _workers,
    "threads": _threads,
    "hash-seed": _hash_seed,
}
"""What can be varied: each is changed by a function of the script and its recording."""


def run_process(words: Sequence[str], *, variables: Mapping[str, str], output: IO[bytes] | None = None) -> int:
    """Run a program to its end and return its status, negative for the signal that ended it.

    It has a session of its own, so that what it started ends with it. Where this process is interrupted, asked to end
    or hung up on, the program is interrupted, and killed when it does not end. What it prints, errors included, goes to
    ``output``, and to where this process prints where that is None.
    """
    both: dict[str, Any] = {} if output is None else {"stdout": output, "stderr": subprocess.STDOUT}
    with _signals_as_exceptions():
        process = subprocess.Popen(words, env=dict(variables), stdin=subprocess.DEVNULL, start_new_session=True, **both)
        try:
            return process.wait()
        except BaseException:
            _signal_group(process, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            raise
        finally:
            if process.returncode != 0:
                _signal_group(process, signal.SIGKILL)
                process.wait()


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Let SIGTERM and SIGHUP, where nobody ignores them (nohup), end this process as an exception does."""
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, frame: sys.exit(128 + number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal_group(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left, or (macOS) only zombies
        os.killpg(process.pid, number)
