"""How the tensors of checkpoints differ, as text."""

from pathlib import Path
from typing import TYPE_CHECKING

from det_callbacks.report.console import Section
from det_callbacks.text import at_most, count, size

if TYPE_CHECKING:
    from det_callbacks.checkpoint.check import CheckpointReport, EntryDifference

MAX_ENTRIES = 20  # entries of a checkpoint that a message names


def checkpoint_report(report: "CheckpointReport") -> list[Section]:
    num_entries, two = (
        count(sum(report.sections.values()), "entry"),
        f"{report.path} and {report.other}",
    )
    if report.entries and report.other is not None:
        title = f"{two} differ in {count(len(report.entries), 'entry')}"
        return [Section(title=title, style="bold red", code=[*map(_difference, report.entries)])]
    if not report.equal:
        title, *lines = _mismatch(report)
        return [Section(title=title, style="bold red", code=lines)]
    if report.other is not None:
        also = "" if report.has_same_bytes else "; the files' bytes differ"
        return [Section(title=f"{two} hold the same: {num_entries}{also}", style="green")]
    items = [
        f"{num_entries}, {count(report.num_tensors, 'tensor')} among them, {size(report.num_bytes)}"
    ]
    if report.sidecar is not None:
        saved, run = report.sidecar, report.sidecar.run or {}
        when = (
            "before the first step"
            if saved.step is None
            else f"after step {saved.step} in epoch {saved.epoch}"
        )
        items.insert(0, f"saved {when}, run {run.get('id')}")
    return [
        Section(
            title=f"{report.path} matches what was saved, byte for byte", style="green", items=items
        )
    ]


def mismatch_text(report: "CheckpointReport") -> str:
    return "\n".join(_mismatch(report))


def _mismatch(report: "CheckpointReport") -> list[str]:
    num_compared = sum(report.sections.values())
    has_only_other_bytes = not report.entries and not report.has_same_bytes
    problem = (
        "is not the file that was saved: its bytes differ"
        if has_only_other_bytes
        else "does not match what was saved"
    )
    lines = [f"{report.path} {problem}."]
    lines += [f"  {line}" for line in at_most(MAX_ENTRIES, [*map(_difference, report.entries)])]
    lines += [
        f"  resume: {name} is missing next to it, or from a different save"
        for name in report.missing_files
    ]
    right = num_compared - sum(entry.kind != "extra" for entry in report.entries)
    lines.append(f"{right:,} of {count(num_compared, 'entry')} match what was saved.")
    if has_only_other_bytes:
        lines.append(
            "No entry differs: the checkpoint was saved again, or an object changed that is saved "
            "without a digest. If you saved it again yourself, delete "
            f"{Path(report.path).name}.digests.json: the checkpoint then loads unchecked, and "
            "without an exact resume."
        )
    lines.append(
        "Use another checkpoint, or restore this one and the file of its digests from a copy."
    )
    return lines


def _difference(entry: "EntryDifference") -> str:
    if entry.kind == "structure":
        return f"{entry.name} was {entry.reference}, and is {entry.current}"
    if entry.kind != "content":
        return f"{entry.name} {'is missing' if entry.kind == 'missing' else 'is new'}"
    if entry.num_differing is None:
        values = (
            ""
            if entry.reference is None
            else f" (it was {entry.reference}, and is {entry.current})"
        )
        return f"{entry.name} differs{values}"
    ulps = "" if entry.max_ulps is None else f", by up to {entry.max_ulps:,} ULPs"
    return f"{entry.name} differs: {entry.num_differing:,} of {entry.num_elements:,} elements{ulps}"


def unrestored_line(path: str, *, lacks_digests: bool) -> str:
    """Return the line on a checkpoint that Lightning alone resumes."""
    reason, name = "no saved state of generators and data is next to it", Path(path).name
    if lacks_digests:
        reason = (
            f"{name}.resume/ is next to it, but {name}.digests.json is missing. Copy that file "
            "here too"
        )
    return (
        f"det_callbacks: {path} is resumed by Lightning alone: {reason}. "
        "With shuffling, augmentation or dropout, the resumed run differs from an uninterrupted one"
    )


def uncovered_save_line(path: str) -> str:
    """Return the line on a checkpoint that gets no digests."""
    return (
        f"det_callbacks: {path} gets no digests and no exact resume, nor do others like it, "
        "because it is remote, or not on the disk when its save returns (AsyncCheckpointIO writes "
        "in the background)"
    )
