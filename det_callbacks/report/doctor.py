"""The doctor's findings on one screen."""

from typing import TYPE_CHECKING

from det_callbacks.report.console import Section, Table, count, indented

if TYPE_CHECKING:
    from det_callbacks.doctor import Diagnosis


def doctor_report(diagnosis: "Diagnosis") -> list[Section]:
    """Return what is in force, what is not with the line to add, and what differs from a reference."""
    facts, against, missing = diagnosis.facts, diagnosis.against, diagnosis.missing
    place = f"{facts['cpu.model']} ({facts['torch.cpu_capability']}), {facts['cuda']}"
    versions = ", ".join(f"{name} {facts[f'{name}.version']}" for name in ("python", "torch", "lightning"))
    head = [f"{versions}; {count(facts['torch.num_threads'], 'thread')} on {place}"]
    head += [f"Digests of tensors on {facts['digest']}"] if "digest" in facts else []
    asked = []
    for one in diagnosis.settings:
        if one.state == "left alone":
            continue
        line = f"{one.state:<16}{one.name} = {one.wanted!r}"
        asked.append(line + (f", here {one.in_force!r}: {one.effect}" if one.state != "in force" else ""))
        asked += [f"{'':<16}{one.to_do}"] if one.to_do else []
    asker = "the defaults of DeterminismSettings" if against is None else f"in force in {against}"
    report = [Section(lines=head), Section(title=f"Asked for ({asker})", code=indented(asked))]
    if others := [f"{one.name} {one.in_force!r}" for one in diagnosis.settings if one.state == "left alone"]:
        report.append(Section(title="Left as they are", lines=[", ".join(others)]))
    if against is not None:
        rows = [
            (
                *(one.name, str(one.reference), str(one.current), "machine" if one.is_machine else "choice"),
                "can change bits" if one.changes_bits else "changes no bits by itself",
                finding.to_do or "-",
            )
            for finding in diagnosis.differences
            for one in (finding.difference,)
        ]
        columns = ("name", "reference", "here", "kind", "effect", "to make it the reference's")
        table = Table(columns=columns, rows=rows) if rows else None
        report.append(Section(title=f"Different from {against}", lines=[] if rows else ["nothing"], table=table))
    if not missing:
        return [*report, Section(title="all in force", style="bold green")]
    advice = (
        "One call sets them all: det_callbacks.enforce_determinism(det_callbacks.DeterminismSettings(...)), "
        "before the model is built; the Hydra presets do."
    )
    title = f"{count(len(missing), 'setting')} not in force: {', '.join(missing)}"
    return [*report, Section(title=title, style="bold red", lines=[advice])]
