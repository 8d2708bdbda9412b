"""What torch says of its ops, and which of them a recorded run uses, in which modules."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from det_callbacks.compare.arguments import ArgumentReader
from det_callbacks.errors import SelectionError
from det_callbacks.nondeterminism import BEHAVIOURS, OpFact, may_apply
from det_callbacks.report.console import Section, Table, count
from det_callbacks.report.run import head_lines
from det_callbacks.runs.store import Run

_MEANINGS = {
    "alternate algorithm": "takes another algorithm under torch.use_deterministic_algorithms(True)",
    "error": "raises RuntimeError under torch.use_deterministic_algorithms(True)",
    "random": "draws from a random generator",
}
_START, _END = ("name", "behaviour", "device"), ("ops", "condition")
"""Columns of every table; those of a run have where the ops are in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpUse:
    """Where an op that torch says something of occurs in a run: its overloads, and module -> sites in one step.

    Sites are tensors and values that the op wrote; where the run's programs differ, the most in any.
    """

    fact: OpFact
    ops: tuple[str, ...]
    sites: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpUsage:
    """The ops of a run that torch says something of, in the order of the facts, of so many distinct overloads."""

    run: Run
    uses: tuple[OpUse, ...]
    num_ops: int
    num_programs: int


def find_op_usage(run: Run, facts: Sequence[OpFact]) -> OpUsage:
    """Return which facts may be about ops of a run; reads every step of every rank, and one of each program.

    An op that leaves no site is not found: what the selection excludes, views, ``resize_``, compiled regions.

    Raises:
        SelectionError: the run holds no ops, so that it cannot say.
        ReferenceFormatError: one of its files is damaged or missing.
    """
    places = {
        record.program_id: (rank, record.segment, record.step)
        for rank in run.ranks
        for record in run.rank(rank).iterate()
    }
    about: dict[str, list[OpFact]] = defaultdict(list)
    for fact in facts:
        for name in fact.ops:
            about[name].append(fact)
    most: dict[OpFact, Counter[str]] = defaultdict(Counter)
    overloads: dict[OpFact, set[str]] = defaultdict(set)
    ops: set[str] = set()
    for place in places.values():
        here: dict[OpFact, Counter[str]] = defaultdict(Counter)
        view = run.view(*place)
        reader = ArgumentReader(view)
        for position, site in enumerate(view.program.sites):
            if not site.op or site.role not in ("output", "value"):
                continue
            ops.add(site.op)
            for fact in about[site.op.rpartition(".")[0]]:
                known = reader.read(position)
                arguments = {name: json.loads(text) for name, text in known.values.items()}
                if may_apply(fact, op=site.op, phase=site.phase, arguments=arguments, unknown=known.digested):
                    here[fact][site.module] += 1
                    overloads[fact].add(site.op)
        for fact, modules in here.items():
            most[fact] |= modules  # the larger count of each
    if not ops:
        raise SelectionError(
            f"{run.path} holds no ops (level {run.selection.level}, "
            f"{count(run.rank(0).num_steps, 'step')} of rank 0), so it cannot say which it uses. Record a run of at "
            'least one step with level="op".'
        )
    uses = tuple(
        OpUse(fact=fact, ops=tuple(sorted(overloads[fact])), sites=dict(sorted(most[fact].items())))
        for fact in facts
        if fact in overloads
    )
    return OpUsage(run=run, uses=uses, num_ops=len(ops), num_programs=len(places))


def ops_to_dict(facts: Sequence[OpFact], usage: OpUsage | None = None) -> dict[str, Any]:
    """Return all that torch says of its ops, or what it says of those that a run uses."""
    head = {"schema": 1, "torch": version("torch"), "counts": _numbers(facts)}
    if usage is None:
        return {**head, "run": None, "entries": [_fact_to_dict(fact) for fact in facts]}
    about = {
        "path": str(usage.run.path),
        "run_id": usage.run.run_id,
        "complete": usage.run.is_complete,
        "selection": usage.run.selection.to_dict(),
        "num_ops": usage.num_ops,
        "num_programs": usage.num_programs,
    }
    entries = []
    for use in usage.uses:
        modules = [{"module": module, "sites": number} for module, number in use.sites.items()]
        entries.append({**_fact_to_dict(use.fact), "used": list(use.ops), "modules": modules})
    return {**head, "run": about, "entries": entries}


def op_report(facts: Sequence[OpFact], usage: OpUsage | None = None) -> list[Section]:
    """Return a table of all that torch says of its ops, or of those that a run uses, a row for each module."""
    numbers = ", ".join(f"{number} {behaviour}" for behaviour, number in _numbers(facts).items())
    line = f"torch {version('torch')}: {len(facts)} entries ({numbers})"
    meanings = [f"  {behaviour}: {_MEANINGS[behaviour]}" for behaviour in BEHAVIOURS]
    if usage is None:
        rows = [(*_start(one), " ".join(one.ops) or "(none found)", one.condition or "-") for one in facts]
        return [Section(code=[line, *meanings], table=Table(columns=_START + _END, rows=rows, is_wide=True))]
    ops = f"{count(usage.num_ops, 'op')} in {count(usage.num_programs, 'program')}"
    head = [*head_lines(usage.run), f"{ops}; {line}; {len(usage.uses)} may be about this run"]
    used = [
        (*_start(use.fact), module or "-", number, " ".join(use.ops), use.fact.condition or "-")
        for use in usage.uses
        for module, number in use.sites.items()
    ]
    if not used:
        return [Section(code=head)]
    columns = (*_START, "module", "sites", *_END)
    note = "sites: in one step. Devices and conditions are torch's words; that they are met is not checked."
    table = Table(columns=columns, rows=used, is_wide=True)
    return [Section(code=[*head, *meanings], table=table), Section(code=[note])]


def _start(fact: OpFact) -> tuple[str, str, str]:
    return fact.name, fact.behaviour, fact.device


def _numbers(facts: Sequence[OpFact]) -> dict[str, int]:
    return {behaviour: sum(fact.behaviour == behaviour for fact in facts) for behaviour in BEHAVIOURS}


def _fact_to_dict(fact: OpFact) -> dict[str, Any]:
    return {**{name: getattr(fact, name) for name in ("name", "behaviour", "device", "condition")}, "ops": [*fact.ops]}
