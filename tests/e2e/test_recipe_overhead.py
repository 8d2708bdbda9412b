"""recipes/overhead: it measures what it says, and the commands of its README are ones that it takes."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from checking import fork_process

RECIPE = Path(__file__).parents[2] / "recipes" / "overhead"
PARSE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from run import make_parser
for line in json.loads(sys.argv[2]):
    make_parser().parse_args(line)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RECIPE / "run.py"), *arguments], capture_output=True, text=True, check=False, timeout=200
    )


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.slow
def test_a_short_run_measures_time_memory_and_disk(tmp_path: Path) -> None:
    options = {"networks": "mlp", "variants": "op", "rounds": 3, "steps": 2, "memory-steps": 3}
    options["json"] = tmp_path / "figures.json"
    done = run(*(word for name, value in options.items() for word in (f"--{name}", str(value))))
    assert done.returncode == 0, done.stderr
    (case,) = json.loads((tmp_path / "figures.json").read_text())["cases"]
    assert (case["network"], case["optimizer"]) == ("mlp", "plain")
    plain, op = case["variants"]["plain"], case["variants"]["op"]
    assert plain["ratio"] == 1
    assert len(plain["seconds"]) == len(op["seconds"]) == 3
    assert op["plain"] == plain["seconds"]
    assert op["ratio"] == sorted(one / other for one, other in zip(op["seconds"], plain["seconds"], strict=True))[1]
    assert op["peak_growth_mib"] > 0
    assert op["ops"] == 113
    assert 8 * op["sites"] < op["bytes_a_step"] <= 8 * op["sites"] + 512
    assert 1 <= op["num_layouts"] <= 3
    assert re.search(r"^op +\d+\.\d\d +\d+\.\d\d .* 113 ", done.stdout, re.MULTILINE)


def test_the_commands_of_the_readme_are_taken(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    commands = re.findall(r"^\$ python recipes/overhead/run\.py(.*)$", (RECIPE / "README.md").read_text(), re.MULTILINE)
    assert len(commands) >= 3
    (tmp_path / "parse.py").write_text(PARSE)

    def parse(lines: list[list[str]]) -> int:
        words = [sys.executable, str(tmp_path / "parse.py"), str(RECIPE), json.dumps(lines)]
        return fork_process(words, variables=os.environ)

    assert parse([shlex.split(command) for command in commands]) == 0
    assert parse([["--networks", "mlp", "--rounds", "0"]]) == 2
    assert "0 is not a number from 1 on" in capfd.readouterr().err
