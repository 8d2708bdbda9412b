"""The text of the source lines that a run's sites name, in one JSON file for each set of lines."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from det_callbacks.digest.host import digest_bytes, format_digest
from det_callbacks.runs.disk import make_folder, replace_atomically
from det_callbacks.runs.files import SOURCES, damaged
from det_callbacks.runs.json_files import read_json
from det_callbacks.runs.program import without_surrogates


def write_source_text(folder: Path, text: Mapping[str, Sequence[str]]) -> None:
    """Write the text of source lines: "train.py:41" -> the lines 40, 41 and 42."""
    content = msgspec.json.encode({without_surrogates(place): lines for place, lines in text.items()}, order="sorted")
    path = folder / SOURCES / f"{format_digest(digest_bytes(content))}.json"
    if not path.exists():
        make_folder(path.parent)
        replace_atomically(path, content)


def read_source_text(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return the text of source lines, except lines that changed between attempts."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for path in sorted((folder / SOURCES).glob("*.json")):
        text = read_json(path, dict[str, tuple[str, ...]])
        if path.stem != format_digest(digest_bytes(path.read_bytes())):
            raise damaged(path, "its content does not match the digest in its name")
        for place, lines in text.items():
            found.setdefault(place, set()).add(lines)
    return {place: lines.pop() for place, lines in found.items() if len(lines) == 1}
