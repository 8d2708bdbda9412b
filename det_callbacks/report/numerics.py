"""By how much two modules differ, as tables."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from det_callbacks.report.console import Section, Table, count, to_text

if TYPE_CHECKING:
    from det_callbacks.numerics.result import NumericsReport, TensorComparison

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
    """Return a report as plain text: the outcome, where to look first, and by how much what differs."""
    title = "EQUAL" if report.equal else "WITHIN TOLERANCE" if report.close else "BEYOND TOLERANCE"
    deciding = [found for found in report.comparisons if found.decides]
    differing, beyond = sum(not found.equal for found in deciding), sum(not found.close for found in deciding)
    sides = f"{report.control} against {report.base}, {count(report.num_iterations, 'iteration')}"
    outcome = (
        f"{differing:,} with other bits, {beyond or 'none'} beyond the tolerance" if differing else "all bits agree"
    )
    lines = [f"{sides}: {count(len(deciding), 'tensor')} compared, {outcome}."]
    named = {f"The first {'with other bits' if report.close else 'beyond its tolerance'}": report.first}
    named["The largest, submodule outputs aside"] = report.worst
    for what, found in named.items():
        if found is not None:
            place = f"{_PHASES[found.phase]} {found.name} in iteration {found.iteration}"
            lines.append(f"{what}: {place}: {_how(found)}.")
    return to_text([Section(title=title, lines=lines), Section(table=_summary(report)), Section(lines=report.notes)])


def _summary(report: "NumericsReport") -> Table:
    rows = []
    for phase, name in _PHASES.items():
        found = [one for one in report.comparisons if one.phase == phase]
        differing = [one for one in found if not one.equal]
        numbers = [one.numbers for one in differing if one.numbers is not None]
        counts = (len(found), len(differing), sum(not one.close for one in found))
        sizes = (_largest(getattr(one, size) for one in numbers) for size in _SIZES.values())
        since = f"iteration {min(one.iteration for one in differing)}" if differing else "-"
        rows += [(name, *counts, *sizes, _largest(one.excess for one in differing), since)] if found else []
    columns = ("compared", "tensors", "differ", "beyond", *_SIZES, "x tolerance", "differ since")
    return Table(columns=columns, rows=rows)


def _how(found: "TensorComparison") -> str:
    """Return in a few words how the two sides differ."""
    ours, theirs, numbers = found.base or "missing", found.control or "missing", found.numbers
    if found.kind != "content" or numbers is None or numbers.worst_values is None:
        return f"{ours} in the base, {theirs} in the control"
    place = f" at {list(numbers.worst)}" if numbers.worst else ""
    values = f"{numbers.worst_values[0]} in the base, {numbers.worst_values[1]} in the control"
    return f"up to {found.excess:.3g} x the tolerance; {values}{place}"


def _largest(values: Iterable[float | None]) -> str:
    value = max((value for value in values if value is not None), default=None)
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
