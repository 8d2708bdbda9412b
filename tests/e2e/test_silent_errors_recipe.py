"""The recipe of silent errors tells what its README says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "silent_errors"
README = (RECIPE / "README.md").read_text()
ROWS = re.findall(r"(?m)^\| ([a-z][\w-]+) \| .* \| (`?[\w-]+`?) \| (`?[\w-]+`?) \|$", README)


def told(names: list[str]) -> list[list[str]]:
    command = [sys.executable, str(RECIPE / "run.py"), *names]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [
        line.split()
        for line in ended.stdout.splitlines()
        if line.split()[:1] and line.split()[0] in names
    ]
    return [line for line in lines if len(line) == 3]


def test_the_table_has_all_errors_and_its_counts():
    assert len(ROWS) == 18
    in_one = sum(finding != "-" for _, finding, _ in ROWS)
    beside = sum((finding, cause) != ("-", "-") for _, finding, cause in ROWS)
    assert (
        f"{in_one} of 18 show in one run, and {beside} if a correct run is its reference" in README
    )


@pytest.mark.slow
@pytest.mark.ddp
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_each_error_is_found_as_the_table_says():
    expected = [
        [name, finding.strip("`"), cause.strip("`")]
        for name, finding, cause in ROWS
        if name != "deepspeed-5794"
    ]
    assert told([name for name, *_ in expected]) == expected
