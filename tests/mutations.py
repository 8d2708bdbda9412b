"""Breaks central lines one at a time, and lists which everyday test sees each: ``make mutations``.

``mutations.txt`` says what is broken, each in a copy of the package in a temporary folder, where
tests run until one fails. The exit status is 1 when a mutation is not seen or cannot be made, and
when what saw one fails without it, too.

    python tests/mutations.py [--jobs 2] [--only TEXT]
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".txt")
COPIED = ("det_callbacks", "conf", "tests", "recipes", "pyproject.toml", "README.md", "docs")


class Mutation(NamedTuple):
    title: str
    file: str
    old: str
    new: str
    tests: list[str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--jobs", type=int, default=2, help="mutations that are tried at a time (default: 2)"
    )
    parser.add_argument(
        "--only", default="", help="only the mutations with this text in their title"
    )
    options = parser.parse_args()
    mutations = [mutation for mutation in read_table(TABLE) if options.only in mutation.title]
    with (
        tempfile.TemporaryDirectory(prefix="mutations-") as folder,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        places = [Path(folder).resolve() / str(number) for number in range(len(mutations) + 1)]
        seen, num_missed = set[str](), 0
        for mutation, (failed, problem) in zip(
            mutations, pool.map(attempt, mutations, places), strict=True
        ):
            print(f"{mutation.title}\n    {problem or f'seen by {failed}'}", flush=True)
            seen |= {failed} - {""}
            num_missed += bool(problem)
        # what fails in any case has seen nothing
        failed, output = run(copied(places[-1]), sorted(seen))
    print(
        f"{len(mutations) - num_missed} of {len(mutations)} mutations are seen by the everyday "
        "tests"
    )
    if failed:
        print(f"What saw one fails without it as well:\n{output}")
    return int(bool(failed or num_missed))


def read_table(path: Path) -> Iterator[Mutation]:
    """Yield the mutations of the table; its head says what they look like."""
    for block in path.read_text().split("\n\n"):
        title, *lines = [line for line in block.splitlines() if not line.startswith("#")] or [""]
        if title:
            old, new = (
                "\n".join(line[2:] for line in lines if line.startswith(sign))
                for sign in ("- ", "+ ")
            )
            file = title.partition(": ")[0]
            tests = [line.removeprefix("tests: ") for line in lines if line.startswith("tests: ")]
            tests = tests or [f"tests/unit/test_{Path(file).stem}.py"]
            yield Mutation(title=title, file=file, old=old, new=new, tests=tests[0].split())


def attempt(mutation: Mutation, place: Path) -> tuple[str, str]:
    """Return the test that saw a mutation, and what is wrong where none did."""
    file = copied(place) / "det_callbacks" / mutation.file
    text = file.read_text() if file.exists() else ""
    if (times := text.count(mutation.old)) != 1:
        return "", f"STALE: {mutation.file} has its old text {times} times; change {TABLE.name}"
    file.write_text(text.replace(mutation.old, mutation.new))
    failed, output = run(place, mutation.tests)
    shutil.rmtree(place)
    return failed, "" if failed else f"NOT SEEN by {' '.join(mutation.tests)}:\n{output}"


def copied(place: Path) -> Path:
    """Return a new copy of what the tests need, without compiled files,
    which hold paths of the original.
    """
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("*.pyc"))
        else:
            shutil.copy2(ROOT / name, place / name)
    return place


def run(place: Path, tests: list[str]) -> tuple[str, str]:
    """Run tests of the everyday tier in a copy until one fails; return its name,
    and the end of what was printed.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *tests]
    variables = {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=place, env=variables, capture_output=True, text=True, check=False
    )
    failed = (
        re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE) if done.returncode else []
    )
    return (failed[0] if failed else ""), done.stdout[-2000:]


if __name__ == "__main__":
    sys.exit(main())
