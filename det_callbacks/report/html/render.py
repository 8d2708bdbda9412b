"""A report as one HTML file that loads and runs nothing; all text of a run is foreign, and Jinja2 escapes it."""

from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from det_callbacks.errors import DetCallbacksError
from det_callbacks.report.console import count
from det_callbacks.report.html.model import build_maps
from det_callbacks.report.verdict import details_report, head_report
from det_callbacks.runs.files import replace_atomically
from det_callbacks.runs.store import Run
from det_callbacks.verdict import Verdict


def write_report(path: str | Path, verdict: Verdict, *, reference: str | Path, current: str | Path) -> Path:
    """Write the HTML report on two runs, atomically; an existing file is replaced.

    Raises DetCallbacksError where the file cannot be written, ReferenceFormatError where one of a run is damaged.
    """
    path = Path(path)
    maps, num_left_out = build_maps(verdict, *(Run.open(run, check_steps=False) for run in (reference, current)))
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(count=count, number="{:,}".format, path=_path)
    content = environment.get_template("report.html.j2").render(
        verdict=verdict,
        head=head_report(verdict)[1:],
        sections=details_report(verdict),
        maps=maps,
        num_left_out=num_left_out,
        version=version("det_callbacks"),
    )
    try:
        replace_atomically(path, content.encode(errors="backslashreplace"))
    except OSError as error:
        raise DetCallbacksError(
            f"The report cannot be written to {path} ({error.strerror or error}). The verdict stands all the same; "
            "name a file in a folder that is there and can be written to.",
            str(path),
        ) from error
    return path


def _path(states: str, state: str, top: int, drawn: str) -> str:
    """Return what is drawn in each cell of a column that is in a state, as one path: a tenth of as many rectangles."""
    return "".join(f"M0 {row * 16 + top}{drawn}" for row, letter in enumerate(states) if letter == state)
