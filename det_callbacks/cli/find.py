"""``det-callbacks find``: from a script to the op that differs, its numbers,
and a file that shows it.
"""

import argparse
import contextlib
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from det_callbacks.cli.check import (
    FACTORS,
    CheckedRun,
    Script,
    new_folder,
    print_outputs,
    script_of,
    varied,
    varied_factors,
    with_hash_seed,
)
from det_callbacks.cli.repro import REPRO, Repro, make_repro
from det_callbacks.compare.next_recording import find_command
from det_callbacks.compare.record import REPORT_FILE, VERDICT_FILE
from det_callbacks.environment.variables import CAPTURE, LAST_STEP, REPLACES_OWN
from det_callbacks.errors import CheckError
from det_callbacks.report.console import (
    STYLES,
    Section,
    Table,
    make_console,
    print_line,
    print_report,
)
from det_callbacks.report.verdict import options_of, verdict_report
from det_callbacks.runs.files import make_folder, read_file, replace_atomically
from det_callbacks.runs.manifest import COMMIT
from det_callbacks.runs.program import COLLECTIVES, KERNEL, REGION
from det_callbacks.runs.store import Run
from det_callbacks.text import count
from det_callbacks.verdict import Divergence, Verdict

_CALL = "call.safetensors"
TRIES = 3
"""Pairs that look again for a difference that an earlier pair had."""
MAX_QUESTIONS = 6
"""Three are enough (which step, which op, by how much), unless the recordings skip steps."""
_NO_OP = frozenset(
    {"settings", "initial_weights", "checkpoint", "data_order", "data_content", "rng"}
)
"""Causes that name a setting, a tensor, a loader or a generator, so that no op is at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A run that was compared with a recorded one."""

    recorded: str  # such as "level=op only_steps=12"
    verdict: Verdict

    @property
    def is_match(self) -> bool:
        return self.verdict.verdict == "match"

    @property
    def start(self) -> Divergence | None:
        """Where the difference starts, as far as the recording shows."""
        return self.verdict.origins[0] if self.verdict.origins else self.verdict.first_divergence

    def to_dict(self) -> dict[str, Any]:
        start, names = self.start, ("step", "phase", "module", "op", "name", "is_origin")
        place = {name: None if start is None else getattr(start, name) for name in names}
        return {"recorded": self.recorded, "verdict": self.verdict.verdict, **place}


class FailedRunError(CheckError):
    """A run of the search failed; ``run`` has its reason and its output."""

    _data = ("run",)
    run: CheckedRun


class Search:
    """Records a script, and verifies runs of it against the recording until one differs:
    once for each question.

    A question is a set of arguments of the callback: which step, which op, by how much. With a
    given ``reference``, nothing is recorded.
    """

    def __init__(
        self, script: Script, home: Path, *, last_step: str, reference: Path | None
    ) -> None:
        self.pairs: list[Pair] = []
        self.current = script  # may vary a factor
        self.captured: Mapping[str, Any] = {}  # the last call that a run was to save
        self.reference = reference  # the last recording
        self.is_given = reference is not None
        self._script = script
        self._runs, self._last_step = home / "runs", last_step
        self._num_runs, self._num_planned, self._seconds = 0, 1 if self.is_given else 2, 0.0
        make_folder(self._runs)

    @property
    def found(self) -> Pair | None:
        """The last pair that differs."""
        return next((pair for pair in reversed(self.pairs) if not pair.is_match), None)

    def ask(
        self,
        plan: Mapping[str, Any],
        *,
        tries: int,
        capture: Mapping[str, Any] | None = None,
        last_step: str = "",
    ) -> bool:
        """Return whether a pair differs; ``capture`` is a call to save: see ``CallCapture``."""
        given = dict(self._script.arguments)
        if "only_steps" in plan:
            given.pop("every_n_steps", None)
        arguments = {**given, **plan}
        variables = {LAST_STEP: last} if (last := last_step or self._last_step) else {}
        captured = variables if capture is None else {**variables, CAPTURE: json.dumps(capture)}
        self.captured = self.captured if capture is None else capture
        recorded = " ".join(f"{name}={_shown(value)}" for name, value in arguments.items())
        if not self.is_given:
            self.reference = self._runs / f"{self._num_runs + 1:02d}-reference"
            script = replace(
                self._script, arguments=arguments, variables={**self._script.variables, **captured}
            )
            with self._running(recorded) as output:
                _require(script.record(self.reference, output=output))
        variables = captured if self.is_given else variables
        script = replace(
            self.current, arguments=arguments, variables={**self.current.variables, **variables}
        )
        return self.verify(script, recorded, tries=tries)

    def vary(self, script: Script) -> bool:
        """Return whether a run with a varied factor differs from the recording;
        then go on with it.
        """
        variables = {LAST_STEP: self._last_step} if self._last_step else {}
        script = replace(script, arguments=self._script.arguments)
        if self.verify(
            replace(script, variables={**script.variables, **variables}),
            f"{script.name}: {script.change}",
        ):
            self.current = script
            return True
        return False

    def verify(self, script: Script, recorded: str, *, tries: int = 1) -> bool:
        """Verify runs of a script against the last recording until one differs."""
        assert self.reference is not None, "something was recorded"
        for _ in range(tries):
            current = self._runs / f"{self._num_runs + 1:02d}-current"
            with self._running(recorded) as output:
                done = script.verify(self.reference, current, output)
            if done.outcome == "failed" or done.verdict is None:
                raise FailedRunError(done.reason, done)
            self.pairs.append(Pair(recorded=recorded, verdict=done.verdict))
            if not self.pairs[-1].is_match:
                return True
        return False

    def plan(self, num_runs: int) -> None:
        """Expect so many more runs, to say how much time is left."""
        self._num_planned = self._num_runs + num_runs

    @contextlib.contextmanager
    def _running(self, recorded: str) -> Iterator[Path]:
        self._num_runs += 1
        self._num_planned = max(self._num_planned, self._num_runs)
        left = (self._num_planned - self._num_runs + 1) * self._seconds
        time_left = (
            f", about {round(left / 60)} min left"
            if left >= 90
            else f", about {round(left)} s left"
        )
        number = f"run {self._num_runs} of {self._num_planned}{time_left if self._seconds else ''}"
        print_line(make_console(), f"det-callbacks find: {number}: {recorded}", "bold")
        begin = time.monotonic()
        yield self._runs / f"{self._num_runs:02d}-output.txt"
        self._seconds = time.monotonic() - begin


def find(options: argparse.Namespace) -> int:
    """Search, write the answer, and print it."""
    vary = varied_factors(options)
    # here a number; record and verify take all or common
    num_steps, options.steps = options.steps, None
    script = with_hash_seed(script_of(options), vary)
    script = replace(script, variables={**script.variables, REPLACES_OWN: "1"})
    reference = None if options.reference is None else Path(options.reference).absolute()
    if reference is not None:
        Run.open(reference)  # fail before training
        if options.until is not None or num_steps is not None:
            script = replace(script, arguments={"steps": "common", **script.arguments})
    elif not {"level", "keep_tensors"} & script.arguments.keys():
        script = replace(script, arguments={"level": "state", **script.arguments})
    last_step = f"+{num_steps}" if num_steps is not None else ""
    last_step = last_step if options.until is None else str(options.until)
    home = new_folder(options.out, "determinism-find", option="--out")
    search = Search(script, home, last_step=last_step, reference=reference)
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        try:
            note = _search(search, home, vary, tries=options.tries)
        except FailedRunError as error:
            print_outputs([error.run], is_verbose=True)
            raise
        repro = _repro(search, home, script)
    pair = search.found or search.pairs[-1]
    for name in (VERDICT_FILE, REPORT_FILE):
        if (path := Path(pair.verdict.current) / name).exists():
            replace_atomically(home / name, read_file(path), instead="pass another folder (--out)")
    lines = [*filter(None, [note]), *_advice(search, script, vary, reference)]
    if options.json:
        of_repro = (
            None
            if repro is None
            else {"path": repro.path and str(repro.path), "printed": repro.text}
        )
        about = {
            "out": str(home),
            "pairs": [one.to_dict() for one in search.pairs],
            "repro": of_repro,
            "notes": lines,
        }
        print(json.dumps({**pair.verdict.to_dict(), "find": about}, indent=1))  # noqa: T201
    else:
        _print(search, home, pair, repro, lines, is_verbose=options.verbose)
    return pair.verdict.exit_code


def _search(search: Search, home: Path, vary: Sequence[str], *, tries: int | None) -> str:
    """Ask one question after the other; return what ended the search early, or ""."""
    is_varied, asked, failed = False, list[dict[str, Any]](), list[FailedRunError]()
    has_found = search.ask({}, tries=tries or 1)
    for name in (factor for factor in FACTORS if factor in vary and not has_found):
        assert search.reference is not None, "something was recorded"
        try:
            has_found = is_varied = search.vary(
                varied(search.current, name, Run.open(search.reference))
            )
        except FailedRunError as error:  # another factor may still tell
            failed.append(error)
    if failed and not has_found:
        raise failed[0]
    while has_found and len(asked) < MAX_QUESTIONS and not search.is_given:
        assert search.found is not None, "a pair differs"
        verdict, start = search.found.verdict, search.found.start
        plan = dict(verdict.record_next or {})
        if (
            not plan
            or plan in asked
            or start is None
            or (verdict.cause in _NO_OP and not is_varied)
        ):
            break
        asked.append(dict(plan))
        num_before = len(search.pairs)
        search.plan(2 if "keep_tensors" in plan else 4)
        # a run needs no later step; a later fit begins at step 0 again
        last_step = (
            str(max(plan["only_steps"])) if "only_steps" in plan and not start.segment else ""
        )
        if plan.get("compiled") == "eager":
            plan.pop("only_steps", None)  # compiled code in an earlier step may already differ
        capture = _call_at(start, home) if "keep_tensors" in plan else None
        wide = {
            name: value
            for name, value in plan.items()
            if name not in ("only_steps", "keep_tensors")
        }
        try:
            # the call is saved although a pair may match; the next round ends the search
            if (
                search.ask(plan, tries=tries or TRIES, capture=capture, last_step=last_step)
                or capture is not None
            ):
                continue
            if "compiled" in plan:
                return (
                    f"With compiled=eager, {count(tries or TRIES, 'pair')} match: no op of the "
                    "eager code differed."
                )
            # a race that moved may come at another step
            if wide == plan or not search.ask(wide, tries=tries or TRIES):
                return (
                    f"It did not come again in {len(search.pairs) - num_before} more pairs: raise "
                    "--tries."
                )
        except FailedRunError as error:
            return f"The search ended early: {error}"
    return ""


def _call_at(start: Divergence, home: Path) -> dict[str, Any]:
    names = ("rank", "segment", "step", "phase", "module", "op", "occurrence")
    return {**{name: getattr(start, name) for name in names}, "path": str(home / _CALL)}


def _repro(search: Search, home: Path, script: Script) -> Repro | None:
    """Write ``repro/`` for the op at which the difference starts; None if no op is at fault."""
    pair, saved = search.found, home / _CALL
    start = None if pair is None else pair.start
    if pair is None or start is None or not start.op:
        return None
    if start.op.startswith((REGION, KERNEL)):
        return Repro(
            path=None,
            text=(
                "code that torch.compile compiled cannot be called alone: see "
                "TORCH_LOGS=output_code"
            ),
        )
    if start.op.startswith(COLLECTIVES):
        return Repro(
            path=None, text="a collective needs all its processes, so one file cannot call it"
        )
    if start.kind != "content":
        return Repro(
            path=None,
            text=f"the runs call {start.op} with different arguments, or only one of them calls it",
        )
    if search.is_given and start.is_origin:
        search.plan(1)
        with contextlib.suppress(FailedRunError):
            search.ask({}, tries=1, capture=_call_at(start, home))
    if not saved.exists() or search.captured != _call_at(start, home):
        why = "the recordings do not show in which op the difference starts"
        return Repro(
            path=None, text=f"no run saved the inputs of {start.op}" if start.is_origin else why
        )
    assert search.reference is not None, "something was recorded"
    settings = Run.open(search.reference).manifest.settings
    python = script.words[0] if "python" in Path(script.words[0]).name else sys.executable
    print_line(make_console(), f"det-callbacks find: runs {home / 'repro' / REPRO}")
    return make_repro(saved, home / "repro", settings=settings, python=python)


def _advice(
    search: Search, script: Script, vary: Sequence[str], reference: Path | None
) -> list[str]:
    """Return what else the user can do."""
    words, pair = shlex.join(script.words), search.found
    if pair is None:
        rest = ",".join(factor for factor in FACTORS if factor not in vary)
        return (
            [f"To see what its bits depend on: det-callbacks find --vary {rest} -- {words}"]
            if rest
            else []
        )
    lines, verdict = [], pair.verdict
    if reference is not None and verdict.record_next is not None and verdict.cause not in _NO_OP:
        options = shlex.join(options_of(verdict.record_next))
        of_reference = find_command(Run.open(reference)) or "det-callbacks find -- COMMAND"
        command = of_reference.partition(" -- ")[2]
        lines.append(
            f"{reference} does not hold what would tell more. Record it again where it was "
            f"recorded, with its code: det-callbacks record OTHER {options} -- {command}. Then: "
            f"det-callbacks find OTHER -- {words}"
        )
    commits = [entry for entry in verdict.environment if entry.name == COMMIT]
    if reference is not None and commits and all((commits[0].reference, commits[0].current)):
        run = f"det-callbacks verify {shlex.quote(str(reference))} -- {words}; s=$?; "
        run += "case $s in 2|3) s=125;; esac; exit $s"
        lines.append(
            f"To find the commit: git bisect start {commits[0].current} {commits[0].reference}, "
            f"then: git bisect run sh -c {shlex.quote(run)}"
        )
    return lines


def _print(
    search: Search,
    home: Path,
    pair: Pair,
    repro: Repro | None,
    lines: Sequence[str],
    *,
    is_verbose: bool,
) -> None:
    if is_verbose:
        for path in sorted((home / "runs").glob("*-output.txt")):
            outcome = CheckedRun(name=path.stem, outcome="recorded", output=path)
            print_outputs([outcome], is_verbose=True)
    shown = replace(pair.verdict, find_command=None)  # this command
    sections, differing = (
        [Section(), *verdict_report(shown)],
        sum(not one.is_match for one in search.pairs),
    )
    if differing:
        rows = [_row(number, one) for number, one in enumerate(search.pairs, start=1)]
        columns = ("pair", "recorded", "outcome", "step", "starts in")
        sections.append(Section(table=Table(columns=columns, rows=rows)))
    if repro is not None and repro.path is not None:
        sections.append(Section(title=str(repro.path), code=repro.text.splitlines()))
    elif repro is not None:
        sections.append(
            Section(title="No repro.py", lines=[f"{repro.text[:1].upper()}{repro.text[1:]}."])
        )
    sections += [Section(lines=lines)] if lines else []
    print_report([*sections, Section()])
    verdict, start = pair.verdict, pair.start
    place = (
        ""
        if start is None
        else f"; step {start.step}, {start.phase}: {start.op or start.name or start.kind}"
    )
    pairs = (
        f"; the difference came in {differing} of {count(len(search.pairs), 'pair')}"
        if differing
        else ""
    )
    word = f"{verdict.verdict.replace('_', ' ')} (exit status {verdict.exit_code})"
    print_line(
        make_console(),
        f"det-callbacks find: {word}{place}{pairs}; kept in {home}",
        STYLES[verdict.verdict],
    )


def _row(number: int, pair: Pair) -> tuple[object, ...]:
    start = pair.start
    if start is None:
        return number, pair.recorded, pair.verdict.verdict, "-", "-"
    place = start.op or start.name or start.kind
    where = f" of {start.module}" if start.op and start.module else ""
    return number, pair.recorded, pair.verdict.verdict, start.step, f"{start.phase}: {place}{where}"


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _require(done: CheckedRun) -> None:
    if done.outcome == "failed":
        raise FailedRunError(done.reason, done)
