"""What this machine says: the settings that are in force, and the ops that torch names, which a run may use."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from det_callbacks.compare.arguments import read_arguments
from det_callbacks.errors import SelectionError
from det_callbacks.nondeterminism import BEHAVIOURS, OpFact, may_apply
from det_callbacks.report.console import Section, Table, count
from det_callbacks.report.run import head_lines
from det_callbacks.report.verdict import environment_table
from det_callbacks.runs.program import Site, StepView
from det_callbacks.runs.store import Run

if TYPE_CHECKING:
    from det_callbacks.doctor import Diagnosis

_MEANINGS = {
    "alternate algorithm": "takes another algorithm under torch.use_deterministic_algorithms(True)",
    "error": "raises RuntimeError under torch.use_deterministic_algorithms(True)",
    "random": "draws from a random generator",
}


def ops_to_dict(facts: Sequence[OpFact], run: Run | None = None) -> dict[str, Any]:
    """Return all that torch says of its ops, or what it says of those that a run uses: overloads, and sites in a step.

    Sites are tensors and values that an op wrote; where the run's programs differ, the most in any. Every step of every
    rank is read, and one of each program. An op that leaves no site is not found: what the selection excludes, views,
    ``resize_``, compiled regions.

    Raises:
        SelectionError: the run holds no ops, so that it cannot say.
        ReferenceFormatError: one of its files is damaged or missing.
    """
    counts = {behaviour: sum(fact.behaviour == behaviour for fact in facts) for behaviour in BEHAVIOURS}
    head = {"schema": 1, "torch": version("torch"), "counts": counts}
    if run is None:
        return {**head, "run": None, "entries": [asdict(fact) for fact in facts]}
    facts_of: dict[str, list[OpFact]] = defaultdict(list)
    for fact in facts:
        for name in fact.ops:
            facts_of[name].append(fact)
    places = {
        record.program_id: (rank, record.segment, record.step)
        for rank in run.ranks
        for record in run.rank(rank).iterate()
    }
    most: dict[OpFact, Counter[str]] = defaultdict(Counter)
    overloads: dict[OpFact, set[str]] = defaultdict(set)
    ops: set[str] = set()
    for place in places.values():
        here: dict[OpFact, Counter[str]] = defaultdict(Counter)
        for fact, site in _find_uses(facts_of, run.view(*place), ops):
            here[fact][site.module] += 1
            overloads[fact].add(site.op)
        for fact, modules in here.items():
            most[fact] |= modules  # the larger count of each
    if not ops:
        raise SelectionError(
            f"{run.path} holds no ops (level {run.manifest.selection.level}, "
            f"{count(run.rank(0).num_steps, 'step')} of rank 0), so it cannot say which it uses. Record a run of at "
            'least one step with level="op".'
        )
    about = {"path": str(run.path), "run_id": run.manifest.run_id, "complete": run.is_complete}
    about |= {"selection": run.manifest.selection.to_dict(), "num_ops": len(ops), "num_programs": len(places)}
    entries = [
        {
            **asdict(fact),
            "used": sorted(overloads[fact]),
            "modules": [{"module": module, "sites": number} for module, number in sorted(most[fact].items())],
        }
        for fact in facts
        if fact in overloads
    ]
    return {**head, "run": about, "entries": entries}


def _find_uses(
    facts_of: Mapping[str, Sequence[OpFact]], view: StepView, ops: set[str]
) -> Iterator[tuple[OpFact, Site]]:
    """Yield which facts may be about a site of a step; add all ops that there are."""
    for position, site in enumerate(view.program.sites):
        if not site.op or site.role not in ("output", "value"):
            continue
        ops.add(site.op)
        for fact in facts_of[site.op.rpartition(".")[0]]:
            known = read_arguments(view, position)
            arguments = {name: json.loads(text) for name, text in known.values.items()}
            if may_apply(fact, op=site.op, phase=site.phase, arguments=arguments, unknown=known.digested):
                yield fact, site


def op_report(content: Mapping[str, Any], run: Run | None = None) -> list[Section]:
    """Return the table of what ``ops_to_dict`` found, of a run with a row for each module."""
    numbers = ", ".join(f"{number} {behaviour}" for behaviour, number in content["counts"].items())
    lines, entries = (
        [f"torch {content['torch']}: {sum(content['counts'].values())} entries ({numbers})"],
        content["entries"],
    )
    meanings = [f"  {behaviour}: {_MEANINGS[behaviour]}" for behaviour in BEHAVIOURS]
    columns, rows, notes = ["name", "behaviour", "device", "ops", "condition"], list[Sequence[object]](), []
    if run is not None:
        about, columns[3:3] = content["run"], ["module", "sites"]
        used = f"{count(about['num_ops'], 'op')} in {count(about['num_programs'], 'program')}"
        lines = [*head_lines(run), f"{used}; {lines[0]}; {len(entries)} may be about this run"]
        if not entries:
            return [Section(code=lines)]
        notes = ["sites: in one step. Devices and conditions are torch's words; that they are met is not checked."]
    for one in entries:
        ends = " ".join(one["ops" if run is None else "used"]) or "(none found)", one["condition"] or "-"
        places = [()] if run is None else [(place["module"] or "-", place["sites"]) for place in one["modules"]]
        rows += [(one["name"], one["behaviour"], one["device"], *place, *ends) for place in places]
    table = Table(columns=columns, rows=rows, is_wide=True)
    return [Section(code=[*lines, *meanings], table=table), *[Section(code=notes)] * bool(notes)]


def doctor_report(diagnosis: "Diagnosis") -> list[Section]:
    """Return what is in force, what is not with the line to add, and what differs from a reference."""
    facts, against, missing = diagnosis.facts, diagnosis.against, diagnosis.missing
    place = f"{facts['cpu.model']} ({facts['torch.cpu_capability']}), {facts['cuda']}"
    versions = ", ".join(f"{name} {facts[f'{name}.version']}" for name in ("python", "torch", "lightning"))
    head = [f"{versions}; {count(facts['torch.num_threads'], 'thread')} on {place}"]
    head += [f"Digests of tensors on {facts['digest']}"] if "digest" in facts else []
    asked, others = list[tuple[str, str]](), list[str]()
    for one in diagnosis.settings:
        if one.state == "left alone":
            others.append(f"{one.name} {one.in_force!r}")
            continue
        here = "" if one.state == "in force" else f", here {one.in_force!r}: {one.effect}"
        asked.append((one.state, f"{one.name} = {one.wanted!r}{here}"))
        asked += [("", one.to_do)] if one.to_do else []
    asker = "the defaults of DeterminismSettings" if against is None else f"in force in {against}"
    report = [Section(lines=head), Section(title=f"Asked for ({asker})", facts=asked)]
    report += [Section(title="Left as they are", items=[", ".join(others)])] if others else []
    if against is not None:
        found = environment_table([one.difference for one in diagnosis.differences])
        columns = (*found.columns[:2], "here", *found.columns[3:], "to make it the reference's")
        rows = [(*row, one.to_do or "-") for row, one in zip(found.rows, diagnosis.differences, strict=True)]
        table = Table(columns=columns, rows=rows) if rows else None
        report.append(Section(title=f"{'D' if rows else 'Nothing is d'}ifferent from {against}", table=table))
    if not missing:
        return [*report, Section(title="all in force", style="bold green")]
    advice = (
        "One call sets them all: det_callbacks.enforce_determinism(det_callbacks.DeterminismSettings(...)), "
        "before the model is built; the Hydra presets do."
    )
    title = f"{count(len(missing), 'setting')} not in force: {', '.join(missing)}"
    return [*report, Section(title=title, style="bold red", lines=[advice])]
