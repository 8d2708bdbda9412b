"""A report as one HTML file that loads and runs nothing; all text of a run is foreign, and Jinja2 escapes it."""

import re
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from det_callbacks.errors import DetCallbacksError
from det_callbacks.report.console import Section, Table, count
from det_callbacks.report.html.model import RANK_COLUMNS, HeatMap, build_maps
from det_callbacks.report.verdict import coverage_report, difference_report, head_report
from det_callbacks.runs.files import replace_atomically
from det_callbacks.runs.store import Run
from det_callbacks.verdict import Verdict


def write_report(path: str | Path, verdict: Verdict, *, reference: str | Path, current: str | Path) -> Path:
    """Write the HTML report on two runs, atomically; an existing file is replaced.

    It takes 5 to 20 milliseconds for each step that differs, at 5,000 sites, and at most 2 MB on disk.

    Args:
        path: of the file.
        verdict: on the runs.
        reference: folder of the reference.
        current: folder of the run that was compared, or of a verification.

    Returns:
        The path.

    Raises:
        DetCallbacksError: the file cannot be written.
        ReferenceNotFoundError: there is no run at one of the paths.
        ReferenceFormatError: a file of a run is damaged.
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
    environment.filters.update(count=count, number="{:,}".format, size=_size, strokes=_strokes, diamonds=_diamonds)
    rank_table = Table(columns=RANK_COLUMNS, rows=[one.ranks_row for one in maps])
    ranks = [Section(title="Ranks", table=rank_table)] if len(maps) > 1 else []
    sections = [*difference_report(verdict), *ranks, *coverage_report(verdict)]
    names = [re.split(r", | \(", section.title)[0] for section in sections]
    content = environment.get_template("report.html.j2").render(
        verdict=verdict,
        head=head_report(verdict)[2:],
        names={name: names.index(name) for name in names},
        sections=sections,
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


def _size(heat_map: HeatMap) -> tuple[int, int, int]:
    """Return the width and the height of a cell in pixels, and every how many columns have a number above them."""
    rows, columns = len(heat_map.labels), heat_map.columns
    width = max(5, min(40, 1000 // len(columns)))
    room = 8 * len(str(columns[-1].first)) + 18
    every = next((number for number in (1, 2, 5, 10, 20, 50, 100) if number * width >= room), 200)
    return width, 22 if rows <= 30 else 16 if rows <= 60 else 13, every


def _strokes(states: str, state: str, height: int) -> str:
    """Return the cells of a column that are in a state, as one path: it is a tenth of as many rectangles."""
    return "".join(f"M0 {row * height}v{height - 1}" for row, letter in enumerate(states) if letter == state)


def _diamonds(states: str, state: str, height: int, width: int) -> str:
    """Return a mark in each of these cells, likewise."""
    half = min(5, height // 3, width // 2 - 1)
    path = f"l{half} {half}-{half} {half}-{half}-{half}z"
    tops = (row * height + height // 2 - half for row, letter in enumerate(states) if letter == state)
    return "".join(f"M0 {top}{path}" for top in tops)
