"""A script run twice in fresh processes, and again with one thing changed that must not matter to its bits."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Literal, get_args

from det_callbacks.compare.evidence import RunEvidence
from det_callbacks.compare.record import VERDICT_FILE
from det_callbacks.errors import CheckError, ReferenceFormatError, ReferenceNotFoundError
from det_callbacks.runs.store import Run
from det_callbacks.verdict import Verdict

Factor = Literal["workers", "threads", "hash-seed"]
FACTORS: tuple[Factor, ...] = get_args(Factor)

NUM_WORKERS_VARIABLE = "DET_CALLBACKS_NUM_WORKERS"
"""Environment variable: ``DeterminismCallback`` gives the training's DataLoaders so many workers."""

RECORDING = "recording"
PLAIN = "plain"
GRACE_SECONDS = 20.0
"""For an interrupted script to end by itself; a second Ctrl-C ends the wait."""

_HASH_SEED = "PYTHONHASHSEED"
_THREADS_ENTRY = "torch.num_threads"
_NUM_WORKERS = "num_workers of "
_OURS = re.compile(r"\+{0,2}determinism(\.(mode|reference|current))?=|--multirun$")
_IGNORES_VARIABLES = re.compile(r"-[A-Za-z]*[EI][A-Za-z]*")
_PLAIN_VALUE = re.compile(r"[\w./+-]+", re.ASCII)
_BEFORE_QUOTE = re.compile(r"(\\*)('|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """One process of a check: "recording", "plain" (the verification with nothing changed) or the factor.

    ``change`` is what it has different ("2 instead of 0"), ``reason`` why it failed. Its outcome is "diverged" also
    where the changed number of threads is all that could excuse other bits.
    """

    name: str
    change: str = ""
    outcome: Literal["recorded", "match", "diverged", "not_comparable", "failed"]
    reason: str = ""
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The runs of a check in their folder; factors are ``not_run`` where the plain verification is no match."""

    folder: Path
    runs: tuple[CheckedRun, ...]
    not_run: tuple[Factor, ...]

    @property
    def exit_code(self) -> int:
        """1 where a run diverged, else 2 where one failed, else 3 where one is not comparable, else 0."""
        outcomes = {run.outcome for run in self.runs}
        codes = {"diverged": 1, "failed": 2, "not_comparable": 3, "match": 0}
        return next((code for word, code in codes.items() if word in outcomes), 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """What a process has different: in words, its variables, its overrides and the entry of run.json that shows it."""

    text: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    entry: str = ""


def check_script(
    words: Sequence[str],
    *,
    to: str | Path | None = None,
    vary: Sequence[Factor] = (),
    announce: Callable[[str, Sequence[str]], object] = lambda title, words: None,
) -> CheckReport:
    """Run a Hydra application twice in fresh processes, the second verified against the first, bit for bit.

    It is started as given, with ``+determinism=record`` and then ``+determinism=verify`` of our presets added. That
    takes the time of so many trainings, less where one differs.

    Args:
        words: program and arguments, such as ``["python", "train.py", "model.lr=0.1"]``; no shell reads them.
        to: folder for the runs; it must not exist, or be empty. None is a new one below ``determinism-check``.
        vary: what is changed, one at a time, in a further process each, where the plain verification is a match.
        announce: called with a title and the words of each process before it is started.

    Raises:
        CheckError: the arguments are not what a check can do, or the program cannot be started.
    """
    if unknown := [factor for factor in vary if factor not in FACTORS]:
        raise CheckError(f"There is no {unknown[0]!r} to vary; there are {', '.join(FACTORS)}.")
    if not words:
        raise CheckError("No command was given. Name the script: det-callbacks check -- python train.py model.lr=0.1")
    if refused := [word for word in words if _OURS.match(word)]:
        raise CheckError(
            f"{refused[0]} cannot be checked: a check tells the script itself what to record and to verify, and runs "
            "one job. Leave it out; other options of the presets are fine, such as determinism.level=state."
        )
    home = Path.cwd() / (to or f"determinism-check/{datetime.now():%Y-%m-%d_%H-%M-%S-%f}")
    if home.exists() and (not home.is_dir() or any(home.iterdir())):
        raise CheckError(f"{home} is there already, and is not an empty folder; nothing was run. Name another one.")
    home.mkdir(parents=True, exist_ok=True)
    (home / ".gitignore").write_text("*\n", encoding="utf-8")
    variables = dict(os.environ)
    if "hash-seed" in vary and variables.get(_HASH_SEED, "") in ("", "random"):
        variables[_HASH_SEED] = "0"  # else each process has another one, also two that are to be the same
    check = _Check(words=tuple(words), home=home, variables=variables, announce=announce)
    runs, factors = [check.record()], tuple(dict.fromkeys(vary))
    if runs[0].outcome == "recorded":
        runs.append(check.verify(PLAIN, _Change()))
        if runs[-1].outcome == "match":
            runs += [check.vary(factor) for factor in factors]
            factors = ()
    return CheckReport(folder=home, runs=tuple(runs), not_run=factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Check:
    """The processes of one check."""

    words: tuple[str, ...]
    home: Path
    variables: Mapping[str, str]
    announce: Callable[[str, Sequence[str]], object]

    @property
    def reference(self) -> Path:
        return self.home / "reference"

    def record(self) -> CheckedRun:
        words = (*self.words, "+determinism=record", override("determinism.reference", self.reference))
        reason = self._start("record", words, {})
        if not reason:
            try:
                run = Run.open(self.reference)
                if not run.is_complete:
                    reason = f"the script ended well, and its recording is incomplete: {run.incomplete_reason}"
            except ReferenceNotFoundError:
                reason = "the script ended well, and no DeterminismCallback recorded anything"
            except ReferenceFormatError as error:
                reason = str(error)
        return CheckedRun(name=RECORDING, outcome="failed" if reason else "recorded", reason=reason)

    def vary(self, factor: Factor) -> CheckedRun:
        try:
            change = _CHANGES[factor](self, Run.open(self.reference))
        except (CheckError, ReferenceFormatError) as error:
            return CheckedRun(name=factor, outcome="failed", reason=f"it could not be varied: {error}")
        return self.verify(factor, change)

    def verify(self, name: str, change: _Change) -> CheckedRun:
        current = self.home / name
        places = override("determinism.reference", self.reference), override("determinism.current", current)
        title = "verify" if name == PLAIN else f"verify, {name}, {change.text}"
        reason = self._start(title, (*self.words, "+determinism=verify", *places, *change.overrides), change.variables)
        done = CheckedRun(name=name, change=change.text, outcome="failed", reason=reason)
        try:
            verdict = Verdict.from_dict(json.loads((current / VERDICT_FILE).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return replace(done, reason=reason or "the script ended well, and no DeterminismCallback verified anything")
        except ValueError as error:  # no JSON, no text, or no verdict
            return replace(done, reason=f"{current / VERDICT_FILE} cannot be read: {error}")
        done, outcome = replace(done, verdict=verdict), verdict.verdict
        if outcome == "match" and reason:
            return replace(done, reason=f"{reason}. What was compared before agrees")
        if outcome == "match" and change.entry and change.entry not in {it.name for it in verdict.environment}:
            return replace(done, reason=f"it could not be varied: the script sets {change.entry} by itself")
        excuses = {it.name for it in verdict.environment if it.is_machine and it.changes_bits}
        if outcome == "not_comparable" and verdict.first_divergence and excuses == {change.entry}:
            outcome = "diverged"  # changed on purpose, it excuses nothing
        return replace(done, outcome=outcome, reason="")

    def _start(self, title: str, words: Sequence[str], variables: Mapping[str, str]) -> str:
        """Run a process to its end; return what was wrong with that, "" for nothing."""
        self.announce(title, words)
        try:
            status = run_process(words, variables={**self.variables, **variables})
        except OSError as error:
            raise CheckError(f"{words[0]} cannot be started: {error}") from error
        if status < 0:
            return f"the process was killed by signal {-status} ({signal.strsignal(-status)})"
        return f"the script failed with status {status}: see what it printed" if status else ""


def _hash_seed(check: _Check, run: Run) -> _Change:
    if any(map(_IGNORES_VARIABLES.fullmatch, check.words)):
        raise CheckError("Python was asked to ignore its environment variables (-E or -I)")
    before = check.variables[_HASH_SEED]
    after = str((int(before) + 1) % 2**32)
    text = f"{_HASH_SEED} {after} instead of {before}"
    return _Change(text=text, variables={_HASH_SEED: after}, entry=f"env.{_HASH_SEED}")


def _workers(check: _Check, run: Run) -> _Change:
    steps = run.rank(0).steps(0)
    window = RunEvidence(run).window(0, 0, int(steps[0])) if len(steps) else None
    settings = {} if window is None else window.settings
    known = {int(text) for name, text in settings.items() if name.startswith(_NUM_WORKERS) and text.isdecimal()}
    if not known:
        raise CheckError("the training has no torch DataLoader, whose workers could be others")
    number = next(number for number in (0, 2, *range(1, len(known) + 2)) if number not in known)
    text = f"{number} instead of {' and '.join(map(str, sorted(known)))}"
    return _Change(text=text, variables={NUM_WORKERS_VARIABLE: str(number)})


def _threads(check: _Check, run: Run) -> _Change:
    entry = run.environment.entries.get(_THREADS_ENTRY)
    if entry is None or not isinstance(entry.value, int):
        raise CheckError("the reference does not say how many threads computed it")
    number = 2 if entry.value == 1 else 1
    variables = {"OMP_NUM_THREADS": str(number)}  # what NumPy's libraries ask
    overrides = (override("determinism.settings.num_threads", number),)
    text = f"{number} instead of {entry.value}"
    return _Change(text=text, variables=variables, overrides=overrides, entry=_THREADS_ENTRY)


_CHANGES = {"workers": _workers, "threads": _threads, "hash-seed": _hash_seed}


def override(name: str, value: str | int | Path) -> str:
    """Return a Hydra override, quoted where Hydra's grammar asks for it."""
    text = str(value)
    if not _PLAIN_VALUE.fullmatch(text):
        # Hydra 1.3: in quotes a backslash stands for itself, but where a quote follows
        text = _BEFORE_QUOTE.sub(lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
        text = f"'{text}'"
    return f"{name}={text}"


def run_process(words: Sequence[str], *, variables: Mapping[str, str]) -> int:
    """Run a program to its end and return its status, negative for the signal that ended it.

    It has a session of its own, so that what it started ends with it. Where this process is interrupted, asked to end
    or hung up on, the program is interrupted, and killed when it does not end.
    """
    with _signals_as_exceptions():
        process = subprocess.Popen(words, env=dict(variables), stdin=subprocess.DEVNULL, start_new_session=True)
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
