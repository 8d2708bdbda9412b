"""The command line of the script that is checked."""

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from det_callbacks.errors import CheckError

_PYTHON = re.compile(r"python[\d.]*(\.exe)?", re.IGNORECASE)
_WITH_VALUE = frozenset({"--check-hash-based-pycs"})
_OURS = re.compile(r"\+{0,2}determinism(\.(mode|reference|current))?=")
_SWEEPS = frozenset({"--multirun", "-m"})
_PLAIN_VALUE = re.compile(r"[\w./+-]+", re.ASCII)
_BEFORE_QUOTE = re.compile(r"(\\*)('|$)")
_EXAMPLE = "det-callbacks check -- python train.py model.lr=0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A script and its arguments, to be started from any folder.

    Attributes:
        given: the words as they were given.
        words: the same, with absolute paths of program and script.
        is_module: ``python -m``: the script is found below the folder where it is started.
        ignores_variables: Python was asked to ignore its environment variables (``-E``, ``-I``).
    """

    given: tuple[str, ...]
    words: tuple[str, ...]
    is_module: bool = False
    ignores_variables: bool = False


def parse_command(words: Sequence[str], folder: Path) -> Command:
    """Find program and script.

    Args:
        words: as they would be given to a shell, each one by itself.
        folder: where they were given.

    Raises:
        CheckError: one of them is not there, or an argument is one that a check gives itself.
    """
    if not words:
        raise CheckError(f"No command was given. Say which script to check: {_EXAMPLE}")
    program = shutil.which(words[0], path=None)
    if program is None:
        advice = (
            f" To run a Python script: det-callbacks check -- python {words[0]}" if words[0].endswith(".py") else ""
        )
        raise CheckError(f"The program {words[0]} was not found, or cannot be executed; nothing was run.{advice}")
    found = [os.path.abspath(folder / program), *words[1:]]  # a link to Python names its environment
    flags, script = _script_of(words) if _PYTHON.fullmatch(Path(words[0]).name) else ("", None)
    is_module = "m" in flags
    if script is None:
        script = next(
            (i for i, word in enumerate(words[1:], 1) if word.endswith(".py") and (folder / word).is_file()), None
        )
    if script is not None and not is_module:
        if not (folder / words[script]).exists():
            raise CheckError(f"The script {words[script]} was not found in {folder}; nothing was run.")
        found[script] = os.path.abspath(folder / words[script])  # as Python itself does
    for word in words[1 if script is None else script + 1 :]:
        _check_argument(word, is_after_script=script is not None)
    return Command(
        given=tuple(words), words=tuple(found), is_module=is_module, ignores_variables=bool({"E", "I"} & set(flags))
    )


def override(name: str, value: str | int | Path) -> str:
    """Return a Hydra override, quoted where Hydra's grammar asks for it."""
    text = str(value)
    if not _PLAIN_VALUE.fullmatch(text):
        # Hydra 1.3: in quotes a backslash stands for itself, but where a quote follows
        text = _BEFORE_QUOTE.sub(lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
        text = f"'{text}'"
    return f"{name}={text}"


def _script_of(words: Sequence[str]) -> tuple[str, int | None]:
    """Return the one-letter options of Python and the position of its script or module; None with ``-c``."""
    flags, index = "", 1
    while index < len(words):
        word = words[index]
        index += 1
        if word == "-":
            break
        if not word.startswith("-"):
            return flags, index - 1
        if word.startswith("--"):
            index += word in _WITH_VALUE
            continue
        for position, letter in enumerate(word[1:], 1):
            flags += letter
            rest = word[position + 1 :]
            if letter == "c":
                return flags, None
            if letter == "m":
                return flags, index - 1 if rest else index
            if letter in "WX":
                index += not rest
                break
    raise CheckError(f"{' '.join(words)} names no script, and a check runs one twice: {_EXAMPLE}")


def _check_argument(word: str, *, is_after_script: bool) -> None:
    if _OURS.match(word):
        raise CheckError(
            f"{word} is what a check gives the script itself, once to record and once to verify; leave it out. Other "
            "options of the presets are fine, such as determinism.level=state."
        )
    if word == "--multirun" or (word in _SWEEPS and is_after_script):
        raise CheckError(
            f"{word} makes several jobs of one command, and a check compares one with itself. Check each job, or "
            "record and verify the sweep: +determinism=record, then +determinism=verify."
        )
