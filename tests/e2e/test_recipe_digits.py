"""The commands of recipes/digits/README.md, in the order in which they stand there, with the output they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


def commands_of(readme: str) -> list[tuple[str, list[str]]]:
    """Each command with the lines of output below it."""
    found: list[tuple[str, list[str]]] = []
    for line in "".join(BLOCK.findall(readme)).splitlines():
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        elif line.strip():
            found[-1][1].append(line)
    return found


def pattern_of(line: str) -> str:
    """A promised line as a pattern: "..." stands for anything."""
    return ".*".join(re.escape(part.strip()) for part in line.split("..."))


def test_the_readme_tells_the_truth(tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "120", "NO_COLOR": "1"}
    commands = commands_of((ROOT / "recipes" / "digits" / "README.md").read_text())
    assert len(commands) == 10
    status = 0
    for command, promised in commands:
        if command == "echo $?":
            assert promised == [str(status)]
            continue
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=200,
        )
        status = done.returncode
        for line in promised:
            assert re.search(pattern_of(line), done.stdout), f"{command}\npromised: {line}\nsaid:\n{done.stdout}"


def test_a_promise_can_be_broken() -> None:
    readme = "```console\n$ do it\nrecorded ... steps\n```\n\n```console\n$ echo $?\n1\n```\n"
    assert commands_of(readme) == [("do it", ["recorded ... steps"]), ("echo $?", ["1"])]
    assert re.search(pattern_of("recorded ... steps"), "recorded 48 steps")
    assert not re.search(pattern_of("recorded ... steps"), "recorded nothing")
