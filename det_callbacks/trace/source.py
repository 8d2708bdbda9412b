"""Source lines of an op: stack frames outside torch, Lightning, Hydra,
accelerate and this package.
"""

import linecache
import os
import re
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

import torch

MAX_LINES = 4
MAX_FRAMES = 200
MAX_COLUMNS = 200

# Not resolved, like paths in frames: an environment may be a symbolic link.
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_TRACED = re.compile(r'File "(.+)", line (\d+), in (.+)')
RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")  # after a graph break
_PATHS: dict[str, str] = {}  # file as shown -> path; "" where two have the same name
_MAX_PLACES = 8192
# (id of a code object, place in it) -> the code object (so its id is not reused),
# its owner, the line as shown
_LINES: dict[tuple[int, int], tuple[CodeType, str, str]] = {}

_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")
# only this file: transformers' models count as user code
_TRAINER = f"transformers{os.sep}trainer.py"


def capture_source(outermost: CodeType | None = None) -> tuple[str, ...]:
    """Return up to four lines of user code, innermost first, as "train.py:41 in forward".

    Without user code below the training loop (an optimizer's update), it returns the innermost line
    of torch. It stops at a frame that runs ``outermost``, and costs about 2
    microseconds plus 0.1 per frame.
    """
    lines: list[str] = []
    line_of_torch: str | None = None
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None or frame.f_code is outermost:
            break
        _, owner, line = _LINES.get((id(frame.f_code), frame.f_lasti)) or _note_line(frame)
        if owner == "user":
            lines.append(line)
            if len(lines) == MAX_LINES:
                break
        elif owner == "loop":
            break
        elif owner == "torch" and line_of_torch is None:
            line_of_torch = line
        frame = frame.f_back
    return tuple(lines) if lines or line_of_torch is None else (line_of_torch,)


def _note_line(frame: FrameType) -> tuple[CodeType, str, str]:
    """Add the line that a frame runs to ``_LINES``, and return its entry."""
    file, function, owner = _describe(frame.f_code.co_filename, frame.f_code.co_name)
    if len(_LINES) >= _MAX_PLACES:
        _LINES.clear()
    entry = _LINES[id(frame.f_code), frame.f_lasti] = (
        frame.f_code,
        owner,
        f"{file}:{frame.f_lineno} in {function}",
    )
    return entry


def line_of_trace(trace: str) -> str:
    """Return the innermost line of user code of a formatted traceback, as
    ``capture_source``; "" if it has none.
    """
    for path, line, function in reversed(_TRACED.findall(trace)):
        file, name, owner = _describe(path, function)
        if owner == "user":
            return f"{file}:{line} in {name}"
    return ""


def read_text(sources: Iterable[tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the text around lines from ``capture_source``: "train.py:41"
    -> the lines 40, 41 and 42.

    It reads a file once, and misses later changes. A line has no text if its file is missing, or if
    two files have the same shown name.
    """
    text = {}
    for place in {line.partition(" in ")[0] for lines in sources for line in lines}:
        file, _, digits = place.rpartition(":")
        content = linecache.getlines(_PATHS.get(file, ""))
        if digits.isdecimal() and (number := int(digits)) <= len(content):
            around = content[max(0, number - 2) : number + 1]
            text[place] = tuple(line.rstrip()[:MAX_COLUMNS] for line in around)
    return text


def is_of_torch(source: tuple[str, ...]) -> bool:
    return len(source) == 1 and source[0].startswith("torch/")


@lru_cache(maxsize=8192)
def _describe(path: str, function: str) -> tuple[str, str, str]:
    """Return file and function as shown, and the kind of code: user, torch,
    loop (of a Trainer) or other.
    """
    shown, owner = _owner_of(path)
    # linecache has notebook cells, too
    is_file = Path(path).is_absolute() or path in linecache.cache
    if owner in ("user", "torch") and _PATHS.setdefault(shown, path if is_file else "") != path:
        _PATHS[shown] = ""
    return shown, RESUMED.sub(r"\1", function), owner


def _owner_of(path: str) -> tuple[str, str]:
    """Return a path as shown, and whose code it is; see ``_describe``."""
    # "<eval_with_key>" is code that torch.fx generated
    if path.startswith((_PACKAGE, "<frozen", "<eval_with_key>")):
        return path, "other"
    if path.startswith(_TORCH):
        is_plumbing = any(
            part in path for part in ("/utils/_python_dispatch", "/_ops.py", "/_compile.py")
        )
        return f"torch/{path.removeprefix(_TORCH)}", "other" if is_plumbing else "torch"
    _, is_installed, shown = path.partition(f"site-packages{os.sep}")
    if is_installed:
        package = shown.partition(os.sep)[0]
        if shown == _TRAINER or (package in _LIGHTNING and "loops" in Path(shown).parts):
            return shown, "loop"
        return shown, "other" if package in (
            *_LIGHTNING,
            "accelerate",
            "hydra",
            "omegaconf",
        ) else "user"
    if path.startswith(sys.base_prefix):
        return path, "other"
    try:
        return Path(path).resolve().relative_to(Path.cwd()).as_posix(), "user"
    except (ValueError, OSError):
        return "/".join(Path(path).parts[-2:]), "user"  # keeps home directories out of runs
