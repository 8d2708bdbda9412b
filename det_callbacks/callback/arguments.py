"""The callback's arguments: what is allowed, and the message for everything else."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from det_callbacks.errors import SelectionError

MODES = ("record", "verify", "disabled")
STEPS = ("all", "common")
ON_DIVERGENCE = ("raise", "collect", "warn")


def check_arguments(
    *, reference: object, mode: object, current: object, steps: object, on_divergence: object, overwrite: object
) -> None:
    """Raise ``SelectionError`` that names the first argument that is not allowed, and what is."""
    _require_one_of("mode", mode, MODES)
    _require_one_of("steps", steps, STEPS)
    _require_one_of("on_divergence", on_divergence, ON_DIVERGENCE)
    if not isinstance(reference, str | Path) or not str(reference):
        raise SelectionError(f"reference must be the path of a folder; got {reference!r}.")
    if current is not None and (not isinstance(current, str | Path) or not str(current)):
        raise SelectionError(f"current must be the path of a folder, or None; got {current!r}.")
    if not isinstance(overwrite, bool):
        raise SelectionError(f"overwrite must be True or False; got {overwrite!r}.")


def check_alone(callbacks: Sequence[Any]) -> None:
    """Raise ``SelectionError`` when more than one DeterminismCallback of a Trainer does something."""
    if sum(callback.mode != "disabled" for callback in callbacks) > 1:
        raise SelectionError(
            "This Trainer has two DeterminismCallbacks, and each would have to leave its trace before the other. "
            "Give it one; to record and verify, train twice."
        )


def _require_one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise SelectionError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.")
