"""The text of source lines that a run names, where their files are at hand.

A run is data from anywhere: the names in it are followed only to Python files below the working directory.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

CONTEXT = 2
"""Lines shown before and after one that is named."""

_MAX_BYTES = 2_000_000
_MAX_WIDTH = 200
_PLACE = re.compile(r"(?P<file>.+):(?P<line>\d{1,7}) in (?P<function>.+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """One line as it stands in its file now, which need not be as it stood when the run was recorded."""

    number: int
    text: str
    is_named: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceText:
    """A place in the source, with its text where that could be read: "train.py:41 in forward"."""

    place: str
    lines: tuple[SourceLine, ...]


def read_sources(places: Sequence[str], root: Path) -> tuple[SourceText, ...]:
    """Return the places with the text around them; without text where the file is not there or not to be followed.

    Args:
        places: as a run names them.
        root: folder that the files have to be in, and that their names begin at.
    """
    return tuple(SourceText(place=place, lines=_read(place, root)) for place in places)


def _read(place: str, root: Path) -> tuple[SourceLine, ...]:
    known = _PLACE.fullmatch(place)
    if known is None:
        return ()
    name = PurePosixPath(known["file"])
    if name.is_absolute() or ".." in name.parts or name.suffix != ".py" or "\0" in known["file"]:
        return ()
    named = int(known["line"])
    lines = _lines(root / name, root)
    if not 1 <= named <= len(lines):
        return ()
    first, last = max(1, named - CONTEXT), min(len(lines), named + CONTEXT)
    return tuple(
        SourceLine(number=number, text=lines[number - 1][:_MAX_WIDTH], is_named=number == named)
        for number in range(first, last + 1)
    )


@lru_cache(maxsize=8)
def _lines(path: Path, root: Path) -> tuple[str, ...]:
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(root.resolve()) or not real.is_file() or real.stat().st_size > _MAX_BYTES:
            return ()
        return tuple(real.read_text(encoding="utf-8", errors="replace").splitlines())
    except (OSError, ValueError, RuntimeError):  # gone, not readable, no name that a file can have, or a loop of links
        return ()
