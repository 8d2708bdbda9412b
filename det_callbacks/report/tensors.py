"""How the tensors of checkpoints, and of modules side by side, differ, as text."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from det_callbacks.report.console import Section, Table, at_most, count, size, to_text

if TYPE_CHECKING:
    from det_callbacks.checkpoint.check import CheckpointReport, EntryDifference
    from det_callbacks.numerics.result import NumericsReport, TensorComparison

MAX_ENTRIES = 20  # of a checkpoint that a message names

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


def checkpoint_report(report: "CheckpointReport") -> list[Section]:
    """Return what a check found."""
    num_entries, two = count(sum(report.sections.values()), "entry"), f"{report.path} and {report.other}"
    if report.entries and report.other is not None:
        title = f"{two} differ in {count(len(report.entries), 'entry')}"
        return [Section(title=title, style="bold red", code=[*map(_difference, report.entries)])]
    if not report.equal:
        return [Section(title=mismatch_text(report), style="bold red")]
    if report.other is not None:
        also = "" if report.has_same_bytes else "; the files' bytes differ"
        return [Section(title=f"{two} hold the same: {num_entries}{also}", style="green")]
    items = [f"{num_entries}, {count(report.num_tensors, 'tensor')} among them, {size(report.num_bytes)}"]
    if report.sidecar is not None:
        saved, run = report.sidecar, report.sidecar.run or {}
        when = "before the first step" if saved.step is None else f"after step {saved.step} in epoch {saved.epoch}"
        items.insert(0, f"saved {when}, run {run.get('id')}")
    return [Section(title=f"{report.path} is what was saved, in all its bytes", style="green", items=items)]


def mismatch_text(report: "CheckpointReport") -> str:
    """Return what is wrong with a checkpoint, what was still right, and what to do."""
    num_compared = sum(report.sections.values())
    lines = [f"{report.path} is not what was saved."]
    lines += [f"  {line}" for line in at_most(MAX_ENTRIES, [*map(_difference, report.entries)])]
    lines += [f"  resume: {name} is missing beside it, or of another save" for name in report.missing_files]
    right = num_compared - sum(entry.kind != "extra" for entry in report.entries)
    lines.append(f"{right:,} of {count(num_compared, 'entry')} are what was saved.")
    if not report.entries and not report.has_same_bytes:
        lines.append("The file's bytes differ, and yet no entry does: the change is in what is none, or in padding.")
    lines.append("Use another checkpoint, or restore this one and the file of its digests from a copy.")
    return "\n".join(lines)


def _difference(entry: "EntryDifference") -> str:
    if entry.kind == "structure":
        return f"{entry.name} was {entry.reference}, and is {entry.current}"
    if entry.kind != "content":
        return f"{entry.name} {'is missing' if entry.kind == 'missing' else 'is there, and was not before'}"
    if entry.num_differing is None:
        values = "" if entry.reference is None else f" (it was {entry.reference}, and is {entry.current})"
        return f"{entry.name} differs{values}"
    ulps = "" if entry.max_ulps is None else f", by up to {entry.max_ulps:,} ULPs"
    return f"{entry.name} differs: {entry.num_differing:,} of {entry.num_elements:,} elements{ulps}"


def unrestored_line(path: str) -> str:
    """Return the line of a checkpoint that Lightning alone resumes."""
    return (
        f"det_callbacks: {path} is resumed by Lightning alone: no state of generators and data with its "
        "digests stands beside it, so with shuffling, augmentation or dropout the run will not be the same run"
    )


def uncovered_save_line(path: str) -> str:
    """Return the line of a checkpoint beside which nothing is written."""
    return (
        f"det_callbacks: {path} gets no digests and no exact resume, nor do others like it: it is remote, or not on "
        "the disk when its save returns (AsyncCheckpointIO writes in the background)"
    )


def numerics_text(report: "NumericsReport") -> str:
    """Return a report as plain text: the outcome, where to look first, and by how much what differs."""
    title = "EQUAL" if report.equal else "WITHIN TOLERANCE" if report.close else "BEYOND TOLERANCE"
    deciding = [found for found in report.comparisons if found.decides]
    others, beyond = sum(not found.equal for found in deciding), sum(not found.close for found in deciding)
    sides = f"{report.control} against {report.base}, {count(report.num_iterations, 'iteration')}"
    outcome = f"{others:,} with other bits, {beyond or 'none'} beyond the tolerance" if others else "all bits agree"
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
    ours, theirs, numbers = found.base or "missing", found.control or "missing", found.numbers
    if found.kind != "content" or numbers is None or numbers.worst_values is None:
        return f"{ours} in the base, {theirs} in the control"
    place = f" at {list(numbers.worst)}" if numbers.worst else ""
    values = f"{numbers.worst_values[0]} in the base, {numbers.worst_values[1]} in the control"
    return f"up to {found.excess:.3g} x the tolerance; {values}{place}"


def _largest(values: Iterable[float | None]) -> str:
    value = max((value for value in values if value is not None), default=None)
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
