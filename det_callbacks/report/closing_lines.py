"""The closing lines and errors of a recording, a verification, and audits."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from det_callbacks.audit.result import AuditReport
from det_callbacks.report.console import Section, Table, to_text
from det_callbacks.tensors.files import KeptCounts
from det_callbacks.text import at_most, count, listed, ranks_text, size
from det_callbacks.verdict import Verdict

if TYPE_CHECKING:
    from det_callbacks.ranks.replicas import ReplicaDifference, ReplicaReport

MAX_FINDINGS, MAX_DIFFERENCES = 30, 10  # rows of an audit of ops, and lines on replicas


def progress_word(*, num_steps: int, num_differing: int, is_recording: bool) -> str:
    if num_differing:
        return f"{count(num_steps, 'step')}, {count(num_differing, 'site')} differ"
    return f"{count(num_steps, 'step')} {'recorded' if is_recording else 'match'}"


def level_words(level: str, compiled: str, regions: Collection[str]) -> str:
    words = []
    if compiled == "eager":
        words.append("compiled code ran as eager code, with different kernels")
    if regions:
        words.append(f"seen only from outside: {listed(sorted(regions))}")
    return f"{level} ({'; '.join(words)})" if words else level


def recorded_line(
    *,
    path: str,
    num_steps: int,
    num_sites: int,
    num_bytes: int,
    level: str,
    saved: Mapping[str, Any],
    num_agreed: int | None,
    num_ranks: int,
    kept: KeptCounts | None,
    num_metrics: int,
    recorder: str = "",
) -> str:
    """Return the closing line of a recording; ``num_agreed`` is None unless it was resumed."""
    match = "matches the one" if num_agreed == 1 else "match those"
    agreed = f"{count(num_agreed, 'step')} {match} already recorded; " if num_agreed else ""
    parts = [
        (
            f"{agreed}recorded "
            f"{count(num_steps, 'step' if num_agreed is None else 'new step')}"
            f"{_of_ranks(num_ranks)}"
        ),
        f"{count(num_sites, 'site')} at level {level}{f' ({recorder})' if recorder else ''}",
        *([count(num_metrics, "metric")] if num_metrics else []),
        f"{size(num_bytes)} of digests{_replayed(saved, 'saved for replay')}",
        f"in {path}",
    ]
    if kept is not None:
        sampled = ""
        if kept.num_sampled:
            sampled = f", {kept.num_sampled:,} of them by a sample of their elements"
        parts[-1] += f"; kept {count(kept.num_tensors, 'tensor')} ({size(kept.num_bytes)}{sampled})"
        if kept.num_missing:
            parts[-1] += (
                f"; did NOT keep the tensors of {count(kept.num_missing, 'call')} {kept.reason}"
            )
    return f"det_callbacks: {', '.join(parts)}"


def recorded_call_line(call: str, *, path: str, num_metrics: int) -> str:
    """Return the closing line of a recorded ``trainer.test`` or the like."""
    return f"det_callbacks: recorded {count(num_metrics, 'metric')} of {call} in {path}"


def nothing_recorded_text(*, path: Path, selected: str, is_resumed: bool) -> str:
    """Return the error of a fit without a recorded step; ``selected`` is ""
    if all steps are recorded.
    """
    if is_resumed:
        done = (
            f"The checkpoint is from a finished run, so there was no step to train, and {path} is "
            "unchanged"
        )
        return f"{done}. Resume from an earlier checkpoint, or train longer."
    if not selected:
        return (
            f"The fit had no step, so nothing was recorded in {path}. Check that its loader "
            "returns batches."
        )
    return (
        f"The fit recorded nothing in {path}, because it ran no step that {selected} selects. "
        "Select a step that the fit reaches."
    )


def after_last_update(
    *, num_batches: int, num_calls: int, num_backwards: int, model: str, optimizers: str
) -> str:
    """Return the end of a followed training, after its last update;
    0 batches if it has no loader.
    """
    if num_batches:
        what = "the last batch" if num_batches == 1 else f"the last {num_batches:,} batches"
    elif num_calls:
        what = (
            f"the last call of {model}"
            if num_calls == 1
            else f"the last {num_calls:,} calls of {model}"
        )
    else:
        what = (
            "the last backward()"
            if num_backwards == 1
            else f"the last {num_backwards:,} calls of backward()"
        )
    return f"{what}, after which {optimizers} did not step"


def unrecorded_updates(updates: Mapping[str, int], *, num_iterations: int | None = None) -> str:
    """Return updates that no step holds; ``num_iterations`` counts their
    iterations if these were the first.
    """
    steps = listed([f"{count(number, 'step')} of {name}" for name, number in updates.items()])
    if num_iterations is None:
        return f"{steps}, before which no module with their parameters was called"
    which = (
        "the first iteration" if num_iterations == 1 else f"the first {num_iterations:,} iterations"
    )
    return f"{which} of the loop ({steps}), since no module with the parameters was called before"


def verified_line(verdict: Verdict, *, level: str, report: Path | None = None) -> str:
    number, differing = verdict.counts.sites_differing, ""
    if number:
        sites = count(number, "site") if verdict.counts.sites_compared else number
        differing = f", {sites} differing"
    shown = "" if report is None else f"; report: {report}"
    resumed = ""
    if verdict.resume is not None and verdict.resume.how == "found":
        resumed = f" from step {verdict.resume.step} on, where it resumed (by its state)"
    return (
        f"det_callbacks: {verdict.verdict}: verified "
        f"{_compared(verdict, level)}{resumed}{differing}"
        f"{_replayed(verdict.coverage.replayed, 'replayed')}, against {verdict.reference} "
        f"(verdict{' and diverging steps' * (verdict.verdict != 'match')}: "
        f"{verdict.current}{shown})"
    )


def waiting_line(verdict: Verdict, *, stages: Sequence[str], num_ended: int, level: str) -> str:
    """Return the line of a fit that matches while the reference has more parts,
    so there is no verdict yet.
    """
    return (
        f"det_callbacks: part {num_ended} ({stages[num_ended - 1]}) of {len(stages)} matches "
        f"{verdict.reference}: verified {_compared(verdict, level)}; the verdict follows after the "
        "last part"
    )


def unfinished_text(verdict: Verdict, *, stages: Sequence[str], num_ended: int) -> str:
    """Return the error of a process that ended before all parts of the reference ran."""
    parts = (
        f"{num_ended} of the {len(stages)} parts ({', '.join(stages)}) of the reference "
        f"{verdict.reference}"
    )
    todo = (
        "Run the other parts with the same callback, or compare the parts that both runs have with "
        'steps="common".'
    )
    return f"{verdict.verdict}: this process ended after {parts}. {verdict.explanation} {todo}"


def no_metrics_text(call: str, *, reference: Path | None) -> str:
    """Return the error of a lone ``trainer.test`` or the like without a metric."""
    text = "so nothing was recorded in, or compared with,"
    todo = "Log a metric with self.log, and check that the loader returns batches."
    return f"{call} logged no metric, {text} {reference}. {todo}"


def no_batch_text(call: str, *, reference: Path | None) -> str:
    """Return the error of a ``trainer.predict`` or the like without a batch."""
    return (
        f"{call} ran no batch, so nothing was recorded in, or compared with, {reference}. Check "
        "that the loader returns batches."
    )


def no_stage_text(stages: Sequence[str], *, reference: Path | None) -> str:
    """Return the error of a program that called nothing that was to be recorded."""
    calls = " or ".join(f"trainer.{stage}" for stage in stages)
    return (
        f"The program did not call {calls}, so nothing was recorded in, or compared with, "
        f"{reference}. Add what it calls to stages."
    )


def _compared(verdict: Verdict, level: str) -> str:
    counts, coverage = verdict.counts, verdict.coverage
    metrics = [count(coverage.metrics, "metric")] if coverage.metrics else []
    if metrics and not counts.steps_compared:
        return metrics[0]
    steps = f"{count(counts.steps_compared, 'step')}{_of_ranks(coverage.ranks)}"
    return ", ".join([steps, f"{count(counts.sites_compared, 'site')} at level {level}", *metrics])


def _of_ranks(number: int) -> str:
    return f" of {number} ranks" if number > 1 else ""


def _replayed(replayed: Mapping[str, Any], done: str) -> str:
    mib = sum(entry["mib_per_step"] for entry in replayed.values())
    return f", {count(len(replayed), 'op')} {done} ({mib:.3g} MiB a step)" if replayed else ""


def audit_line(report: AuditReport, *, folder: Path, missed: Sequence[int] = ()) -> str:
    """Return the closing line of an audit; ``missed`` are requested steps that
    the training did not reach.
    """
    what = (
        f"audited {count(len(report.steps), 'step')}, ran {count(report.num_compared, 'op')} twice"
    )
    if missed:
        what += f"; did not reach {count(len(missed), 'step')} ({listed(map(str, missed))})"
    if not report.findings:
        return f"det_callbacks: every op repeated its bits: {what} (in {folder})"
    ops = count(len(report.findings), "op")
    return (
        f"det_callbacks: {ops} gave different bits: {what} (audit.json and replay.yaml: {folder})"
    )


def audit_lines(report: AuditReport, *, replay: Path) -> str:
    """Return the table of ops that differed, and what to do."""
    columns = ("judgement", "phase", "module", "op", "steps", "elements", "ULPs", "source")
    rows = []
    for found in report.findings:
        place = found.judgement, found.phase, found.module, found.op
        steps = ", ".join(at_most(4, [*map(str, found.steps)]))
        ulps = "" if found.max_ulps is None else found.max_ulps
        source = next(iter(found.source), "")
        rows.append((*place, steps, found.num_differing, ulps, source))
    use = (
        f"or record and verify with replay={str(replay)!r}, which saves and restores their outputs."
    )
    advice = (
        [f"Make these ops deterministic (see det-callbacks ops), {use}"] if report.replay else []
    )
    if any(found.judgement == "transient" for found in report.findings):
        advice += ["Transient: one of the three runs of a call differed. Check the hardware first."]
    begin = (
        f"{count(len(report.findings), 'op')} gave different bits from the same inputs when run "
        "again."
    )
    table = Table(columns=columns, rows=rows, limit=MAX_FINDINGS)
    return to_text([Section(lines=[begin]), Section(table=table), Section(lines=advice)])


def replicas_text(report: "ReplicaReport") -> str:
    """Return how replicas differ, since when, and what to do."""
    num_names, last = len({found.name for found in report.differences}), report.last_agreement
    agreed = "This was the first audit." if last is None else f"They last agreed {_when(last)}."
    differences = "\n".join(
        f"  {line}" for line in at_most(MAX_DIFFERENCES, [*map(_difference, report.differences)])
    )
    return (
        f"The replicas of this run differ {_when(report.step)}: {count(num_names, 'tensor')} on "
        f"{report.world_size} ranks. {agreed}\n\n"
        f"{differences}\n\n"
        f"Compared: {count(report.num_compared, 'tensor')} of this "
        f"rank{_left_out(report.left_out)}.\n"
        "To find the op, record with DeterminismCallback and verify. To exclude tensors that "
        "should differ, pass ReplicaAuditCallback(ignore=[...])."
    )


def replicas_line(report: "ReplicaReport", *, num_audits: int, has_differed: bool) -> str:
    verb = ("agree again" if has_differed else "agree") if report.equal else "differ"
    return (
        f"det_callbacks: replicas {verb}: {count(num_audits, 'audit')} of "
        f"{count(report.num_compared, 'tensor')} on {report.world_size} ranks, the last "
        f"{_when(report.step)}{_left_out(report.left_out)}"
    )


def _when(step: int) -> str:
    return "before the first step" if step < 0 else f"after step {step}"


def _difference(found: "ReplicaDifference") -> str:
    held = [f"{value.digest or 'not there'} on {ranks_text(value.ranks)}" for value in found.values]
    others = f"{'; '.join(held[1:])}, and {held[0]}"
    return f"{found.name}: {others}{'; neither is a majority' if found.is_tie else ''}"


def _left_out(left_out: Mapping[str, int]) -> str:
    parts = [f"{reason} ({number})" for reason, number in sorted(left_out.items())]
    return f"; not compared: {'; '.join(parts)}" if parts else ""
