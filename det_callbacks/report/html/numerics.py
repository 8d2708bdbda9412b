"""By how much two modules differ, as one HTML file that loads nothing and runs nothing."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from det_callbacks.errors import ReportError
from det_callbacks.report.html.render import make_environment, style_sheet
from det_callbacks.report.numerics_text import (
    COLUMNS,
    PHASE_TEXT,
    SUMMARY_COLUMNS,
    first_text,
    lists_of,
    notes_of,
    outcome_of,
    outcome_text,
    row_of,
    summary_rows,
)
from det_callbacks.runs.files import replace_atomically

if TYPE_CHECKING:
    from det_callbacks.numerics.result import NumericsReport, TensorComparison

MAX_ROWS = 500
"""Rows of a list; more are counted."""
_MAX_ITERATIONS = 50
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_TONES = {"EQUAL": "match", "WITHIN TOLERANCE": "match", "BEYOND TOLERANCE": "diverged"}


def write_numerics_report(path: str | Path, report: "NumericsReport") -> Path:
    """Write a report as a page, atomically; an existing file is replaced.

    Raises:
        ReportError: the file cannot be written.
    """
    path = Path(path)
    word, _ = outcome_of(report)
    content = (
        make_environment()
        .get_template("numerics.html.j2")
        .render(
            report=report,
            word=word.capitalize(),
            tone=_TONES[word],
            policy=_POLICY,
            style=Markup(style_sheet()),
            outcome=outcome_text(report),
            first=None if report.first is None else first_text(report),
            summary_columns=SUMMARY_COLUMNS,
            summary=summary_rows(report),
            columns=COLUMNS,
            lists=[(title, [row_of(one) for one in rows[:MAX_ROWS]], len(rows)) for title, rows in lists_of(report)],
            max_rows=MAX_ROWS,
            iterations=range(min(report.num_iterations, _MAX_ITERATIONS)),
            growth=_growth(report),
            notes=notes_of(report),
            version=version("det_callbacks"),
        )
    )
    try:
        replace_atomically(path, content.encode(errors="backslashreplace"))
    except OSError as error:
        raise ReportError(
            f"The report cannot be written to {path} ({error.strerror or error}). What was compared stands all the "
            "same; name a file in a folder that is there and can be written to.",
            str(path),
        ) from error
    return path


def _growth(report: "NumericsReport") -> list[tuple[str, list[tuple[str, str]]]]:
    """Return for each kind of tensor a cell for each iteration: its text and its state."""
    rows = []
    for phase, name in PHASE_TEXT.items():
        by_iteration: dict[int, list[TensorComparison]] = {}
        for found in report.comparisons:
            if found.phase == phase and found.iteration < _MAX_ITERATIONS:
                by_iteration.setdefault(found.iteration, []).append(found)
        if by_iteration:
            cells = [
                _cell(by_iteration.get(number, ())) for number in range(min(report.num_iterations, _MAX_ITERATIONS))
            ]
            rows.append((name, cells))
    return rows


def _cell(found: "Sequence[TensorComparison]") -> tuple[str, str]:
    if not found:
        return "", "none"
    if all(one.equal for one in found):
        return "equal", "same"
    excess = max(one.excess for one in found)
    return f"{excess:.3g}", "within" if excess <= 1 else "outside"
