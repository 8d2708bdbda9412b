"""By how much two modules differ, as tables."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from det_callbacks.report.console import Section, Table, count, to_text

if TYPE_CHECKING:
    from det_callbacks.numerics.result import NumericsReport, TensorComparison

MAX_ROWS = 12
"""Rows of the list; all of them stand in the JSON."""

_PHASES = {
    "initial": "initial state",
    "module": "submodule output",
    "output": "output",
    "loss": "loss",
    "gradient": "gradient",
    "parameter": "parameter after the step",
    "buffer": "buffer after the step",
}
_SIZES = {"max abs": "max_absolute", "max rel": "max_relative", "max ULPs": "max_ulps"}


def numerics_text(report: "NumericsReport") -> str:
    """Return a report as plain text: the outcome, where to look first, a table, and what differs most."""
    title = "EQUAL" if report.equal else "WITHIN TOLERANCE" if report.close else "BEYOND TOLERANCE"
    lines = [_outcome(report)]
    if report.first is not None:
        what = "The first with other bits" if report.close else "The first beyond its tolerance"
        place = f"{_PHASES[report.first.phase]} {report.first.name} in iteration {report.first.iteration}"
        follows = "" if report.close else " What comes after it may follow from it."
        lines.append(f"{what}: {place}: {_how(report.first)}.{follows}")
    sections = [Section(title=title, lines=lines), Section(table=_summary(report))]
    title, found = "Beyond the tolerance: each tensor when it first is, in the order of the computation", report.beyond
    if report.close:
        title = "Other bits: each tensor when it is nearest to its tolerance"
        found = tuple(sorted((one for one in report.differing if one.decides), key=lambda one: -one.excess))
    once: dict[tuple[str, str], TensorComparison] = {}
    for one in found:
        once.setdefault((one.phase, one.name), one)
    if once:
        columns = ("iteration", "compared", "name", "elements differing", *_SIZES, "x tolerance")
        table = Table(columns=columns, rows=[_row(one) for one in once.values()], limit=MAX_ROWS)
        sections.append(Section(title=title, table=table))
    notes = [*report.notes]
    if report.close and report.beyond:
        notes.append("Outputs of submodules decide nothing: they show where a difference starts.")
    return to_text([*sections, Section(lines=notes)])


def _outcome(report: "NumericsReport") -> str:
    deciding = [found for found in report.comparisons if found.decides]
    differing = sum(not found.equal for found in deciding)
    beyond = sum(not found.close for found in deciding)
    sides = f"{report.control} against {report.base}, {count(report.num_iterations, 'iteration')}"
    if not differing:
        return f"{sides}: {count(len(deciding), 'tensor')} compared, all bits agree."
    other = f"{differing:,} {'has' if differing == 1 else 'have'} other bits"
    outside = f"{beyond or 'none'} {'are' if beyond > 1 else 'is'} beyond the tolerance"
    return f"{sides}: {count(len(deciding), 'tensor')} compared, {other}, {outside}."


def _summary(report: "NumericsReport") -> Table:
    rows = []
    for phase, name in _PHASES.items():
        found = [one for one in report.comparisons if one.phase == phase]
        if not found:
            continue
        differing = [one for one in found if not one.equal]
        numbers = [one.numbers for one in differing if one.numbers is not None]
        counts = (len(found), len(differing), sum(not one.close for one in found))
        sizes = (_largest(getattr(one, size) for one in numbers) for size in _SIZES.values())
        since = f"iteration {min(one.iteration for one in differing)}" if differing else "-"
        rows.append((name, *counts, *sizes, _largest(one.excess for one in differing), since))
    columns = ("compared", "tensors", "differ", "beyond", *_SIZES, "x tolerance", "differ since")
    return Table(columns=columns, rows=rows)


def _row(found: "TensorComparison") -> tuple[object, ...]:
    numbers = found.numbers
    sizes = ["-" if numbers is None else _number(getattr(numbers, size)) for size in _SIZES.values()]
    differing = _how(found) if numbers is None else f"{numbers.num_differing:,} of {numbers.num_elements:,}"
    return (found.iteration, _PHASES[found.phase], found.name, differing, *sizes, _number(found.excess))


def _how(found: "TensorComparison") -> str:
    """Return in a few words how the two sides differ."""
    base, control = found.base or "missing", found.control or "missing"
    numbers = found.numbers
    if found.kind != "content" or numbers is None or numbers.worst_values is None:
        return f"{base} in the base, {control} in the control"
    place = f" at {list(numbers.worst)}" if numbers.worst else ""
    values = f"{numbers.worst_values[0]} in the base, {numbers.worst_values[1]} in the control"
    return f"up to {_number(found.excess)} x the tolerance; {values}{place}"


def _largest(values: Iterable[float | None]) -> str:
    return _number(max((value for value in values if value is not None), default=None))


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
