"""The settings in force, and the ops that torch calls nondeterministic."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from det_callbacks.compare.order import read_arguments
from det_callbacks.environment.nondeterminism import BEHAVIOURS, OpFact, may_apply
from det_callbacks.errors import SelectionError
from det_callbacks.report.console import Section, Table
from det_callbacks.report.installation import installation_lines, versions_line
from det_callbacks.report.run import head_lines
from det_callbacks.report.verdict import environment_table
from det_callbacks.runs.program import StepView
from det_callbacks.runs.store import Run
from det_callbacks.text import count

if TYPE_CHECKING:
    from det_callbacks.environment.doctor import Diagnosis


def ops_to_dict(facts: Sequence[OpFact], run: Run | None = None) -> dict[str, Any]:
    """Return what torch says of its ops, or of those that a run uses, by module.

    The number of sites is that of the run's program with most; ops without a site (views) are not
    found.
    """
    counts = {
        behaviour: sum(fact.behaviour == behaviour for fact in facts) for behaviour in BEHAVIOURS
    }
    head = {"schema": 1, "torch": version("torch"), "counts": counts}
    if run is None:
        return {**head, "run": None, "entries": [asdict(fact) for fact in facts]}
    records = ((rank, record) for rank in run.ranks for record in run.rank(rank).iterate())
    views = {record.program_id: (rank, record.segment, record.step) for rank, record in records}
    ops, most = set[str](), Counter[tuple[int, str, str]]()
    for view in (run.view(*place) for place in views.values()):
        here = Counter[tuple[int, str, str]]()
        for position, site in enumerate(view.program.sites):
            if site.op and site.role in ("output", "value"):
                ops.add(site.op)
                here.update(
                    (number, site.module, site.op) for number in _facts_about(facts, view, position)
                )
        most |= here  # the larger count of each
    if not ops:
        raise SelectionError(
            f"{run.path} holds no ops (level {run.manifest.selection.level}, "
            f"{count(run.rank(0).num_steps, 'step')} of rank 0), so it cannot say which it uses. "
            'Record a run of at least one step with level="op".'
        )
    about = {
        "path": str(run.path),
        "run_id": run.manifest.run_id,
        "num_ops": len(ops),
        "num_programs": len(views),
    }
    entries = [
        {**asdict(facts[number]), "module": module, "op": op, "sites": sites}
        for (number, module, op), sites in sorted(most.items())
    ]
    return {**head, "run": about, "entries": entries}


def _facts_about(facts: Sequence[OpFact], view: StepView, position: int) -> list[int]:
    site = view.program.sites[position]
    found = [number for number, fact in enumerate(facts) if site.op.rpartition(".")[0] in fact.ops]
    known = read_arguments(view, position) if found else None
    if known is None:
        return []
    arguments = {name: json.loads(text) for name, text in known.values.items()}
    call: dict[str, Any] = {
        "op": site.op,
        "phase": site.phase,
        "arguments": arguments,
        "unknown": known.digested,
    }
    return [number for number in found if may_apply(facts[number], **call)]


def op_report(content: Mapping[str, Any], run: Run | None = None) -> list[Section]:
    """Return the table of ``ops_to_dict``."""
    numbers = ", ".join(f"{number} {behaviour}" for behaviour, number in content["counts"].items())
    lines = [f"torch {content['torch']}: {sum(content['counts'].values())} entries ({numbers})"]
    entries = content["entries"]
    places: tuple[str, ...] = ("ops",)
    if run is not None:
        about, places = content["run"], ("module", "op", "sites")
        used = f"{count(about['num_ops'], 'op')} in {count(about['num_programs'], 'program')}"
        num_names = len({entry["name"] for entry in entries})
        lines = [*head_lines(run), f"{used}; {lines[0]}; {num_names} may be about this run"]
    columns = ("name", "behaviour", "device", *places, "condition")
    rows = [[_cell(entry, name) for name in columns] for entry in entries]
    lines.append("devices and conditions are torch's words; that they are met is not checked")
    return [Section(code=lines, table=Table(columns=columns, rows=rows, is_wide=True))]


def _cell(entry: Mapping[str, Any], name: str) -> str:
    value = entry[name]
    return (" ".join(value) if name == "ops" else value) or "-"


_FILLING = (
    "With deterministic algorithms, torch fills the memory of torch.empty, which takes 2 to 15 % "
    "of a step in reports of users. That hides reads of unwritten memory. If det-callbacks "
    "findings lists no uninitialised_read, switch it off: "
    "det_callbacks.enforce_determinism({'fill_uninitialized_memory': False})"
)


def doctor_report(diagnosis: "Diagnosis") -> list[Section]:
    facts, against, missing = diagnosis.facts, diagnosis.against, diagnosis.missing
    place = f"{facts['cpu.model']} ({facts['torch.cpu_capability']}), {facts['cuda']}"
    versions = {
        name.removesuffix(".version"): fact
        for name, fact in facts.items()
        if name.endswith(".version")
    }
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    head = [f"{shown}; {count(facts['torch.num_threads'], 'thread')} on {place}"]
    system = (facts[name] for name in ("platform.system", "platform.libc", "cpu.architecture"))
    rest = [
        name
        for name, found in diagnosis.installation.versions.items()
        if found and name not in versions
    ]
    head += [f"{', '.join(filter(None, system))}; {versions_line(diagnosis.installation, rest)}"]
    if "digest" in facts:
        head.append(f"Digests of tensors on {facts['digest']}")
    if "recorder" in facts:
        head.append(f"At level op, the recorder is {facts['recorder']}")
    rows = [
        (
            setting.state,
            setting.name,
            f"{setting.wanted}",
            f"{setting.in_force}",
            setting.to_do or "-",
        )
        for setting in diagnosis.settings
    ]
    table = Table(
        columns=("state", "setting", "asked for", "here", "what to do"), rows=rows, is_wide=True
    )
    asker = "the defaults of DeterminismSettings" if against is None else f"in force in {against}"
    head += installation_lines(diagnosis.installation)
    report = [Section(lines=head), Section(title=f"Asked for ({asker})", table=table)]
    if against is not None:
        found = environment_table([difference for difference, _ in diagnosis.differences])
        differing = [
            (*row, to_do or "-")
            for row, (_, to_do) in zip(found.rows, diagnosis.differences, strict=True)
        ]
        if differing:
            table = Table(columns=(*found.columns, "what to do"), rows=differing)
            report.append(Section(title=f"Different from {against}", table=table))
        else:
            report.append(Section(title=f"This machine does not differ from {against}"))
    if diagnosis.fills_memory:
        report.append(Section(title="Filling memory costs time", lines=[_FILLING]))
    if not missing:
        return [*report, Section(title="all in force", style="bold green")]
    title = f"{count(len(missing), 'setting')} not in force: {', '.join(missing)}"
    advice = (
        "Set them all before you build the model: enforce_determinism(DeterminismSettings(...))"
    )
    return [*report, Section(title=title, style="bold red", lines=[advice])]
