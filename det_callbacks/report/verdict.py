"""A verdict in words, for a person who has to act on it."""

import json
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from det_callbacks.errors import ReferenceFormatError, ReferenceNotFoundError
from det_callbacks.report.console import count, listed, print_line, print_table, to_text
from det_callbacks.report.numbers import render_numbers
from det_callbacks.runs.program import REGION
from det_callbacks.runs.store import Run
from det_callbacks.verdict import Divergence, Verdict

MAX_ORIGINS = 20

Table = tuple[Sequence[str], list[tuple[object, ...]]]
"""Columns and rows."""

_STYLES = {"match": "bold green", "diverged": "bold red", "not_comparable": "bold yellow"}
_KINDS = {
    "content": "other bits",
    "argument": "called with other arguments",
    "structure": "another shape, dtype or layout",
    "missing": "only in the reference",
    "extra": "only in the current run",
}


def verdict_lines(verdict: Verdict) -> str:
    """Return a verdict as plain text, for an exception's message or a log."""
    return to_text(lambda console: render_verdict(verdict, console))


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


def render_verdict(verdict: Verdict, console: Console) -> None:
    """Print a verdict: the word, the sentence, where it began, what was covered, and what to do next."""
    print_line(console, _word(verdict), _STYLES[verdict.verdict])
    print_line(console, verdict.explanation)
    print_line(console)
    for name in ("reference", "current", "cause"):
        if (fact := getattr(verdict, name)) is not None:
            print_line(console, f"{name:<9}  {fact}")
    if verdict.evidence:
        _section(console, "Evidence", *verdict.evidence)
    if verdict.first_divergence is not None:
        facts = [f"{name:<8} {fact}" for name, fact in facts_of(verdict.first_divergence)]
        _section(console, "First divergence", *facts, *(f"{'':<8} {line}" for line in source_lines(verdict)))
    render_numbers(verdict, console)
    if verdict.origins:
        more = f", the first {MAX_ORIGINS} of {len(verdict.origins)}" if len(verdict.origins) > MAX_ORIGINS else ""
        _section(console, f"Origins (differing, though nothing they read differs{more})")
        print_table(console, *origin_table(verdict, MAX_ORIGINS), numbers="rank step", is_folded=True)
    _section(console, "Compared", *coverage_lines(verdict))
    if verdict.environment:
        _section(console, "Environment differences")
        print_table(console, *environment_table(verdict), is_folded=True)
    if lines := next_lines(verdict):
        _section(console, "Next", *lines)


def _word(verdict: Verdict) -> str:
    return verdict.verdict.upper().replace("_", " ")


def _section(console: Console, title: str, *lines: str) -> None:
    print_line(console)
    print_line(console, title, "bold")
    for line in lines:
        print_line(console, f"  {line}")


def facts_of(divergence: Divergence) -> list[tuple[str, str]]:
    """Return what is known of a divergence, each with its name."""
    is_graph = divergence.op.startswith(REGION) and divergence.op.endswith(".graph")
    kind = "another compiled graph" if is_graph and divergence.kind == "structure" else _KINDS[divergence.kind]
    shape = "" if divergence.shape is None else f" {list(divergence.shape)}"
    facts = [
        ("where", f"rank {divergence.rank}, step {divergence.step}, phase {divergence.phase}"),
        ("module", divergence.module or "(outside any module)"),
        ("op", f"{divergence.op} #{divergence.occurrence}, output {divergence.output}" if divergence.op else ""),
        ("name", divergence.name or ""),
        ("kind", f"{divergence.kind}: {kind}"),
        ("tensor", "" if divergence.dtype is None else f"{divergence.dtype}{shape}"),
        ("digests", f"{divergence.reference_digest or '-'} in the reference, {divergence.current_digest or '-'} now"),
        ("origin", _role_of(divergence)),
        *(("" if index else "source", line) for index, line in enumerate(divergence.source)),
    ]
    return [(name, fact) for name, fact in facts if fact]


def _role_of(divergence: Divergence) -> str:
    if divergence.is_origin:
        return "origin: what it read agrees, so it starts here"
    if divergence.is_origin is None:
        return "cannot be proven to start here"
    if not divergence.op:
        return "source: it came in from outside the step's ops, or was passed on to here"
    return "passed on: something it read differs already"


def source_lines(verdict: Verdict) -> list[str]:
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


def origin_table(verdict: Verdict, limit: int) -> Table:
    """Return columns and rows of the first origins, with ranks where there are several."""
    shown = verdict.origins[:limit]
    start = 0 if verdict.coverage.ranks > 1 or any(origin.rank for origin in shown) else 1
    columns = ("rank", "step", "phase", "module", "op", "name", "kind", "source")
    rows: list[tuple[object, ...]] = [
        (
            *(one.rank, one.step, one.phase, one.module or "-", f"{one.op}#{one.occurrence}", one.name or "-"),
            *(one.kind, one.source[0] if one.source else "-"),
        )[start:]
        for one in shown
    ]
    return columns[start:], rows


def environment_table(verdict: Verdict) -> Table:
    """Return columns and rows of the environment's differences."""
    rows: list[tuple[object, ...]] = [
        (
            *(one.name, one.reference, one.current),
            *("machine" if one.is_machine else "choice", "yes" if one.changes_bits else "no"),
        )
        for one in verdict.environment
    ]
    return ("name", "reference", "current", "kind", "can change bits"), rows


def coverage_lines(verdict: Verdict) -> list[str]:
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


def next_lines(verdict: Verdict) -> list[str]:
    """Return what to do next; nothing where the runs match."""
    first = verdict.first_divergence
    if verdict.verdict == "match" or first is None:
        return []
    step = f" --step {first.step}{f' --rank {first.rank}' if first.rank else ''}"
    step = "" if first.phase == "metric" else step  # no step has it
    shown = [f"det-callbacks show {path}{step}" for path in dict.fromkeys((verdict.reference, verdict.current))]
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
