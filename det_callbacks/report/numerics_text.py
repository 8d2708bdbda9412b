"""By how much two modules differ, as tables."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from det_callbacks.report.closing import count
from det_callbacks.report.tables import print_table, to_text

if TYPE_CHECKING:
    from det_callbacks.numerics.result import NumericsReport, TensorComparison

MAX_ROWS = 12
"""Rows of the lists; all of them stand in the JSON."""

PHASE_TEXT = {
    "initial": "initial state",
    "module": "submodule output",
    "input": "input written in place",
    "output": "output",
    "loss": "loss",
    "gradient": "gradient",
    "parameter": "parameter after the step",
    "buffer": "buffer after the step",
}

SUMMARY_COLUMNS = (
    *("compared", "tensors", "differ", "beyond", "max abs", "max rel", "max ULPs", "min cosine", "x tolerance"),
    "differ since",
)
COLUMNS = (
    *("iteration", "compared", "name", "elements differing", "max abs", "max rel", "max ULPs", "cosine", "x tolerance"),
    "what",
)
_NUMBERS = "tensors differ beyond iteration"


def numerics_text(report: "NumericsReport") -> str:
    """Return a report as plain text."""
    return to_text(lambda console: render_numerics(report, console))


def render_numerics(report: "NumericsReport", console: Console) -> None:
    """Draw a report: the outcome, where to look first, a table by what was compared, and what differs most."""
    word, style = outcome_of(report)
    console.print(Text(word, style=style))
    console.print(Text(outcome_text(report)))
    if report.first is not None:
        console.print(Text(first_text(report)))
    console.print()
    print_table(console, SUMMARY_COLUMNS, summary_rows(report), numbers=_NUMBERS)
    for title, rows in lists_of(report):
        console.print()
        console.print(Text(title))
        print_table(console, COLUMNS, [row_of(found) for found in rows[:MAX_ROWS]], numbers=_NUMBERS)
        if len(rows) > MAX_ROWS:
            console.print(Text(f"and {len(rows) - MAX_ROWS:,} more"))
    notes = notes_of(report)
    if notes:
        console.print()
    for note in notes:
        console.print(Text(note))


def outcome_of(report: "NumericsReport") -> tuple[str, str]:
    """Return the outcome in a word, and the style of that word."""
    if report.equal:
        return "EQUAL", "green"
    return ("WITHIN TOLERANCE", "green") if report.close else ("BEYOND TOLERANCE", "bold red")


def outcome_text(report: "NumericsReport") -> str:
    """Return the outcome in a sentence."""
    deciding = [found for found in report.comparisons if found.decides]
    differing = sum(not found.equal for found in deciding)
    beyond = sum(not found.close for found in deciding)
    sides = f"{report.control} against {report.base}, {count(report.num_iterations, 'iteration')}"
    if not differing:
        return f"{sides}: {count(len(deciding), 'tensor')} compared, all bits agree."
    other = f"{differing:,} have other bits" if differing != 1 else "1 has other bits"
    outside = "none is" if not beyond else "1 is" if beyond == 1 else f"{beyond:,} are"
    return f"{sides}: {count(len(deciding), 'tensor')} compared, {other}, {outside} beyond the tolerance."


def first_text(report: "NumericsReport") -> str:
    """Return where to look first, in a sentence."""
    found = report.first
    assert found is not None
    what = "The first with other bits" if report.close else "The first beyond its tolerance"
    text = f"{what}: {PHASE_TEXT[found.phase]} {found.name} in iteration {found.iteration}: {what_of(found)}."
    if not report.close:
        text += " What comes after it may follow from it."
    return text


def lists_of(report: "NumericsReport") -> list[tuple[str, Sequence["TensorComparison"]]]:
    """Return titles and rows of the lists: what is beyond its tolerance in order, else what is nearest to it."""
    if not report.close:
        title = "Beyond the tolerance: each tensor when it first is, in the order of the computation"
        return [(title, _each_once(report.beyond))]
    ranked = sorted((found for found in report.differing if found.decides), key=lambda found: -found.excess)
    return [("Other bits: each tensor when it is nearest to its tolerance", _each_once(ranked))] if ranked else []


def _each_once(comparisons: "Sequence[TensorComparison]") -> "list[TensorComparison]":
    once: dict[tuple[str, str], TensorComparison] = {}
    for found in comparisons:
        once.setdefault((found.phase, found.name), found)
    return list(once.values())


def summary_rows(report: "NumericsReport") -> list[tuple[str, ...]]:
    """Return a row for each kind of tensor."""
    rows: list[tuple[str, ...]] = []
    for phase, name in PHASE_TEXT.items():
        found = [one for one in report.comparisons if one.phase == phase]
        if not found:
            continue
        differing = [one for one in found if not one.equal]
        ulps = [one.max_ulps for one in differing if one.max_ulps is not None]
        cosines = [one.cosine for one in differing if one.cosine is not None]
        rows.append(
            (
                name,
                f"{len(found):,}",
                f"{len(differing):,}",
                f"{sum(not one.close for one in found):,}",
                _number(max((one.max_absolute for one in differing if one.max_absolute is not None), default=None)),
                _number(max((one.max_relative for one in differing if one.max_relative is not None), default=None)),
                f"{max(ulps):,}" if ulps else "-",
                _cosine(min(cosines, default=None)),
                _number(max((one.excess for one in differing), default=None)),
                f"iteration {min(one.iteration for one in differing)}" if differing else "-",
            )
        )
    return rows


def row_of(found: "TensorComparison") -> tuple[str, ...]:
    """Return one comparison as cells."""
    elements = "-" if found.num_differing is None else f"{found.num_differing:,} of {found.num_elements:,}"
    return (
        str(found.iteration),
        PHASE_TEXT[found.phase],
        found.name,
        elements,
        _number(found.max_absolute),
        _number(found.max_relative),
        "-" if found.max_ulps is None else f"{found.max_ulps:,}",
        _cosine(found.cosine),
        _number(found.excess),
        _place_of(found) if found.kind == "content" and found.excess < math.inf else what_of(found),
    )


def what_of(found: "TensorComparison") -> str:
    """Return in a few words how the two sides differ."""
    if found.kind == "missing":
        return f"{found.base} in the base, missing in the control"
    if found.kind == "extra":
        return f"missing in the base, {found.control} in the control"
    if found.kind == "structure":
        return f"{found.base} in the base, {found.control} in the control"
    parts = []
    for name, pair in (("NaN", found.num_nan), ("infinite", found.num_inf)):
        if pair is not None and pair[0] != pair[1]:
            parts.append(f"{pair[0]:,} {name} in the base, {pair[1]:,} in the control")
    if found.num_elements == 1 and found.num_differing is not None and found.index is None and not parts:
        return f"{found.base} in the base, {found.control} in the control"
    place = _place_of(found)
    return "; ".join(parts) or f"up to {_number(found.excess)} x the tolerance{f' {place}' if place else ''}"


def _place_of(found: "TensorComparison") -> str:
    return f"at {list(found.index)}" if found.index else ""


def notes_of(report: "NumericsReport") -> list[str]:
    """Return what else is to be said: NaNs that both sides have, what was compiled, what was not compared."""
    notes = list(report.notes)
    if report.close and report.beyond:
        notes.append("Outputs of submodules decide nothing: they tell where a difference starts.")
    both = sum(1 for found in report.comparisons if found.num_nan is not None and all(found.num_nan))
    if both:
        notes.append(f"NaN on both sides: {count(both, 'tensor')}; a NaN at the same place counts as no difference.")
    if report.left_out:
        parts = [name if number == 1 else f"{name} ({number:,})" for name, number in report.left_out.items()]
        notes.append(f"Not compared: {'; '.join(parts)}.")
    return notes


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return "inf" if math.isinf(value) else f"{value:.3g}"


def _cosine(value: float | None) -> str:
    return "-" if value is None else f"{value:.9g}"
