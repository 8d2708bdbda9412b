"""By how much two modules differ, as tables."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console

from det_callbacks.report.console import count, print_line, print_table, to_text

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
_SUMMARY = ("compared", "tensors", "differ", "beyond", "max abs", "max rel", "max ULPs", "x tolerance", "differ since")
_COLUMNS = ("iteration", "compared", "name", "elements differing", "max abs", "max rel", "max ULPs", "x tolerance")
_SIZES = ("max_absolute", "max_relative", "max_ulps")
_NUMBERS = "tensors differ beyond iteration"


def numerics_text(report: "NumericsReport") -> str:
    """Return a report as plain text: the outcome, where to look first, a table, and what differs most."""
    return to_text(lambda console: _render(report, console))


def _render(report: "NumericsReport", console: Console) -> None:
    print_line(console, "EQUAL" if report.equal else "WITHIN TOLERANCE" if report.close else "BEYOND TOLERANCE")
    print_line(console, _outcome(report))
    if report.first is not None:
        what = "The first with other bits" if report.close else "The first beyond its tolerance"
        place = f"{_PHASES[report.first.phase]} {report.first.name} in iteration {report.first.iteration}"
        follows = "" if report.close else " What comes after it may follow from it."
        print_line(console, f"{what}: {place}: {_how(report.first)}.{follows}")
    print_line(console)
    print_table(console, _SUMMARY, _summary_rows(report), numbers=_NUMBERS)
    title, listed = "Beyond the tolerance: each tensor when it first is, in the order of the computation", report.beyond
    if report.close:
        title = "Other bits: each tensor when it is nearest to its tolerance"
        deciding = [found for found in report.differing if found.decides]
        listed = tuple(sorted(deciding, key=lambda found: -found.excess))
    once: dict[tuple[str, str], TensorComparison] = {}
    for found in listed:
        once.setdefault((found.phase, found.name), found)
    if once:
        print_line(console)
        print_line(console, title)
        rows = [_row(found) for found in [*once.values()][:MAX_ROWS]]
        print_table(console, (*_COLUMNS, "how"), rows, numbers=_NUMBERS)
    if len(once) > MAX_ROWS:
        print_line(console, f"and {len(once) - MAX_ROWS:,} more")
    notes = [*report.notes]
    if report.close and report.beyond:
        notes.append("Outputs of submodules decide nothing: they show where a difference starts.")
    for note in ("", *notes) if notes else ():
        print_line(console, note)


def _outcome(report: "NumericsReport") -> str:
    deciding = [found for found in report.comparisons if found.decides]
    differing = sum(not found.equal for found in deciding)
    beyond = sum(not found.close for found in deciding)
    sides = f"{report.control} against {report.base}, {count(report.num_iterations, 'iteration')}"
    if not differing:
        return f"{sides}: {count(len(deciding), 'tensor')} compared, all bits agree."
    other = f"{differing:,} have other bits" if differing != 1 else "1 has other bits"
    outside = "none is" if not beyond else "1 is" if beyond == 1 else f"{beyond:,} are"
    return f"{sides}: {count(len(deciding), 'tensor')} compared, {other}, {outside} beyond the tolerance."


def _summary_rows(report: "NumericsReport") -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for phase, name in _PHASES.items():
        found = [one for one in report.comparisons if one.phase == phase]
        if not found:
            continue
        differing = [one for one in found if not one.equal]
        numbers = [one.numbers for one in differing if one.numbers is not None]
        counts = (len(found), len(differing), sum(not one.close for one in found))
        sizes = (_largest(getattr(one, size) for one in numbers) for size in _SIZES)
        since = f"iteration {min(one.iteration for one in differing)}" if differing else "-"
        rows.append((name, *map("{:,}".format, counts), *sizes, _largest(one.excess for one in differing), since))
    return rows


def _row(found: "TensorComparison") -> tuple[str, ...]:
    numbers, sizes = found.numbers, ["-"] * 4
    if numbers is not None:
        differing = f"{numbers.num_differing:,} of {numbers.num_elements:,}"
        sizes = [differing, *(_number(getattr(numbers, size)) for size in _SIZES)]
    return (str(found.iteration), _PHASES[found.phase], found.name, *sizes, _number(found.excess), _how(found))


def _how(found: "TensorComparison") -> str:
    """Return in a few words how the two sides differ."""
    if found.kind == "missing":
        return f"{found.base} in the base, missing in the control"
    if found.kind == "extra":
        return f"missing in the base, {found.control} in the control"
    numbers = found.numbers
    if found.kind == "structure" or numbers is None or numbers.worst_values is None:
        return f"{found.base} in the base, {found.control} in the control"
    values = f"{numbers.worst_values[0]} in the base, {numbers.worst_values[1]} in the control"
    place = f" at {list(numbers.worst)}" if numbers.worst else ""
    return f"up to {_number(found.excess)} x the tolerance; {values}{place}"


def _largest(values: Iterable[float | None]) -> str:
    return _number(max((value for value in values if value is not None), default=None))


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
