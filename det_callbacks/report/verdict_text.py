"""A verdict in words, for a person who has to act on it."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from det_callbacks.report.closing import count
from det_callbacks.report.numbers_text import render_numbers
from det_callbacks.report.tables import print_table, to_text
from det_callbacks.runs.program import REGION
from det_callbacks.verdict import Divergence, Verdict

MAX_ORIGINS = 20

_STYLES = {"match": "bold green", "diverged": "bold red", "not_comparable": "bold yellow"}
KINDS = {
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
    word = verdict.verdict.upper().replace("_", " ")
    where = f"rank 0 prints the whole verdict, and {Path(verdict.current) / 'verdict.json'} holds it"
    return f"{word} (said on rank {rank} of {world_size}; {where}): {verdict.explanation}"


def disagreement_text(verdict: Verdict, *, path: Path, num_agreed: int, num_dropped: int, rank: int = 0) -> str:
    """Return what is wrong with a resumed recording whose steps are not those that the run holds.

    Args:
        verdict: on the steps that were run again.
        path: of the run.
        num_agreed: steps that agreed before.
        num_dropped: new steps that were written before, and are taken back.
        rank: that says it; all but rank 0 say it in one line.
    """
    agreed = f"{count(num_agreed, 'step')} before it agreed" if num_agreed else "it is the first one that was run again"
    dropped = f"; {count(num_dropped, 'new step')} of this attempt went with it" if num_dropped else ""
    if rank:
        return (
            f"The resumed run is not the run in {path}, which is as it was before (said on rank {rank}; rank 0 prints "
            f"the whole verdict): {verdict.explanation}"
        )
    return (
        f"The resumed run is not the run in {path}: a step that is there already came out otherwise ({agreed}). "
        f"The run keeps its steps and is as it was before{dropped}.\n\n{verdict_lines(verdict)}\n"
        "Find out what the checkpoint did not bring back, or record this training as another run: into another folder, "
        "or over this one with overwrite=True."
    )


def render_verdict(verdict: Verdict, console: Console) -> None:
    """Print a verdict: the word, the sentence, where it began, what was covered, and what to do next."""
    _line(console, verdict.verdict.upper().replace("_", " "), _STYLES[verdict.verdict])
    _line(console, verdict.explanation)
    _line(console, "")
    _line(console, f"reference  {verdict.reference}")
    _line(console, f"current    {verdict.current}")
    if verdict.cause is not None:
        _line(console, f"cause      {verdict.cause}")
    if verdict.evidence:
        _heading(console, "Evidence")
        for line in verdict.evidence:
            _line(console, f"  {line}")
    if verdict.first_divergence is not None:
        _heading(console, "First divergence")
        _render_divergence(verdict.first_divergence, console)
    render_numbers(verdict, console)
    if verdict.origins:
        _render_origins(verdict, console)
    _render_coverage(verdict, console)
    _render_environment(verdict, console)
    if verdict.verdict != "match" and verdict.first_divergence is not None:
        _render_next(verdict, verdict.first_divergence, console)


def role_of(divergence: Divergence) -> str:
    """Return whether a divergence is an origin, in words."""
    if divergence.is_origin:
        return "origin: what it read agrees, so it starts here"
    if divergence.is_origin is None:
        return "cannot be proven to start here"
    if not divergence.op:
        return "source: it came in from outside the step's ops, or was passed on to here"
    return "passed on: something it read differs already"


def _render_divergence(divergence: Divergence, console: Console) -> None:
    facts = [
        ("where", f"rank {divergence.rank}, step {divergence.step}, phase {divergence.phase}"),
        ("module", divergence.module or "(outside any module)"),
        ("op", f"{divergence.op} #{divergence.occurrence}, output {divergence.output}" if divergence.op else ""),
        ("name", divergence.name or ""),
        ("kind", f"{divergence.kind}: {_kind_words(divergence)}"),
        ("tensor", _tensor(divergence)),
        ("digests", f"{divergence.reference_digest or '-'} in the reference, {divergence.current_digest or '-'} now"),
        ("origin", role_of(divergence)),
        *(("source" if not index else "", line) for index, line in enumerate(divergence.source)),
    ]
    for name, fact in facts:
        if fact:
            _line(console, f"  {name:<8} {fact}")


def _render_origins(verdict: Verdict, console: Console) -> None:
    shown = verdict.origins[:MAX_ORIGINS]
    more = f", the first {MAX_ORIGINS} of {len(verdict.origins)}" if len(verdict.origins) > MAX_ORIGINS else ""
    _heading(console, f"Origins (differing, though nothing they read differs{more})")
    has_ranks = verdict.coverage.ranks > 1 or any(origin.rank for origin in shown)
    columns = ("step", "phase", "module", "op", "name", "kind", "source")
    rows = [
        (
            *((origin.rank,) if has_ranks else ()),
            origin.step,
            origin.phase,
            origin.module or "-",
            f"{origin.op}#{origin.occurrence}",
            origin.name or "-",
            origin.kind,
            origin.source[0] if origin.source else "-",
        )
        for origin in shown
    ]
    print_table(console, ("rank", *columns) if has_ranks else columns, rows, numbers="rank step")


def _render_coverage(verdict: Verdict, console: Console) -> None:
    counts, coverage = verdict.counts, verdict.coverage
    _heading(console, "Compared")
    span = "" if coverage.steps is None else f" ({coverage.steps[0]} to {coverage.steps[1]})"
    _line(
        console,
        f"  {count(counts.steps_compared, 'step')}{span} of {count(coverage.ranks, 'rank')}, "
        f"{count(counts.sites_compared, 'site')}, {counts.sites_differing:,} differing",
    )
    if coverage.metrics:
        _line(console, f"  {count(coverage.metrics, 'metric')}")
    skipped = ", ".join(f"{number:,} {reason}" for reason, number in sorted(coverage.ops_skipped.items()))
    _line(
        console,
        f"  {count(coverage.ops_seen, 'op')} seen, {coverage.ops_digested:,} digested"
        + (f"; skipped: {skipped}" if skipped else ""),
    )
    for device, method in coverage.digested_on.items():
        _line(console, f"  digests of tensors on {device}: {method}")
    if coverage.opaque_regions:
        _line(console, f"  seen only from outside: {', '.join(coverage.opaque_regions)}")
    for name, replayed in coverage.replayed.items():
        _line(
            console,
            f"  replayed: {name}: {count(replayed['count'], 'tensor')} put back, {replayed['differing']:,} of them "
            f"differed, {replayed['mib_per_step']:.3g} MiB a step",
        )


def _render_environment(verdict: Verdict, console: Console) -> None:
    if not verdict.environment:
        return
    _heading(console, "Environment differences")
    rows = [
        (
            item.name,
            item.reference,
            item.current,
            "machine" if item.is_machine else "choice",
            "yes" if item.changes_bits else "no",
        )
        for item in verdict.environment
    ]
    print_table(console, ("name", "reference", "current", "kind", "can change bits"), rows)


def _render_next(verdict: Verdict, first: Divergence, console: Console) -> None:
    _heading(console, "Next")
    rank = f" --rank {first.rank}" if first.rank else ""
    step = "" if first.phase == "metric" else f" --step {first.step}{rank}"  # no step has it
    for path in dict.fromkeys((verdict.reference, verdict.current)):
        _line(console, f"  det-callbacks show {path}{step}")
    if verdict.record_next is not None:
        _render_record_next(verdict.record_next, console)


def _render_record_next(arguments: Mapping[str, Any], console: Console) -> None:
    """Print how to record what the runs do not hold, as arguments of the callback and as Hydra overrides."""
    steps = arguments.get("only_steps")
    which = (
        "the training"
        if steps is None
        else f"step {steps[0]}"
        if len(steps) == 1
        else f"steps {steps[0]} to {steps[-1]}"
    )
    why = "to see by how much it differs" if "keep_tensors" in arguments else "to see where it starts"
    _line(console, f"  {why}, record {which} again on both sides and compare the two recordings (det-callbacks diff):")
    values = {name: json.dumps(value) for name, value in arguments.items()}
    _line(console, f"      in Python  {', '.join(f'{name}={value}' for name, value in values.items())}")
    words = (
        f"determinism.{name}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"
        for name, value in arguments.items()
    )
    _line(console, f"      in Hydra   {shlex.join(words)}")


def _kind_words(divergence: Divergence) -> str:
    is_graph = divergence.op.startswith(REGION) and divergence.op.endswith(".graph")
    return "another compiled graph" if is_graph and divergence.kind == "structure" else KINDS[divergence.kind]


def _tensor(divergence: Divergence) -> str:
    if divergence.shape is None:
        return "" if divergence.dtype is None else divergence.dtype
    return f"{divergence.dtype} {list(divergence.shape)}"


def _heading(console: Console, text: str) -> None:
    _line(console, "")
    _line(console, text, "bold")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
