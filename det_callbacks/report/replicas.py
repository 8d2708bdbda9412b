"""What an audit of the replicas found, in words."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from det_callbacks.report.console import at_most, count, ranks_text

if TYPE_CHECKING:
    from det_callbacks.ranks.replicas import ReplicaDifference, ReplicaReport

MAX_DIFFERENCES = 10
"""Differences that a message names; the others are counted."""


def replicas_text(report: "ReplicaReport") -> str:
    """Return what differs between replicas, where and since when, what was still equal, and what to do next."""
    num_names = len({found.name for found in report.differences})
    last = report.last_agreement
    agreed = "They were never compared before." if last is None else f"They last agreed {_when(last)}."
    differences = "\n".join(f"  {line}" for line in at_most(MAX_DIFFERENCES, [*map(_difference, report.differences)]))
    return (
        f"The replicas of this training differ {_when(report.step)}: {count(num_names, 'tensor')} on "
        f"{report.world_size} ranks. {agreed}\n\n{differences}\n\n"
        f"Compared: {count(report.num_compared, 'tensor')} of this rank{_left_out(report.left_out)}.\n"
        "To find the op, record with DeterminismCallback and verify, which names rank, step and op; audit after "
        "every step to find the step. What is to differ: ReplicaAuditCallback(ignore=[...])."
    )


def replicas_line(report: "ReplicaReport", *, num_audits: int, has_differed: bool) -> str:
    """Return the closing line of a fit whose replicas were compared so often, with the report of the last time."""
    verb = ("agree again" if has_differed else "agree") if report.equal else "differ"
    return (
        f"det_callbacks: replicas {verb}: {count(num_audits, 'audit')} of {count(report.num_compared, 'tensor')} on "
        f"{report.world_size} ranks, the last {_when(report.step)}{_left_out(report.left_out)}"
    )


def _when(step: int) -> str:
    return "before the first step" if step < 0 else f"after step {step}"


def _difference(found: "ReplicaDifference") -> str:
    held = [f"{value.digest or 'not there'} on {ranks_text(value.ranks)}" for value in found.values]
    if found.is_tie:
        return f"{found.name}: {', '.join(held)}; neither is a majority"
    return f"{found.name}: {'; '.join(held[1:])}, and {held[0]}"


def _left_out(left_out: Mapping[str, int]) -> str:
    parts = [f"{reason} ({number})" for reason, number in sorted(left_out.items())]
    return f"; not compared: {'; '.join(parts)}" if parts else ""
