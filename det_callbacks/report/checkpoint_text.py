"""Checkpoints and their digests as text."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from det_callbacks.report.closing import count, size
from det_callbacks.report.tables import print_table

if TYPE_CHECKING:
    from det_callbacks.checkpoint import CheckpointReport, EntryDifference

MAX_ENTRIES = 20
"""Entries that a message names; all of them stand in the JSON."""


def render_checkpoint(report: "CheckpointReport", console: Console) -> None:
    """Draw what a check found."""
    if report.other is not None:
        console.print(Text(_two_line(report), style="green" if report.equal else "bold red"))
        if report.entries:
            _print_entries(console, report.entries)
        return
    if not report.equal:
        console.print(Text(mismatch_text(report), style="bold red"))
        return
    console.print(Text(f"{report.path} is what was saved{_opened(report)}", style="green"))
    if report.sidecar is not None:
        console.print(Text(_saved(report)))
    rows = [(section, count_of) for section, count_of in report.sections.items()]
    print_table(console, ["section", "entries"], rows, numbers="entries")
    console.print(Text(f"{count(report.num_tensors, 'tensor')}, {size(report.num_bytes)}"))


def mismatch_text(report: "CheckpointReport") -> str:
    """Return what is wrong with a checkpoint, what was still right, and what to do."""
    lines = [f"{report.path} is not what was saved{_likely(report)}."]
    lines += [f"  {entry_text(entry)}" for entry in report.entries[:MAX_ENTRIES]]
    if len(report.entries) > MAX_ENTRIES:
        lines.append(f"  and {len(report.entries) - MAX_ENTRIES:,} more")
    lines += [f"  resume: {name} is missing beside it" for name in report.missing_files]
    num_compared = sum(report.sections.values())
    if not report.entries and not report.has_same_bytes:
        lines.append(
            f"  The file's bytes differ, and yet all {count(num_compared, 'entry').replace('entrys', 'entries')} in it "
            "have the bits that were saved: the change is in what is no entry, or in padding."
        )
    elif report.is_opened:
        right = num_compared - sum(entry.kind != "extra" for entry in report.entries)
        lines.append(f"{right:,} of {_entries(num_compared)} are what was saved.")
    lines.append("Use another checkpoint, or restore this one and the file of its digests from a copy.")
    return "\n".join(lines)


def entry_text(entry: "EntryDifference") -> str:
    """Return one difference in a line."""
    if entry.exchanged_with is not None:
        return f"{entry.section}: {entry.path} and {entry.exchanged_with} are exchanged"
    if entry.kind == "missing":
        return f"{entry.name} is missing"
    if entry.kind == "extra":
        return f"{entry.name} was not saved, and is there"
    if entry.kind == "structure":
        return f"{entry.name} was saved as {entry.reference}, and is {entry.current}"
    if entry.num_differing is not None:
        return f"{entry.name} differs: {_counts(entry)}"
    digests = "" if entry.reference is None else f" ({entry.reference} was saved, {entry.current} is there)"
    return f"{entry.name} differs{digests}"


def missing_sidecar_line(path: str) -> str:
    """Return the line of a checkpoint that was loaded without anything to compare it with."""
    return f"det_callbacks: {path} was loaded unchecked: no digests stand beside it"


def unrestored_line(path: str) -> str:
    """Return the line of a checkpoint that Lightning alone resumes."""
    return (
        f"det_callbacks: {path} is resumed by Lightning alone: no state of generators and data stands beside "
        "it, so with shuffling, augmentation or dropout the run will not be the same run"
    )


def remote_save_line(path: str) -> str:
    """Return the line of a checkpoint that is saved to where nothing is written beside it."""
    return f"det_callbacks: checkpoints on remote paths, such as {path}, get no digests: save to a disk and copy both"


def unfinished_save_line(path: str) -> str:
    """Return the line of a checkpoint that was not written when its save returned."""
    return f"det_callbacks: the checkpoint IO had not written {path} when its save returned: it gets no digests"


def _entries(number: int) -> str:
    return f"{number:,} {'entry' if number == 1 else 'entries'}"


def _two_line(report: "CheckpointReport") -> str:
    if report.equal:
        same = "" if report.has_same_bytes else "; the files' bytes differ"
        return f"{report.path} and {report.other} hold the same: {_entries(sum(report.sections.values()))}{same}"
    return f"{report.path} and {report.other} differ in {_entries(len(report.entries))}"


def _print_entries(console: Console, entries: "Sequence[EntryDifference]") -> None:
    words = {"missing": "only in the first", "extra": "only in the second"}
    rows = []
    for entry in entries:
        what = words.get(entry.kind, "")
        if entry.kind == "structure":
            what = f"{entry.reference} and {entry.current}"
        elif entry.kind == "content":
            what = _counts(entry) or f"{entry.reference} and {entry.current}"
            if entry.exchanged_with is not None:
                what = f"exchanged with {entry.exchanged_with}"
        rows.append((entry.section, entry.name.removeprefix(f"{entry.section}: "), what))
    print_table(console, ["section", "entry", "difference"], rows)


def _counts(entry: "EntryDifference") -> str:
    if entry.num_differing is None:
        return ""
    ulps = "" if entry.max_ulps is None else f", by up to {entry.max_ulps:,} ULPs"
    return f"{entry.num_differing:,} of {entry.num_elements:,} elements{ulps}"


def _opened(report: "CheckpointReport") -> str:
    if report.is_opened:
        return ", in the file's bytes and in every entry"
    if set(report.sections) == {"files"}:
        return ", in the bytes of every file"
    return ", in the file's bytes; its entries were not opened, since weights_only=True refuses a class in it"


def _saved(report: "CheckpointReport") -> str:
    assert report.sidecar is not None
    context = report.sidecar.context
    parts = [f"saved after step {context.step}" if context.step is not None else "saved before the first step"]
    if context.epoch is not None:
        parts.append(f"in epoch {context.epoch}")
    return " ".join(parts) + _run(context.run)


def _run(run: Mapping[str, Any] | None) -> str:
    if run is None:
        return ""
    reference = f", {run['reference']}" if run.get("reference") else ""
    return f", run {run.get('id')} ({run.get('mode')}{reference})"


def _likely(report: "CheckpointReport") -> str:
    """Say so where nearly nothing agrees: the file was replaced, or has another's digests beside it."""
    num_compared = sum(report.sections.values())
    tensors = [entry for entry in report.entries if entry.section == "state_dict"]
    if report.has_same_bytes or not tensors or len(tensors) * 2 <= report.sections.get("state_dict", num_compared):
        return ""
    return ": the digests beside it are those of another checkpoint"
