"""The callback's arguments: what is allowed, and the message for everything else."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from det_callbacks.errors import SelectionError
from det_callbacks.runs.selection import Selection

MODES = ("record", "verify", "audit", "disabled")
STEPS = ("all", "common")
ON_DIVERGENCE = ("raise", "collect", "warn")
RESUMES = ("exact", "warn", "plain")

_IN_PLACE_OF = {
    "audit": "an audit runs ops again, never whole steps",
    "audit_runs": "an op that differs is run a third time",
    "audit_steps": "only_steps chooses the steps of an audit",
    "generators": "those of loaders, samplers and data sets are found",
    "keep_batch_values": "the indices that samplers drew are kept without being asked for",
    "keep_budget_mib": "tensor_budget_mib is what one step may keep",
    "replay_budget_mib": "tensor_budget_mib is what one step may save",
    "replay_total_mib": "tensor_budget_mib is what one step may save",
    "require_digests": "a checkpoint without digests beside it is loaded, with a line",
    "sync_every_n_steps": "processes ask each other every 10 steps",
    **dict.fromkeys(
        ("validation_batches", "sanity_batches", "test_batches", "predict_batches"),
        "what the module logs in validation and test is compared without being asked for",
    ),
    "watch_callbacks": "a verdict names the hooks that ran while a generator was drawn from",
}
"""What there is instead of an argument that is gone."""


def refuse_unknown(names: Iterable[str]) -> None:
    """Raise ``SelectionError`` that names the first argument, if there is one, and what there is in its place."""
    for name in names:
        instead = f" any more: {_IN_PLACE_OF[name]}. Leave it out" if name in _IN_PLACE_OF else ""
        raise SelectionError(f"DeterminismCallback has no argument {name}{instead}.")


def check_arguments(
    *,
    reference: object,
    mode: object,
    current: object,
    steps: object,
    on_divergence: object,
    audit_replicas_every_n_steps: object,
    overwrite: object,
    resume: object,
    log_metrics: object,
) -> None:
    """Raise ``SelectionError`` that names the first argument that is not allowed, and what is."""
    _require_one_of("mode", mode, MODES)
    _require_one_of("steps", steps, STEPS)
    _require_one_of("on_divergence", on_divergence, ON_DIVERGENCE)
    _require_one_of("resume", resume, RESUMES)
    if mode in ("record", "verify") and (not isinstance(reference, str | Path) or not str(reference)):
        raise SelectionError(f"reference must be the path of a folder; got {reference!r}.")
    if current is not None and (not isinstance(current, str | Path) or not str(current)):
        raise SelectionError(f"current must be the path of a folder, or None; got {current!r}.")
    if not _is_int(audit_replicas_every_n_steps) or audit_replicas_every_n_steps < 0:  # type: ignore[operator]  # an int
        raise SelectionError(
            "audit_replicas_every_n_steps must be a whole number, 0 for no audit of the replicas; got "
            f"{audit_replicas_every_n_steps!r}."
        )
    if not isinstance(overwrite, bool):
        raise SelectionError(f"overwrite must be True or False; got {overwrite!r}.")
    if not isinstance(log_metrics, bool):
        raise SelectionError(f"log_metrics must be True or False; got {log_metrics!r}.")


def check_replica_audit(*, every_n_steps: object, on_divergence: object) -> None:
    """Raise ``SelectionError`` that names the first argument of a ReplicaAuditCallback that is not allowed."""
    _require_one_of("on_divergence", on_divergence, ON_DIVERGENCE)
    if not _is_int(every_n_steps) or every_n_steps < 1:  # type: ignore[operator]  # an int
        raise SelectionError(f"every_n_steps must be a whole number from 1 on; got {every_n_steps!r}.")


def check_replay(selection: Selection) -> None:
    """Raise ``SelectionError`` when steps or ops would run without what has to be saved."""
    if selection.level != "op" or not selection.is_every_step:
        raise SelectionError(
            f'replay needs level="op" and every_n_steps=1, since each output has to be saved where it is made; got '
            f"level={selection.level!r} and {selection.shown_steps}."
        )


def check_keep(selection: Selection) -> None:
    """Raise ``SelectionError`` when no op would be seen whose tensors are to be kept."""
    if selection.level != "op":
        raise SelectionError(
            f'keep_tensors needs level="op", at which ops are seen; got level={selection.level!r}. Record the '
            "steps that matter at level op: only_steps=[812]."
        )


def check_audit(selection: Selection, replay: Sequence[str], keep: Sequence[str]) -> None:
    """Raise ``SelectionError`` when an audit is to look at less than everything: what it missed would look clean."""
    if replace(selection, only_steps=None) != Selection() or replay or keep:
        raise SelectionError(
            "An audit looks at every op of the steps in only_steps, and keeps nothing; leave level, modules, phases, "
            f"every_n_steps, replay and keep_tensors at their defaults. Got {selection.to_dict()}, "
            f"replay={list(replay)} and keep_tensors={list(keep)}."
        )


def check_processes(mode: str, world_size: int) -> None:
    """Raise ``SelectionError`` when several processes are to do what one alone can do."""
    if mode == "audit" and world_size > 1:
        raise SelectionError(
            f"An audit runs ops again in one process, and this Trainer starts {world_size}: the others would "
            "wait in their collectives. Audit with devices=1."
        )


def check_alone(callbacks: Sequence[Any]) -> None:
    """Raise ``SelectionError`` when more than one DeterminismCallback of a Trainer does something."""
    if sum(callback.mode != "disabled" for callback in callbacks) > 1:
        raise SelectionError(
            "This Trainer has two DeterminismCallbacks, and each would have to leave its trace before the other. "
            "Give it one; to record and verify, train twice."
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require_one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise SelectionError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.")
