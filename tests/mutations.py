"""Breaks central lines one at a time, and lists which everyday test sees each: ``make mutations``.

``mutations.txt`` says what is broken. Each mutation is made in a copy of the package in a temporary folder, where the
tests named with it run until one fails; the working tree stays as it is. The exit status is 1 when a mutation is not
seen, when the tests that saw one fail without it as well, and when a text is not in the package any more: the code has
moved, and the table has to follow.

    python tests/mutations.py [--jobs 2] [--only TEXT]
"""

import argparse
import contextlib
import importlib.util
import io
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".txt")
COPIED = ("det_callbacks", "conf", "tests", "recipes", "pyproject.toml", "README.md", "docs")
SECONDS = 300
"""After which a mutation's tests are given up: it may have made one of them endless."""
OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]

# Processes are forked from a server that has imported what takes long; nothing of the package is among it.
SERVER = multiprocessing.get_context("forkserver")
PRELOADED = ["torch._inductor.config", "lightning.pytorch", "pyarrow.parquet", "hydra", "pytest"]


class Mutation(NamedTuple):
    """One text of one file that becomes another, and the tests that should see it."""

    title: str
    file: str
    old: str
    new: str
    tests: list[str]


class Outcome(NamedTuple):
    """The tests that failed, pytest's exit status (-1: it came to none), what it printed, and its seconds."""

    failed: list[str]
    status: int
    output: str
    seconds: float = 0.0


class Failures:
    """A plugin of pytest that notes which tests failed."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.names.append(report.nodeid)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=2, help="mutations that are tried at a time (default: 2)")
    parser.add_argument("--only", default="", help="only the mutations with this text in their title")
    options = parser.parse_args()
    mutations = [mutation for mutation in read_table(TABLE) if options.only in mutation.title]
    if not mutations:
        parser.error(f"no mutation has {options.only!r} in its title")
    seen: dict[str, list[str]] = {}
    os.environ["OMP_NUM_THREADS"] = "1"
    SERVER.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        places = [Path(folder).resolve() / str(number) for number in range(len(mutations) + 1)]
        for mutation, (outcome, problem) in zip(mutations, pool.map(attempt, mutations, places), strict=True):
            if not problem:
                seen[mutation.title] = outcome.failed
            print(mutation.title)
            print(f"    {problem or f'seen by {outcome.failed[0]}'} ({outcome.seconds:.0f} s)", flush=True)
        # what fails in any case has seen nothing
        sighted = sorted({test for tests in seen.values() for test in tests})
        whole = run(copied(places[-1]), sighted) if sighted else None
    if whole is not None and whole.status:
        print(f"The tests that saw a mutation fail without one as well, or cannot run:\n{whole.output}")
        return 1
    print(f"{len(seen)} of {len(mutations)} mutations are seen by the everyday tests")
    return 0 if len(seen) == len(mutations) else 1


def read_table(path: Path) -> Iterator[Mutation]:
    """Yield the mutations of the table; its head says what they look like."""
    for block in path.read_text().split("\n\n"):
        title, *lines = [line for line in block.splitlines() if not line.startswith("#")] or [""]
        if title:
            old, new = ("\n".join(line[2:] for line in lines if line.startswith(sign)) for sign in ("- ", "+ "))
            (tests,) = (line.removeprefix("tests: ").split() for line in lines if line.startswith("tests: "))
            yield Mutation(title=title, file=title.partition(": ")[0], old=old, new=new, tests=tests)


def attempt(mutation: Mutation, place: Path) -> tuple[Outcome, str]:
    """Return what the tests came to with a mutation, and what is wrong with that ("" if nothing)."""
    file = copied(place) / "det_callbacks" / mutation.file
    text = file.read_text() if file.exists() else ""
    if (times := text.count(mutation.old)) != 1:
        return Outcome([], 0, ""), f"STALE: {mutation.file} has its old text {times} times; change {TABLE.name}"
    file.write_text(text.replace(mutation.old, mutation.new))
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
    outcome = run(place, mutation.tests)
    shutil.rmtree(place)
    if outcome.status == pytest.ExitCode.OK:
        return outcome, f"NOT SEEN by {' '.join(mutation.tests)}"
    return outcome, "" if outcome.failed else f"COULD NOT BE TRIED: no test failed\n{outcome.output}"


def copied(place: Path) -> Path:
    """Return a new copy of what the tests need, with compiled files but for those that hold paths of the original."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("*pytest*.pyc"))
        else:
            shutil.copy2(ROOT / name, place / name)
    return place


def run(place: Path, tests: list[str]) -> Outcome:
    """Run tests of the everyday tier in a copy until one fails, in a process of their own."""
    started = perf_counter()
    receiver, sender = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=run_here, args=(place, tests, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(SECONDS):
            process.kill()
        outcome = receiver.recv()
    except EOFError:
        outcome = Outcome([], -1, f"the process ended without a result, or was ended after {SECONDS} s")
    process.join()
    return outcome._replace(seconds=perf_counter() - started)


def run_here(place: Path, tests: list[str], sender: Connection) -> None:
    """Run tests in this process, which has imported nothing of the package."""
    os.chdir(place)
    sys.path[0] = os.environ["PYTHONPATH"] = str(place)
    failures = Failures()
    one_process = ["-n0"] if importlib.util.find_spec("xdist") else []
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = int(pytest.main([*OPTIONS, *one_process, *tests], plugins=[failures]))
    package = sys.modules.get("det_callbacks")
    if package is not None and place not in Path(str(package.__file__)).parents:
        status, failures.names = -1, []
        print(f"the tests imported {package.__file__} instead of the copy in {place}", file=output)
    sender.send(Outcome(failures.names, status, output.getvalue()[-4000:]))


if __name__ == "__main__":
    sys.exit(main())
