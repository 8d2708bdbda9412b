"""A report as one HTML file that loads nothing: styles, scripts and data stand in it.

All text of a run is foreign: Jinja2 escapes it, the page's script puts it into text nodes only, and the page's policy
runs the three scripts whose digests it names and no other.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from det_callbacks.errors import ReportError
from det_callbacks.report.closing import count
from det_callbacks.report.html.model import Report, build_report
from det_callbacks.report.numbers_text import histogram, how_much, input_lines, place_of, shown_numbers
from det_callbacks.report.verdict_text import KINDS, role_of
from det_callbacks.runs.files import replace_atomically
from det_callbacks.runs.store import Run
from det_callbacks.verdict import Verdict

_HERE = Path(__file__).parent
_LIBRARIES = ("d3.min.js", "plot.umd.min.js")
_WORDS = {"match": "Match", "diverged": "Diverged", "not_comparable": "Not comparable"}


def write_report(path: str | Path, verdict: Verdict, *, reference: str | Path, current: str | Path) -> Path:
    """Write the HTML report on two runs, atomically; an existing file is replaced.

    It takes 5 to 20 milliseconds for each step that differs, at 5,000 sites, and 0.6 MB to 5 MB on disk.

    Args:
        path: of the file.
        verdict: on the runs.
        reference: folder of the reference.
        current: folder of the run that was compared, or of a verification.

    Returns:
        The path.

    Raises:
        ReportError: the file cannot be written.
        ReferenceNotFoundError: there is no run at one of the paths.
        ReferenceFormatError: a file of a run is damaged.
    """
    path = Path(path)
    runs = [Run.open(folder, check_steps=False) for folder in (reference, current)]
    content = render_report(build_report(verdict, *runs, root=Path.cwd()))
    try:
        replace_atomically(path, content.encode(errors="backslashreplace"))
    except OSError as error:
        raise ReportError(
            f"The report cannot be written to {path} ({error.strerror or error}). The verdict stands all the same; "
            "name a file in a folder that is there and can be written to.",
            str(path),
        ) from error
    return path


def render_report(report: Report) -> str:
    """Return the page."""
    scripts = _scripts()
    policy = "; ".join(
        (
            "default-src 'none'",
            "style-src 'unsafe-inline'",
            f"script-src {' '.join(map(_source_digest, scripts))}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return (
        make_environment()
        .get_template("report.html.j2")
        .render(
            report=report,
            verdict=report.verdict,
            word=_WORDS[report.verdict.verdict],
            with_numbers=shown_numbers(report.verdict),
            policy=policy,
            style=Markup(style_sheet()),
            scripts=[Markup(script) for script in scripts],
            data=_data_block(report.maps),
            licences=(_HERE / "vendor" / "THIRD_PARTY.md").read_text(encoding="utf-8"),
            version=version("det_callbacks"),
        )
    )


@lru_cache(maxsize=1)
def make_environment() -> Environment:
    """Return what renders the templates: everything that is put into one is escaped."""
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bins=histogram,
        count=count,
        how_much=how_much,
        input_lines=input_lines,
        place=place_of,
        number=lambda value: f"{value:,}",
        kind_text=KINDS.get,
        role=role_of,
        ranges=_ranges,
    )
    return environment


@lru_cache(maxsize=1)
def _scripts() -> tuple[str, ...]:
    files = [*(_HERE / "vendor" / name for name in _LIBRARIES), _HERE / "templates" / "report.js"]
    return tuple(file.read_text(encoding="utf-8") for file in files)


def style_sheet() -> str:
    """Return the styles of the pages."""
    return (_HERE / "templates" / "report.css").read_text(encoding="utf-8")


def _source_digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _data_block(content: dict[str, Any]) -> Markup:
    """Return JSON that no text in it can end: without the characters that mean something in HTML."""
    text = json.dumps(content, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _ranges(span: Sequence[int]) -> str:
    first, last = span
    return f"step {first}" if first == last else f"steps {first} to {last}"
