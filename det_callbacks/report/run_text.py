"""A recorded run in tables: its steps, the sites of a step, and where a digest appears."""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.text import Text

from det_callbacks.host_digest import format_digest
from det_callbacks.report.closing import count
from det_callbacks.report.tables import print_table
from det_callbacks.runs.evidence import NondeterministicOp
from det_callbacks.runs.metrics import read_metrics
from det_callbacks.runs.program import Site, StepRecord, StepView, TensorLayout
from det_callbacks.runs.store import RankRun, Run
from det_callbacks.tensors.kept import not_kept

HEAD = 10
"""Steps shown from either end of a long run."""


def render_run(run: Run, rank: RankRun, console: Console, *, is_all: bool = False) -> None:
    """Print what a run is and a table of its steps; of a long one the first and last ten, unless all are asked for."""
    selection = run.manifest.get("selection", {})
    shown = ", ".join(f"{name} {value}" for name, value in selection.items())
    state = "complete" if run.is_complete else f"INCOMPLETE: {run.incomplete_reason}"
    for line in (
        f"run {run.run_id} in {run.path}: {state}",
        f"recorded: {shown}; keeps {run.keeps} steps; {count(run.world_size, 'rank')}",
        f"rank {rank.rank}: {count(rank.num_steps, 'step')} in {count(_num_fits(rank), 'fit')}",
    ):
        console.print(Text(line), soft_wrap=True)
    for found in map(NondeterministicOp.from_dict, run.nondeterministic_ops(rank.rank)):
        allowed = "let through by the allow-list" if found.is_allowed else "not on the allow-list"
        line = f"no deterministic implementation: {found.place}, {count(found.num_calls, 'call')}, {allowed}"
        console.print(Text(line), soft_wrap=True)
    for segment, step in sorted(run.resumed_steps):
        console.print(Text(f"resumed: fit {segment} went on from a checkpoint with step {step}"), soft_wrap=True)
    if patterns := run.manifest.get("replay"):
        console.print(Text(f"saved for replay: {', '.join(patterns)}"), soft_wrap=True)
    if patterns := run.manifest.get("keep_tensors"):
        console.print(Text(f"tensors kept: {', '.join(patterns)}"), soft_wrap=True)
        if (kept := not_kept(run, rank.rank)).num_missing:
            missing = f"{count(kept.num_missing, 'call')} from step {kept.first_missing} on"
            console.print(Text(f"NOT kept: {missing}: {kept.reason}"), soft_wrap=True)
    records = list(_ends(rank, is_all=is_all))
    rows = [
        ("...",) * 7
        if record is None
        else (
            record.segment,
            record.step,
            record.epoch,
            len(record.digests),
            format_digest(record.program_id),
            format_digest(record.layout_id),
            format_digest(record.chain),
        )
        for record in records
    ]
    print_table(
        console, ("fit", "step", "epoch", "sites", "program", "layout", "chain"), rows, numbers="fit step epoch sites"
    )
    if rank.rank == 0:
        _render_metrics(run, console, is_all=is_all)


def _render_metrics(run: Run, console: Console, *, is_all: bool) -> None:
    rows: list[tuple[object, ...]] = [
        (segment, reading.step, f"metric {name}", reading.place, metric.value, metric.digest)
        for segment in run.segments
        for reading in read_metrics(run, segment).by_key.values()
        for name, metric in reading.metrics.items()
    ]
    if not is_all and len(rows) > 2 * HEAD + 1:
        rows = [*rows[:HEAD], ("...",) * 6, *rows[-HEAD:]]
    if rows:
        print_table(console, ("fit", "step", "metric", "where", "value", "digest"), rows, numbers="fit step")


def render_step(view: StepView, console: Console) -> None:
    """Print the sites of a step."""
    record = view.record
    program = view.program
    skipped = ", ".join(f"{number} {reason}" for reason, number in program.ops_skipped.items())
    console.print(
        Text(
            f"step {record.step} (epoch {record.epoch}, rank {view.rank}): {count(len(program), 'site')}, "
            f"{count(program.ops_seen, 'op')} seen, {program.ops_digested} digested"
            + (f"; skipped: {skipped}" if skipped else "")
        ),
        soft_wrap=True,
    )
    rows = [
        (
            position,
            site.phase,
            site.module or "-",
            describe_site(site),
            describe_tensor(entry),
            format_digest(int(digest)),
            ",".join(map(str, site.inputs)) or "-",
            site.source[0] if site.source else "-",
        )
        for position, (site, entry, digest) in enumerate(
            zip(program.sites, view.layout.entries, record.digests, strict=True)
        )
    ]
    columns = ("site", "phase", "module", "op or name", "tensor", "digest", "reads", "source")
    print_table(console, columns, rows, numbers="site")


def render_digest_places(run: Run, rank: RankRun, digest: int, console: Console) -> int:
    """Print where a digest appears and return how often; reads every step of a rank."""
    rows: list[tuple[object, ...]] = []
    for record in rank.iterate():
        positions = np.flatnonzero(record.digests == np.uint64(digest))
        if not len(positions):
            continue
        view = run.view(rank.rank, record.segment, record.step)
        for position in positions.tolist():
            site = view.program.sites[position]
            rows.append(
                (
                    rank.rank,
                    record.step,
                    position,
                    site.phase,
                    site.module or "-",
                    describe_site(site),
                    describe_tensor(view.layout.entries[position]),
                )
            )
    if rows:
        columns = ("rank", "step", "site", "phase", "module", "op or name", "tensor")
        print_table(console, columns, rows, numbers="rank step site")
    else:
        console.print(Text(f"{format_digest(digest)} appears nowhere in rank {rank.rank}."), soft_wrap=True)
    return len(rows)


def render_ops(view: StepView, console: Console) -> None:
    """Print the ops of a step, the most frequent first, with the elements that they produced."""
    calls: dict[str, int] = defaultdict(int)
    elements: dict[str, int] = defaultdict(int)
    modules: dict[str, set[str]] = defaultdict(set)
    for site, entry in zip(view.program.sites, view.layout.entries, strict=True):
        if not site.op or site.role == "argument":
            continue
        calls[site.op] += site.output == 0
        modules[site.op].add(site.module)
        elements[site.op] += 0 if entry is None else int(np.prod(entry.shape, dtype=np.int64))
    rows = [
        (op, calls[op], len(modules[op]), f"{elements[op]:,}") for op in sorted(calls, key=lambda op: (-calls[op], op))
    ]
    print_table(console, ("op", "calls", "modules", "elements"), rows, numbers="calls modules elements")


def describe_site(site: Site) -> str:
    """Return what a site is in a few words: "aten.mm.default#3", "input net.head.weight"."""
    if site.op:
        output = f" output {site.output}" if site.output else ""
        what = " argument" if site.role == "argument" else ""
        mark = " (recomputed)" if site.recomputed else ""
        name = f" [{site.name}]" if site.name else ""
        return f"{site.op}#{site.occurrence}{output}{what}{name}{mark}"
    role = "" if site.role == "named" else f"{site.role} "
    return f"{role}{site.name or '(made outside the trace)'}"


def describe_tensor(entry: TensorLayout | None) -> str:
    """Return "float32 [8, 64]", or "-" where there is no tensor."""
    if entry is None:
        return "-"
    shape = f" {list(entry.shape)}" if entry.shape or entry.stride else ""
    return f"{entry.dtype}{shape}" + (f" {entry.detail}" if entry.detail else "")


def _num_fits(rank: RankRun) -> int:
    return sum(len(rank.steps(segment)) > 0 for segment in rank.segments)


def _ends(rank: RankRun, *, is_all: bool) -> Iterator[StepRecord | None]:
    places = [(segment, int(step)) for segment in rank.segments for step in rank.steps(segment)]
    if is_all or len(places) <= 2 * HEAD + 1:
        for place in places:
            yield rank.read(*place)
        return
    for place in places[:HEAD]:
        yield rank.read(*place)
    yield None
    for place in places[-HEAD:]:
        yield rank.read(*place)
