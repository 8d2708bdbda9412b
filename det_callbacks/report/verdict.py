"""A verdict in words, for a person who has to act on it."""

import json
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from det_callbacks.errors import ReferenceFormatError, ReferenceNotFoundError
from det_callbacks.report.console import Section, Table, count, listed, to_text
from det_callbacks.runs.store import Run
from det_callbacks.verdict import MAX_ORIGINS, Divergence, EnvironmentDifference, TensorNumbers, Verdict

PRINTED_ORIGINS = 20
MAX_NUMBERS = 5
"""Divergences with numbers that are shown: the first one and origins."""

_STYLES = {"match": "bold green", "diverged": "bold red", "not_comparable": "bold yellow"}
_KINDS = {
    "content": "other bits",
    "argument": "called with other arguments",
    "structure": "another shape, dtype or layout",
    "missing": "only in the reference",
    "extra": "only in the current run",
}
_ROLES = {
    True: "origin: what it read agrees, so it starts here",
    None: "cannot be proven to start here",
    False: "passed on: what it read differs already, or it came in from outside the step's ops",
}


def verdict_lines(verdict: Verdict) -> str:
    """Return a verdict as plain text, for an exception's message or a log."""
    return to_text(verdict_report(verdict))


def verdict_of_rank(verdict: Verdict, *, rank: int, world_size: int) -> str:
    """Return what a rank says of a verdict that all ranks have: all of it on rank 0, one line on the others."""
    if rank == 0:
        return verdict_lines(verdict)
    where = f"rank 0 prints the whole verdict, and {Path(verdict.current) / 'verdict.json'} holds it"
    return f"{_word(verdict)} (said on rank {rank} of {world_size}; {where}): {verdict.explanation}"


def disagreement_text(verdict: Verdict, *, path: Path, num_agreed: int, num_dropped: int, rank: int = 0) -> str:
    """Return what is wrong with a resumed recording whose steps are not those that the run holds.

    ``num_agreed`` steps agreed before; ``num_dropped`` new ones are taken back. All but rank 0 say it in one line.
    """
    if rank:
        return (
            f"The resumed run is not the run in {path}, which is as it was before (said on rank {rank}; rank 0 prints "
            f"the whole verdict): {verdict.explanation}"
        )
    agreed = f"{count(num_agreed, 'step')} before it agreed" if num_agreed else "it is the first one that was run again"
    dropped = f"; {count(num_dropped, 'new step')} of this attempt went with it" if num_dropped else ""
    return (
        f"The resumed run is not the run in {path}: a step that is there already came out otherwise ({agreed}). "
        f"The run keeps its steps and is as it was before{dropped}.\n\n{verdict_lines(verdict)}\n"
        "Find out what the checkpoint did not bring back, or record this training as another run: into another folder, "
        "or over this one with overwrite=True."
    )


def verdict_report(verdict: Verdict) -> list[Section]:
    """Return the word, the sentence, where it began, what was covered, and what to do next."""
    return [*head_report(verdict), *difference_report(verdict), *coverage_report(verdict)]


def head_report(verdict: Verdict) -> list[Section]:
    """Return the word with the sentence, the runs and the cause, and what led to it."""
    named = [(name, getattr(verdict, name)) for name in ("reference", "current", "cause")]
    head = Section(title=_word(verdict), style=_STYLES[verdict.verdict], lines=[verdict.explanation])
    report = [head, Section(facts=[(name, fact) for name, fact in named if fact is not None])]
    return [*report, Section(title="Evidence", items=verdict.evidence)] if verdict.evidence else report


def difference_report(verdict: Verdict) -> list[Section]:
    """Return the first divergence with its source text, by how much it and origins differ, and all origins."""
    first, origins, report = verdict.first_divergence, verdict.origins, list[Section]()
    if first is not None:
        report.append(Section(title="First divergence", facts=_facts(first), code=_source_text(verdict)))
    known = [one for one in dict.fromkeys((*([] if first is None else [first]), *origins)) if one.numbers is not None]
    report += [_by_how_much(one, is_first=one == first) for one in known[:MAX_NUMBERS]]
    if origins:
        which = f"the first {MAX_ORIGINS}, " if len(origins) >= MAX_ORIGINS else ""
        title = f"Origins ({which}differing, though nothing they read differs)"
        report.append(Section(title=title, table=_origin_table(verdict)))
    return report


def coverage_report(verdict: Verdict) -> list[Section]:
    """Return in which environments how much was compared, and what to do next."""
    report = list[Section]()
    if verdict.environment:
        report.append(Section(title="Environment differences", table=environment_table(verdict.environment)))
    report.append(Section(title="Compared", items=_coverage(verdict)))
    if lines := next_lines(verdict):
        report.append(Section(title="Next", code=lines))
    return report


def environment_table(differences: Sequence[EnvironmentDifference]) -> Table:
    """Return a row for each entry in which two environments differ."""
    rows = [
        (
            *(one.name, str(one.reference), str(one.current)),
            *("machine" if one.is_machine else "choice", "yes" if one.changes_bits else "no"),
        )
        for one in differences
    ]
    return Table(columns=("name", "reference", "current", "kind", "can change bits"), rows=rows)


def _word(verdict: Verdict) -> str:
    return verdict.verdict.upper().replace("_", " ")


# the first divergence and the origins


def _facts(divergence: Divergence) -> list[tuple[str, str]]:
    """Return what is known of a divergence, each with its name."""
    shape = "" if divergence.shape is None else f" {list(divergence.shape)}"
    facts = [
        ("where", f"rank {divergence.rank}, step {divergence.step}, phase {divergence.phase}"),
        ("module", divergence.module or "(outside any module)"),
        ("op", _call(divergence) if divergence.op else ""),
        ("name", divergence.name or ""),
        ("kind", f"{divergence.kind}: {_KINDS[divergence.kind]}"),
        ("tensor", "" if divergence.dtype is None else f"{divergence.dtype}{shape}"),
        ("digests", f"{divergence.reference_digest or '-'} in the reference, {divergence.current_digest or '-'} now"),
        ("origin", _ROLES[divergence.is_origin]),
        *(("" if index else "source", line) for index, line in enumerate(divergence.source)),
    ]
    return [(name, fact) for name, fact in facts if fact]


def _call(divergence: Divergence) -> str:
    return f"{divergence.op} #{divergence.occurrence}, output {divergence.output}"


def _source_text(verdict: Verdict) -> list[str]:
    """Return the source text of the first divergence as its run recorded it; [] where the run has none of it."""
    first = verdict.first_divergence
    if first is None or not first.source:
        return []
    try:
        run = Run.open(verdict.reference if first.kind == "missing" else verdict.current, check_steps=False)
        text = run.source_text(first.source[0])
    except ReferenceNotFoundError:
        return []  # of a verdict whose runs are somewhere else
    except ReferenceFormatError as error:
        return [f"its text cannot be read: {error}"]
    number = first.source[0].partition(" in ")[0].rpartition(":")[2]
    lines = textwrap.dedent("\n".join(line for _, line in text)).split("\n")
    shown = zip((at for at, _ in text), lines, strict=bool(text))
    return [f"{'>' if str(at) == number else ' '} {at:>4}  {line}".rstrip() for at, line in shown]


def _origin_table(verdict: Verdict) -> Table:
    """Return the origins, with ranks where there are several."""
    start = 0 if verdict.coverage.ranks > 1 or any(origin.rank for origin in verdict.origins) else 1
    columns = ("rank", "step", "phase", "module", "op", "name", "kind", "source")
    rows = [
        (
            *(one.rank, one.step, one.phase, one.module or "-", f"{one.op}#{one.occurrence}", one.name or "-"),
            *(one.kind, one.source[0] if one.source else "-"),
        )[start:]
        for one in verdict.origins
    ]
    return Table(columns=columns[start:], rows=rows, limit=PRINTED_ORIGINS)


# by how much


def _by_how_much(one: Divergence, *, is_first: bool) -> Section:
    numbers, title = one.numbers, "By how much"
    assert numbers is not None, "it was chosen by them"
    if not is_first:
        module, rank = one.module and f" in {one.module}", f", rank {one.rank}" if one.rank else ""
        title += f", {one.phase}: {_call(one)}{module}{rank}"
    if numbers.problem:
        return Section(title=title, items=[f"cannot be told: {numbers.problem}"])
    facts = list[tuple[str, str]]()
    for tensor in numbers.output:
        facts.append((tensor.tensor, _how_much(tensor)))
        if tensor.num_differing and (distances := _distances(tensor)):
            facts.append(("", f"elements at each distance in ULPs: {distances}"))
    return Section(title=title, facts=facts)


def _how_much(tensor: TensorNumbers) -> str:
    """Return by how much a tensor differs: "1 of 320 elements differ, by 1 ULP, first at [3, 7]: ..."."""
    if tensor.problem:
        return tensor.problem
    total = count(tensor.num_elements, "element")
    if not tensor.num_differing:
        return f"equal bits ({total})"
    parts = [f"{tensor.num_differing:,} of {total} differ"]
    if tensor.max_ulps is not None:
        up_to = "" if tensor.num_differing == 1 else "up to "
        figures = (("absolute", tensor.max_absolute), ("relative", tensor.max_relative))
        sizes = ", ".join(f"{name} {value:.3g}" for name, value in figures if value is not None)
        parts.append(f"by {up_to}{count(tensor.max_ulps, 'ULP')}{sizes and f' ({sizes})'}")
    elif tensor.max_absolute is not None:
        parts.append(f"by up to {tensor.max_absolute:.3g}")
    parts += [f"{tensor.num_nan:,} with a NaN"] if tensor.num_nan else []
    parts += [f"{tensor.num_inf:,} with an infinity"] if tensor.num_inf else []
    text = ", ".join(parts)
    places = {"first": (tensor.first, tensor.first_values), "worst": (tensor.worst, tensor.worst_values)}
    for word, (place, values) in places.items():
        if place is not None and values is not None and (word == "first" or place != tensor.first):
            comma = "," if word == "first" else ";"
            text += f"{comma} {word} at {list(place)}: {values[0]} in the reference, {values[1]} now"
    return text


def _distances(tensor: TensorNumbers) -> str:
    """Return how many elements lie in each range of distances, where any does: "0: 7, 2-3: 1, NaN: 2"."""
    ranges = (str(index) if index < 2 else f"{2 ** (index - 1):,}-{2**index - 1:,}" for index in range(99))
    rows = [*zip(ranges, tensor.ulps, strict=False), ("NaN", tensor.num_nan), ("Inf", tensor.num_inf)]
    return ", ".join(f"{label}: {number:,}" for label, number in rows if number)


# what was compared, and what comes next


def _coverage(verdict: Verdict) -> list[str]:
    """Return how much was compared, and what was not looked into."""
    counts, coverage = verdict.counts, verdict.coverage
    span = "" if coverage.steps is None else f" ({coverage.steps[0]} to {coverage.steps[1]})"
    skipped = ", ".join(f"{number:,} {reason}" for reason, number in sorted(coverage.ops_skipped.items()))
    skipped = f"; skipped: {skipped}" if skipped else ""
    lines = [
        f"{count(counts.steps_compared, 'step')}{span} of {count(coverage.ranks, 'rank')}, "
        f"{count(counts.sites_compared, 'site')}, {counts.sites_differing:,} differing"
    ]
    lines += [count(coverage.metrics, "metric")] if coverage.metrics else []
    lines.append(f"{count(coverage.ops_seen, 'op')} seen, {coverage.ops_digested:,} digested{skipped}")
    lines += [f"digests of tensors on {device}: {method}" for device, method in coverage.digested_on.items()]
    lines += [f"seen only from outside: {', '.join(coverage.opaque_regions)}"] if coverage.opaque_regions else []
    for name, replayed in coverage.replayed.items():
        lines.append(
            f"replayed: {name}: {count(replayed['count'], 'tensor')} put back, {replayed['differing']:,} of them "
            f"differed, {replayed['mib_per_step']:.3g} MiB a step"
        )
    return lines


def next_lines(verdict: Verdict) -> Sequence[str]:
    """Return what to do next; nothing where the runs match."""
    first = verdict.first_divergence
    if verdict.verdict == "match" or first is None:
        return ()
    step = f" --step {first.step}" + "".join(
        f" --{name} {number}" for name, number in (("rank", first.rank), ("segment", first.segment)) if number
    )
    step = "" if first.phase == "metric" else step  # no step has it
    paths = [verdict.reference, verdict.current]
    if first.phase == "other" and not first.op:  # a step that only one run has
        paths = paths[:1] if first.kind == "missing" else paths[1:]
    shown = [f"det-callbacks show {path}{step}" for path in dict.fromkeys(paths)]
    return [*shown, *([] if verdict.record_next is None else _record_next(verdict.record_next))]


def _record_next(arguments: Mapping[str, Any]) -> list[str]:
    """Return how to record what the runs do not hold, as arguments of the callback and as Hydra overrides."""
    steps = arguments.get("only_steps")
    which = f"step {listed(map(str, steps), limit=10)}" if steps else "the training"
    why = "to see by how much it differs" if "keep_tensors" in arguments else "to see where it starts"
    python = ", ".join(f"{name}={json.dumps(value)}" for name, value in arguments.items())
    words = (
        f"determinism.{name}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"
        for name, value in arguments.items()
    )
    return [
        f"{why}, record {which} again on both sides and compare the two recordings (det-callbacks diff):",
        f"    in Python  {python}",
        f"    in Hydra   {shlex.join(words)}",
    ]
