"""pytest plugin: the fixture ``training_snapshot``. Heavy imports wait until a test asks for it.

Tests report through their properties, so the summary is the same with pytest-xdist.
"""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from det_callbacks.errors import DetCallbacksError
    from det_callbacks.integrations.pytest_runs import TrainingRuns

FOLDER = "__determinism__"
LARGE_BYTES = 1_000_000

_RUNS: "pytest.StashKey[TrainingRuns]" = pytest.StashKey()
_PROPERTY = "determinism"
_RECORD = "--determinism-record"
_OUTCOMES = ("fail", "skip", "xfail")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("determinism", "runs that are compared bit for bit (det_callbacks)")
    # an option with an optional value would treat a path after it as the value
    for name, value, text in (
        (_RECORD, "all", "record runs without a reference, and record again runs that differ"),
        (f"{_RECORD}=missing", "missing", "record runs without a reference, and verify the others"),
        (f"{_RECORD}=force", "force", "as without a value, but even under CI=true"),
    ):
        group.addoption(
            name, dest="determinism_record", action="store_const", const=value, help=text
        )
    unused = "what to do with references that no collected test used: list them, or fail"
    group.addoption("--determinism-unused", choices=("list", "fail"), default="list", help=unused)
    text = (
        "outcome of a run that differs on a different machine or with different versions: fail, "
        "skip or xfail"
    )
    parser.addini("determinism_not_comparable", text, default="fail")


def pytest_configure(config: pytest.Config) -> None:
    is_ci = os.environ.get("CI", "").lower() in ("true", "1")
    if is_ci and config.getoption("determinism_record") in ("all", "missing"):
        raise pytest.UsageError(
            f"{_RECORD} does not work under CI=true, because a test that records compares nothing. "
            f"Record on your machine and commit the reference, or pass {_RECORD}=force."
        )
    if (value := config.getini("determinism_not_comparable")) not in _OUTCOMES:
        raise pytest.UsageError(
            f"determinism_not_comparable must be one of {', '.join(_OUTCOMES)}; got {value!r}."
        )
    config.pluginmanager.register(_Summary(config), "determinism-summary")


@pytest.fixture(name="training_snapshot")
def training_reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> "Iterator[TrainingRuns]":
    """Return a function that makes a DeterminismCallback, which compares the training
    with its recorded reference.

    It takes any argument of DeterminismCallback except reference, mode and current, and ``name`` if
    a test trains several times. Call it before you build the model: it seeds all generators with 0,
    and restores them after the test. To test your own loop, pass it a function, which it calls with
    ``follow`` to make the loop's TrainingRun.
    """
    # loads torch and Lightning
    from det_callbacks.integrations.pytest_runs import TrainingRuns  # noqa: PLC0415

    record = request.config.getoption("determinism_record")
    item = request.node
    runs = TrainingRuns(
        folder=item.path.parent / FOLDER / item.path.stem / folder_name(item.nodeid),
        record="all" if record == "force" else record,
        new_folder=lambda: tmp_path_factory.mktemp("determinism"),
        command=f"pytest {_RECORD} {shlex.quote(item.nodeid)}",
    )
    item.stash[_RUNS] = runs
    yield runs
    del item.stash[_RUNS]
    runs.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Make the comparison part of the test, and show its verdict without our traceback."""
    runs = item.stash.get(_RUNS, None)
    if runs is None:
        return (yield)
    # only where it is asked for
    from det_callbacks.errors import DetCallbacksError  # noqa: PLC0415

    failure = None
    try:
        result = yield
        done = runs.finish()
    except DetCallbacksError as error:
        failure = error
    if failure is not None:
        # outside the handler: pytest would show both texts
        _end(failure, item.config, command=runs.command)
    # left by a test that runs again
    others = [it for it in item.user_properties if it[0] != _PROPERTY]
    item.user_properties[:] = [*others, (_PROPERTY, json.dumps(done))]
    return result


def _end(error: "DetCallbacksError", config: pytest.Config, *, command: str) -> NoReturn:
    """Fail a test that differs or could not be compared; pytest's short
    summary shows the first line.
    """
    from det_callbacks.report.numerics import numerics_sentence  # noqa: PLC0415  # loads numpy

    # likewise
    from det_callbacks.report.verdict import headline, verdict_lines  # noqa: PLC0415
    from det_callbacks.verdict import is_certain_change  # noqa: PLC0415

    verdict = getattr(error, "verdict", None)
    if verdict is None:
        pytest.fail(f"{type(error).__name__}: {error}", pytrace=False)
    outcome = (
        "fail" if verdict.numerics is not None else config.getini("determinism_not_comparable")
    )
    if verdict.verdict == "not_comparable" and outcome != "fail" and not is_certain_change(verdict):
        differing = [
            f"{it.name}: {it.reference} -> {it.current}"
            for it in verdict.environment
            if it.is_machine
        ]
        reason = f"the run is not comparable: {verdict.explanation} ({'; '.join(differing)})"
        (pytest.skip if outcome == "skip" else pytest.xfail)(reason)
    first = headline(verdict) if verdict.numerics is None else numerics_sentence(verdict.numerics)
    lines = [first, "", verdict_lines(verdict), ""]
    if verdict.cause == "initial_weights":
        lines.append(
            "A model that you build before you call training_snapshot() may have different "
            "weights: call training_snapshot() first."
        )
    lines += [
        "If you intended this change, record the reference again and commit it:",
        f"    {command}",
    ]
    if (report := Path(verdict.current, "report.html")).exists():
        lines.append(f"report: {report}")
    pytest.fail("\n".join(lines), pytrace=False)


def folder_name(nodeid: str) -> str:
    """Return the name of a test's folder, such as "TestNet.test_training[bf16]"."""
    test = nodeid.partition("::")[2].replace("::", ".")
    name = re.sub(r"[^\w.\[\]=,+-]", "_", test)[:100]
    return name if name == test else f"{name}-{hashlib.sha256(test.encode()).hexdigest()[:8]}"


class _Summary:
    """Collects, in all processes, what the tests of a session did with their references."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._done: dict[Path, str] = {}
        self._files: set[Path] = set()
        self._not_passed: set[tuple[Path, str]] = set()
        self._has_run_all = not any("::" in word for word in config.args)
        self._unused: list[Path] = []

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._has_run_all &= not items

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = Path(os.path.normpath(self._config.rootpath / report.nodeid.partition("::")[0]))
        self._files.add(file)
        if not report.passed:
            self._not_passed.add((file, folder_name(report.nodeid)))
        elif report.when == "call":
            done = json.loads(str(dict(report.user_properties).get(_PROPERTY, "{}")))
            self._done |= {Path(path): word for path, word in done.items()}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self._has_run_all &= error is None and getattr(node, "workeroutput", {}).get(
            _PROPERTY, True
        )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[_PROPERTY] = self._has_run_all
            return
        is_whole = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if is_whole and self._has_run_all and not session.shouldstop and not session.shouldfail:
            self._unused = sorted(self._find_unused())
        if self._unused and self._fails_where_unused and not exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @property
    def _fails_where_unused(self) -> bool:
        return bool(self._config.getoption("determinism_unused") == "fail")

    def _find_unused(self) -> Iterator[Path]:
        for home in {file.parent / FOLDER for file in self._files}:
            for run in home.glob("*/*/**/run.json"):
                module, name, *_ = run.relative_to(home).parts
                file = home.parent / f"{module}.py"
                is_known = (file in self._files or not file.exists()) and (
                    file,
                    name,
                ) not in self._not_passed
                if is_known and run.parent not in self._done:
                    yield run.parent

    def pytest_terminal_summary(self, terminalreporter: "pytest.TerminalReporter") -> None:
        if not self._done and not self._unused:
            return
        terminalreporter.section("determinism")
        words = list(self._done.values())
        counts = [
            f"{words.count(word)} {word}"
            for word in ("matched", "recorded", "re-recorded", "unchanged")
        ]
        line = ", ".join(text for text in counts if not text.startswith("0 ")) or "none compared"
        terminalreporter.write_line(f"references of runs: {line}")
        for path in sorted(self._done):
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            if size > LARGE_BYTES:
                terminalreporter.write_line(
                    f"{self._shown(path)} is {size / 1e6:.1f} MB: train fewer steps, or record at "
                    "level='state'"
                )
        if self._unused:
            failed = (
                "The session fails (--determinism-unused=fail): "
                if self._fails_where_unused
                else ""
            )
            terminalreporter.write_line(
                f"{failed}No test uses these references. Remove them, or restore their tests:"
            )
        for path in self._unused:
            terminalreporter.write_line(f"  {self._shown(path)}")

    def _shown(self, path: Path) -> str:
        return os.path.relpath(path, self._config.rootpath)
