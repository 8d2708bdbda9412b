"""The commands of a recipe's README, or of another page, run in the order in which they stand there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from forks import fork_process

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
    """A promised line as a pattern: "..." stands for anything, and a sentence may go on in the next line."""
    parts = (r"\s+".join(map(re.escape, part.split())) for part in line.split("..."))
    return r".*(?:\n.*)?".join(parts)


def run_page(page: Path, folder: Path, *, added: str = "") -> int:
    """Run all commands of a page in a folder, and check what they promise; return how many there are.

    Commands that train get the ``added`` arguments as well.
    """
    (folder / "recipes").symlink_to(ROOT / "recipes")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "120", "NO_COLOR": "1"}
    commands, status = commands_of(page.read_text()), 0
    for command, promised in commands:
        if command == "echo $?":
            assert promised == [str(status)]
            continue
        words = shlex.split(command, comments=True)
        with (folder / "said").open("w+b") as said:
            if words[0] == "python":
                words = [sys.executable, *words[1:], *shlex.split(added)]
                status = fork_process(words, variables=environment, folder=folder, output=said.fileno())
            else:
                options: dict[str, Any] = {"cwd": folder, "env": environment, "check": False, "timeout": 200}
                status = subprocess.run(words, stdout=said, stderr=subprocess.STDOUT, **options).returncode
        text = (folder / "said").read_text()
        for line in promised:
            assert re.search(pattern_of(line), text), f"{command}\npromised: {line}\nsaid:\n{text}"
    return len(commands)
