"""Source lines of a run: how sites name them, and the files with their text."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from det_callbacks.digest.host import digest_bytes, format_digest
from det_callbacks.runs.files import SOURCES, make_folder, parse_file, replace_atomically
from det_callbacks.runs.program import without_surrogates

FUSED = "fused: "
"""Begins the source of a kernel that computes several ops: "fused: gelu
(model.py:12), add (model.py:13)".
"""


def write_source_text(folder: Path, text: Mapping[str, Sequence[str]]) -> None:
    """Write the text of source lines: "train.py:41" -> the lines 40, 41 and 42."""
    content = msgspec.json.encode(
        {without_surrogates(place): lines for place, lines in text.items()}, order="sorted"
    )
    path = folder / SOURCES / f"{format_digest(digest_bytes(content))}.json"
    if not path.exists():
        make_folder(path.parent)
        replace_atomically(path, content)


def read_source_text(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return the text of source lines, except lines that changed between attempts."""
    texts: dict[str, set[tuple[str, ...]]] = {}
    for path in sorted((folder / SOURCES).glob("*.json")):
        for place, lines in parse_file(path, partial(_parse, digest=path.stem)).items():
            texts.setdefault(place, set()).add(lines)
    return {place: lines.pop() for place, lines in texts.items() if len(lines) == 1}


def _parse(content: bytes, *, digest: str) -> dict[str, tuple[str, ...]]:
    text = msgspec.json.decode(content, type=dict[str, tuple[str, ...]])
    if digest != format_digest(digest_bytes(content)):
        raise ValueError("its content does not match the digest in its name")
    if not all(place.rpartition(":")[2].isdecimal() for place in text):
        raise ValueError("a place in it has no line number")
    return text


def first_line(source: Sequence[str]) -> str:
    """Return the first source line of a site that is one line; "" if there is none."""
    return next((line for line in source if not line.startswith(FUSED)), "")


def place_and_function(line: str) -> tuple[str, str]:
    """Return the parts of a source line: "train.py:41" and "forward"; "" for what it lacks."""
    place, _, function = line.rpartition(" in ")
    return place, function
