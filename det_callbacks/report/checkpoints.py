"""Checkpoints and their digests as text."""

from typing import TYPE_CHECKING

from det_callbacks.report.console import Section, Table, at_most, count, size

if TYPE_CHECKING:
    from det_callbacks.checkpoint import CheckpointReport, EntryDifference
    from det_callbacks.checkpoint.files import Sidecar

MAX_ENTRIES = 20
"""Entries that a message names; all of them stand in the JSON."""


def checkpoint_report(report: "CheckpointReport") -> list[Section]:
    """Return what a check found."""
    style = "green" if report.equal else "bold red"
    if report.other is not None and report.equal:
        entries = count(sum(report.sections.values()), "entry")
        also = "" if report.has_same_bytes else "; the files' bytes differ"
        return [Section(title=f"{report.path} and {report.other} hold the same: {entries}{also}", style=style)]
    if report.other is not None:
        title = f"{report.path} and {report.other} differ in {count(len(report.entries), 'entry')}"
        rows = [(one.section, one.name.removeprefix(f"{one.section}: "), _how(one)) for one in report.entries]
        table = Table(columns=["section", "entry", "difference"], rows=rows)
        return [Section(title=title, style=style, table=table)]
    if not report.equal:
        return [Section(title=mismatch_text(report), style=style)]
    where = "the file's bytes; its entries were not opened, since weights_only=True refuses a class in it"
    if report.is_opened:
        where = "the file's bytes and in every entry"
    elif set(report.sections) == {"files"}:
        where = "the bytes of every file"
    items = [*_saved(report.sidecar), f"{count(report.num_tensors, 'tensor')}, {size(report.num_bytes)}"]
    table = Table(columns=["section", "entries"], rows=[*report.sections.items()])
    return [Section(title=f"{report.path} is what was saved, in {where}", style=style, items=items, table=table)]


def mismatch_text(report: "CheckpointReport") -> str:
    """Return what is wrong with a checkpoint, what was still right, and what to do."""
    num_compared = sum(report.sections.values())
    tensors = [entry for entry in report.entries if entry.section == "state_dict"]
    # where nearly nothing agrees, the file was replaced, or has another's digests beside it
    is_other = not report.has_same_bytes and len(tensors) * 2 > report.sections.get("state_dict", num_compared)
    likely = ": the digests beside it are those of another checkpoint" if is_other and tensors else ""
    lines = [f"{report.path} is not what was saved{likely}."]
    entries = [f"{entry.name} {_how(entry)}" for entry in report.entries]
    lines += [f"  {line}" for line in at_most(MAX_ENTRIES, entries)]
    lines += [f"  resume: {name} is missing beside it, or of another save" for name in report.missing_files]
    if not report.entries and not report.has_same_bytes:
        lines.append(
            f"  The file's bytes differ, and yet all {count(num_compared, 'entry')} in it have the bits that were "
            "saved: the change is in what is no entry, or in padding."
        )
    elif report.is_opened:
        right = num_compared - sum(entry.kind != "extra" for entry in report.entries)
        lines.append(f"{right:,} of {count(num_compared, 'entry')} are what was saved.")
    lines.append("Use another checkpoint, or restore this one and the file of its digests from a copy.")
    return "\n".join(lines)


def _how(entry: "EntryDifference") -> str:
    """Return how an entry differs, to follow its name."""
    if entry.exchanged_with is not None:
        return f"and {entry.exchanged_with} are exchanged"
    if entry.kind in ("missing", "extra"):
        return "is missing" if entry.kind == "missing" else "is there, and was not before"
    if entry.kind == "structure":
        return f"was {entry.reference}, and is {entry.current}"
    if entry.num_differing is None:
        return "differs" + ("" if entry.reference is None else f" (it was {entry.reference}, and is {entry.current})")
    ulps = "" if entry.max_ulps is None else f", by up to {entry.max_ulps:,} ULPs"
    return f"differs: {entry.num_differing:,} of {entry.num_elements:,} elements{ulps}"


def _saved(saved: "Sidecar | None") -> list[str]:
    """Return when a checkpoint was saved, and of which run."""
    if saved is None:
        return []
    text = "saved before the first step" if saved.step is None else f"saved after step {saved.step}"
    text += "" if saved.epoch is None else f" in epoch {saved.epoch}"
    if saved.run is not None:
        reference = f", {saved.run['reference']}" if saved.run.get("reference") else ""
        text += f", run {saved.run.get('id')} ({saved.run.get('mode')}{reference})"
    return [text]


# lines of a fit


def missing_sidecar_line(path: str) -> str:
    """Return the line of a checkpoint that was loaded without anything to compare it with."""
    return f"det_callbacks: {path} was loaded unchecked: no digests stand beside it"


def unrestored_line(path: str, *, has_state: bool) -> str:
    """Return the line of a checkpoint that Lightning alone resumes, though a state may be there."""
    reason = "no state of generators and data stands beside it"
    if has_state:
        reason = f"the file {path}.digests.json, which says that the state beside it belongs to it, is missing"
    return (
        f"det_callbacks: {path} is resumed by Lightning alone: {reason}, so with shuffling, augmentation or dropout "
        "the run will not be the same run"
    )


def uncovered_save_line(path: str, reason: str) -> str:
    """Return the line of a checkpoint beside which nothing is written."""
    return f"det_callbacks: {path} gets no digests: {reason}"
