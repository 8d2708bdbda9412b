"""A verdict in words."""

import json
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from det_callbacks.causes.frameworks import RESTORED_BY
from det_callbacks.errors import ReferenceFormatError, ReferenceNotFoundError
from det_callbacks.report.console import STYLES, Section, Table, to_text
from det_callbacks.report.numerics import numerics_report, output_text
from det_callbacks.report.run import findings_report, ops_text
from det_callbacks.runs.source_text import first_line
from det_callbacks.runs.store import Run
from det_callbacks.text import count, listed
from det_callbacks.verdict import (
    MAX_ORIGINS,
    Divergence,
    EnvironmentDifference,
    Restored,
    Resume,
    TensorNumbers,
    TrailEntry,
    Verdict,
)

PRINTED_ORIGINS = 20

_KINDS = {
    "content": "different bits",
    "argument": "called with different arguments",
    "structure": "a different shape, dtype or layout",
    "missing": "only in the reference",
    "extra": "only in the current run",
}
_ROLES = {
    True: "origin: its inputs match, so the difference starts here",
    None: "cannot be proven to start here",
    False: "passed on: one of its inputs differs",
}
_SOURCE_ROLE = "source: no recorded op caused this difference, so it starts here"
_SOURCE_PHASES = ("state", "data", "rng", "input")


def verdict_lines(verdict: Verdict) -> str:
    return to_text(verdict_report(verdict))


def headline(verdict: Verdict) -> str:
    """Return a failed verdict in one line: "DIVERGED settings:
    optimizer.Adam.lr 0.1 -> 0.2 (step 0)".
    """
    first, head = verdict.first_divergence, _word(verdict)
    if first is None:
        return f"{head}: {verdict.explanation}"
    root = verdict.trail[0] if verdict.trail else None
    if root is not None and (verdict.cause, root.kind) == ("settings", "setting"):
        what = f"{root.name} {root.reference} -> {root.current}"
    elif first.op:
        what = f"{first.op} in {first.module or 'no submodule'}"
    else:
        what = first.name or f"a step that is {_KINDS[first.kind]}"
    place = (
        f"step {first.step}"
        if verdict.coverage.ranks < 2
        else f"step {first.step} of rank {first.rank}"
    )
    return f"{head} {verdict.cause}: {what} ({place})"


def verdict_of_rank(verdict: Verdict, *, rank: int, world_size: int) -> str:
    """Return the verdict as rank 0 prints it, or one line on the other ranks."""
    if rank == 0:
        return verdict_lines(verdict)
    where = (
        f"rank 0 prints the whole verdict, and {Path(verdict.current) / 'verdict.json'} holds it"
    )
    return f"{_word(verdict)} (rank {rank} of {world_size}; {where}): {verdict.explanation}"


def disagreement_text(
    verdict: Verdict, *, path: Path, num_agreed: int, num_dropped: int, rank: int = 0
) -> str:
    """Return the error of a resumed recording whose steps differ from those of the run."""
    where = f" (rank {rank}; rank 0 prints the whole verdict)" if rank else ""
    return (
        f"The resumed run is not the run in {path}: it repeated a recorded step or metric with a "
        f"different result ({count(num_agreed, 'step')} before it matched). The recorded run is "
        f"unchanged, without the {count(num_dropped, 'new step')} of this attempt{where}.\n\n"
        f"{verdict.explanation if rank else verdict_lines(verdict)}\n"
        "Find what the checkpoint did not restore, or record to another folder, or over this run "
        "with overwrite=True (Hydra: determinism.overwrite=true)."
    )


def verdict_report(verdict: Verdict) -> list[Section]:
    return [*head_report(verdict), *details_report(verdict, lists_all=False)]


def head_report(verdict: Verdict) -> list[Section]:
    """Return the verdict, the runs, the cause and the evidence."""
    named = [(name, getattr(verdict, name)) for name in ("reference", "current", "cause")]
    head = Section(title=_word(verdict), style=STYLES[verdict.verdict], lines=[verdict.explanation])
    report = [head, Section(facts=[(name, fact) for name, fact in named if fact is not None])]
    if len(verdict.trail) > 1:  # else it says no more than the first divergence
        report.append(Section(title="Trail (the cause first)", table=trail_table(verdict.trail)))
    if verdict.resume is not None:
        title = f"Resumed at step {verdict.resume.step} ({verdict.resume.how})"
        report.append(Section(title=title, table=resume_table(verdict.resume)))
    if verdict.evidence:
        report.append(Section(title="Evidence", items=verdict.evidence))
    return report


_STATES: Mapping[Restored, str] = {"exchanged": "of another parameter", "reseeded": "seeded again"}
_IN_ORDER = "the reference's order of the parameters that the optimizer is given"


def resume_table(resume: Resume) -> Table:
    """Return a row for each part of the state, what was not restored first."""
    rows: list[tuple[str, str, str]] = []
    for part, state in resume.restored.items():
        by_framework = RESTORED_BY[part]
        todo = by_framework.get(resume.framework, by_framework["torch"])
        if part == "data" and resume.of_step.get(part) == resume.step:
            rows.append(
                (part, "other content", "what the data set draws from, before the batch is loaded")
            )
        elif isinstance(state, str):
            rows.append((part, _state_text(state, resume.of_step.get(part)), todo))
        elif part == "optimizer":
            names = defaultdict[Restored, list[str]](list)
            for name, of_name in state.items():
                names[of_name].append(name)
            texts = [
                f"{listed(names[word])} {_state_text(word)}"
                for word in sorted(names, key="restored".__eq__)
            ]
            text = "; ".join(texts) if len(names) > 1 else _state_text(next(iter(names)))
            rows.append((part, text, _IN_ORDER if "exchanged" in names else todo))
        else:
            kind = "generator " if part == "generators" else ""
            rows += [
                (f"{kind}{name}", _state_text(of_name, resume.of_step.get(name)), todo)
                for name, of_name in state.items()
            ]
    rows.sort(key=lambda row: row[1] == "restored")
    shown = [(name, state, "" if state == "restored" else todo) for name, state, todo in rows]
    return Table(columns=("what", "state", "what restores it"), rows=shown)


def _state_text(state: Restored, of_step: int | None = None) -> str:
    return f"that of step {of_step}" if of_step is not None else _STATES.get(state, state)


def trail_table(trail: Sequence[TrailEntry]) -> Table:
    """Return a row for each entry; a digest says no more than that bits differ."""
    rows = [
        (
            entry.kind,
            entry.name if entry.proven else f"{entry.name} (may)",
            str(entry.step),
            entry.moment,
            *(_value(entry, value) for value in (entry.reference, entry.current)),
        )
        for entry in trail
    ]
    return Table(columns=("what", "name", "step", "moment", "reference", "current"), rows=rows)


def _value(entry: TrailEntry, value: str | None) -> str:
    has_digest = entry.kind not in ("setting", "option", "indices")
    return "-" if value is None or has_digest else value


def details_report(verdict: Verdict, *, lists_all: bool) -> list[Section]:
    """Return the first divergence, the origins, what was compared, and what to do next.

    Unless ``lists_all``, origins of one kind share a row.
    """
    first, origins, report = verdict.first_divergence, verdict.origins, list[Section]()
    if verdict.numerics is not None:
        report += numerics_report(verdict.numerics, lists_all=lists_all)
    if first is not None:
        report.append(
            Section(title="First divergence", facts=_facts(first), code=_source_text(verdict))
        )
    for site in (first, *origins):
        if site is not None and site.numbers is not None:
            facts = []
            if site != first:
                facts.append(("op", f"{_call(site)} in {site.module or 'no submodule'}"))
            if site.numbers.problem:
                facts.append(("", f"cannot be measured: {site.numbers.problem}"))
            facts += [(tensor.tensor, _how_much(tensor)) for tensor in site.numbers.output]
            report.append(Section(title="By how much", facts=facts))
            break
    if origins:
        which = f"the first {MAX_ORIGINS}, " if len(origins) >= MAX_ORIGINS else ""
        title = f"Origins ({which}differing, though nothing they read differs)"
        every = Table(columns=_ORIGIN_COLUMNS, rows=[*map(_origin_row, origins)])
        report.append(Section(title=title, table=every if lists_all else _by_kind(origins)))
    if verdict.environment:
        report.append(
            Section(title="Environment differences", table=environment_table(verdict.environment))
        )
    report += findings_report(verdict.findings)
    report.append(Section(title="Compared", items=_coverage(verdict)))
    if lines := next_lines(verdict):
        report.append(Section(title="Next", code=lines))
    return report


def environment_table(differences: Sequence[EnvironmentDifference]) -> Table:
    columns = ("name", "reference", "current", "kind", "can change bits")
    rows = [
        (entry.name, str(entry.reference), str(entry.current), *_kind(entry))
        for entry in differences
    ]
    return Table(columns=columns, rows=rows)


def _kind(difference: EnvironmentDifference) -> tuple[str, str]:
    if not difference.is_machine:
        return "choice", "-"  # users set it in order to change bits
    return "machine", "yes" if difference.changes_bits else "no"


def _word(verdict: Verdict) -> str:
    return verdict.verdict.upper().replace("_", " ")


def _facts(divergence: Divergence) -> list[tuple[str, str]]:
    shape = "" if divergence.shape is None else f" {list(divergence.shape)}"
    facts = [
        ("where", f"rank {divergence.rank}, step {divergence.step}, phase {divergence.phase}"),
        ("module", divergence.module or "(no submodule)"),
        ("op", _call(divergence) if divergence.op else ""),
        ("name", divergence.name or ""),
        ("kind", f"{divergence.kind}: {_KINDS[divergence.kind]}"),
        ("tensor", "" if divergence.dtype is None else f"{divergence.dtype}{shape}"),
        ("digests", _both_digests(divergence)),
        ("origin", _role(divergence)),
        *(("" if index else "source", line) for index, line in enumerate(divergence.source)),
    ]
    return [(name, fact) for name, fact in facts if fact]


def _both_digests(divergence: Divergence) -> str:
    reference, current = divergence.reference_digest or "-", divergence.current_digest or "-"
    return f"{reference} in the reference, {current} in the current run"


def _role(divergence: Divergence) -> str:
    is_source = (
        divergence.is_origin is False and not divergence.op and divergence.phase in _SOURCE_PHASES
    )
    return _SOURCE_ROLE if is_source else _ROLES[divergence.is_origin]


def _call(divergence: Divergence) -> str:
    return f"{divergence.op} #{divergence.occurrence}, output {divergence.output}"


def _source_text(verdict: Verdict) -> list[str]:
    first = verdict.first_divergence
    line = "" if first is None else first_line(first.source)
    if first is None or not line:
        return []
    try:
        run = Run.open(
            verdict.reference if first.kind == "missing" else verdict.current, check_steps=False
        )
        text = run.source_text(line)
    except ReferenceNotFoundError:
        return []  # the runs are somewhere else
    except ReferenceFormatError as error:
        return [f"the source text cannot be read: {error}"]
    number = line.partition(" in ")[0].rpartition(":")[2]
    return [f"{'>' if str(at) == number else ' '} {at:>4}  {line}".rstrip() for at, line in text]


_ORIGIN_COLUMNS = ("rank", "step", "phase", "module", "op", "name", "kind", "source")


def _by_kind(origins: Sequence[Divergence]) -> Table:
    """Return the first origin of each kind: one op in one step,
    such as the update of each parameter.
    """
    groups: defaultdict[tuple[object, ...], list[Divergence]] = defaultdict(list)
    for site in origins:
        groups[site.rank, site.segment, site.step, site.phase, site.op, site.kind].append(site)
    numbers = [len(group) - 1 for group in groups.values()]
    rows = [_origin_row(group[0]) for group in groups.values()]
    if not any(numbers):
        return Table(columns=_ORIGIN_COLUMNS, rows=rows, limit=PRINTED_ORIGINS)
    counted = [(*row, number or "") for row, number in zip(rows, numbers, strict=True)]
    return Table(columns=(*_ORIGIN_COLUMNS, "more"), rows=counted, limit=PRINTED_ORIGINS)


def _origin_row(origin: Divergence) -> tuple[object, ...]:
    source = origin.source[0] if origin.source else "-"
    place = (origin.rank, origin.step, origin.phase, origin.module or "-")
    return (*place, output_text(origin), origin.name or "-", origin.kind, source)


def _how_much(tensor: TensorNumbers) -> str:
    """Return "1 of 320 elements differ, by 1 ULP, first at [3, 7]: ..."."""
    if tensor.problem:
        return tensor.problem
    total = count(tensor.num_elements, "element")
    if not tensor.num_differing:
        return f"equal bits ({total})"
    parts = [f"{tensor.num_differing:,} of {total} differ"]
    figures = {"absolute": tensor.max_absolute, "relative": tensor.max_relative}
    sizes = [] if tensor.max_ulps is None else [count(tensor.max_ulps, "ULP")]
    sizes += [f"{value:.3g} {name}" for name, value in figures.items() if value is not None]
    if sizes:
        parts.append(f"by {'' if tensor.num_differing == 1 else 'up to '}{', '.join(sizes)}")
    odd = ("a NaN", tensor.num_nan), ("an infinity", tensor.num_inf)
    parts += [f"{number:,} with {what}" for what, number in odd if number]
    if tensor.first is not None and tensor.first_values is not None:
        reference, current = tensor.first_values
        parts.append(
            f"first at {list(tensor.first)}: {reference} in the reference, {current} in the "
            "current run"
        )
    return ", ".join(parts)


def _coverage(verdict: Verdict) -> list[str]:
    counts, coverage = verdict.counts, verdict.coverage
    span = ""
    if coverage.steps is not None:
        first, last = coverage.steps
        # each fit counts its steps from 0
        has_several_fits = counts.steps_compared > (last - first + 1) * max(coverage.ranks, 1)
        span = f" ({first} to {last}{' in several fits' if has_several_fits else ''})"
    lines = [
        f"{count(counts.steps_compared, 'step')}{span} of {count(coverage.ranks, 'rank')}, "
        f"{count(counts.sites_compared, 'site')}, {counts.sites_differing:,} differing"
    ]
    if coverage.metrics:
        lines.append(count(coverage.metrics, "metric"))
    lines.append(ops_text(coverage))
    if coverage.opaque_regions:
        lines.append(f"seen only from outside: {', '.join(coverage.opaque_regions)}")
    if coverage.followed:
        lines.append(f"followed torch's optimizers: {coverage.followed}")
    lines += [f"not seen: {text}" for text in coverage.lost]
    return lines + [
        f"replayed: {name}: {count(replayed['count'], 'tensor')} restored, "
        f"{replayed['differing']:,} of them differed, {replayed['mib_per_step']:.3g} MiB a step"
        for name, replayed in coverage.replayed.items()
    ]


def next_lines(verdict: Verdict) -> Sequence[str]:
    """Return what to do next; nothing for a match."""
    first = verdict.first_divergence
    if verdict.verdict == "match" or first is None:
        return ()
    places = [
        f"--{name} {number}"
        for name, number in (("rank", first.rank), ("segment", first.segment))
        if number
    ]
    # no step has a metric
    step = [] if first.phase == "metric" else [f"--step {first.step}", *places]
    paths = dict.fromkeys((verdict.reference, verdict.current))
    if first.phase == "other" and not first.op:  # a step that only one run has
        paths = dict.fromkeys([verdict.reference if first.kind == "missing" else verdict.current])
    lines = [" ".join(["det-callbacks show", shlex.quote(path), *step]) for path in paths]
    if verdict.find_command is not None:
        lines.append(f"to find the op and the numbers in one go: {verdict.find_command}")
    if verdict.record_next is not None:
        lines += _record_next(verdict.record_next)
    return lines


def _record_next(arguments: Mapping[str, Any]) -> list[str]:
    steps = arguments.get("only_steps")
    which = (
        f"step{'s' * (len(steps) > 1)} {listed(map(str, steps), limit=10)}" if steps else "the run"
    )
    why = (
        "to see by how much it differs" if "keep_tensors" in arguments else "to see where it starts"
    )
    python = [f"{name}={json.dumps(value)}" for name, value in arguments.items()]
    return [
        (
            f"{why}, record {which} again on both sides and compare the two recordings "
            "(det-callbacks diff):"
        ),
        f"    in Python  {', '.join(python)}",
        f"    on the command line  {shlex.join(options_of(arguments))}",
    ]


def options_of(arguments: Mapping[str, Any]) -> list[str]:
    """Return the options of the command line for ``Verdict.record_next``."""
    texts = {
        name: value if isinstance(value, str) else ",".join(map(str, value))
        for name, value in arguments.items()
    }
    return [
        f"--{name.removesuffix('_tensors').replace('_', '-')}={text}"
        for name, text in texts.items()
    ]
