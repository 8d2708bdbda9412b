"""The command that started a run, as much of it as may stand in a file that is passed around.

That is the script's name and, under Hydra, the overrides of the job, without our own: they say nothing of the training,
and differ between recording and verifying. Arguments of other programs are not recorded: nothing tells which of their
words is a secret.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from det_callbacks.environment import is_secret

WITHHELD = "<withheld>"

_OURS = ("determinism", "callbacks.determinism", "callbacks/determinism")
_SETTINGS = "determinism.settings"
# names of values, also in {nested: {mappings: 1}}
_NAME = re.compile(r"([\w.\-/@]+)\s*[=:]")


def script_words(start: str | Path | None = None) -> list[str]:
    """Return the script that runs, as it would be written after ``python``; [] in an interactive interpreter.

    Args:
        start: where the program was started; None is the working directory. A script that is not below it is shown by
            its name alone.
    """
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return ["-m", str(spec.name).removesuffix(".__main__")]
    script = sys.argv[0] if sys.argv else ""
    if script in ("", "-", "-c"):
        return []
    start = Path.cwd() if start is None else Path(start)
    path = start / script  # which is the script's own path where that is absolute
    return [path.relative_to(start).as_posix() if path.is_relative_to(start) and ".." not in path.parts else path.name]


def command_choice(
    overrides: Sequence[str] | None = None, *, start: str | Path | None = None
) -> dict[str, dict[str, Any]]:
    """Return what started this run, as a choice for ``capture_environment``, which withholds places besides.

    Args:
        overrides: of the Hydra job; None where there is none.
        start: where the program was started; None is the working directory.

    Example:
        >>> command_choice(["lr=0.1", "logger.api_key=abc", "determinism.level=op"])["process"]["argv"][1:]
        ['lr=0.1', 'logger.api_key=<withheld>']
    """
    if overrides is None:
        return {"process": {"argv": script_words(start)}}
    words = [_shown(word) for word in overrides if not _is_ours(word)]
    return {"process": {"argv": [*script_words(start), *words]}}


def _is_ours(override: str) -> bool:
    name = override.lstrip("+~").partition("=")[0]
    if name.startswith(f"{_SETTINGS}."):
        return False  # part of what trains
    return any(name == own or name.startswith(f"{own}.") for own in _OURS)


def _shown(override: str) -> str:
    name, equals, _ = override.partition("=")
    secret = any(is_secret(re.split(r"[./@]", found)[-1]) for found in _NAME.findall(override))
    return f"{name}{equals}{WITHHELD}" if secret else override
