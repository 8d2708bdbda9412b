"""What to record again of both trainings, to learn more than a verdict knows."""

from dataclasses import replace
from typing import Any

from det_callbacks.compare.numbers import to_keep
from det_callbacks.runs.program import REGION
from det_callbacks.runs.selection import PHASES, Selection
from det_callbacks.verdict import Verdict

MAX_OP_STEPS = 10
"""Steps that are recorded again at level op at once; of more, first all are recorded at level state."""


def with_next_recording(verdict: Verdict, selection: Selection) -> Verdict:
    """Return the verdict with the arguments that record what it lacks, as ``record_next``.

    Args:
        verdict: on two runs.
        selection: what both recorded.
    """
    return replace(verdict, record_next=_arguments(verdict, selection))


def _arguments(verdict: Verdict, selection: Selection) -> dict[str, Any] | None:
    """Return arguments of ``DeterminismCallback``; None where nothing differs, or the runs hold all there is."""
    first = verdict.first_divergence
    if first is None or (first.kind in ("missing", "extra") and first.shape is None and not first.op):
        return None  # a whole step that only one run has
    if first.phase == "metric":
        return None  # no step has it
    steps = range(first.step, first.step + 1) if first.is_origin else _suspects(first.step, selection)
    if len(steps) > MAX_OP_STEPS:
        return {"level": "state"}
    arguments: dict[str, Any] = {"level": "op", "only_steps": list(steps)}
    wanted = to_keep(verdict) if len(steps) == 1 else None
    if wanted is not None:
        return {**arguments, "only_steps": [wanted[0].step], "keep_tensors": [wanted[1]]}
    if any(origin.op.startswith(REGION) and not origin.op.endswith(".graph") for origin in verdict.origins):
        return {**arguments, "compiled": "eager"}
    has_all = selection.level == "op" and selection.modules == ("*",) and selection.phases == PHASES
    return None if has_all and len(steps) == 1 else arguments


def _suspects(step: int, selection: Selection) -> range:
    """Return the steps in which a difference can begin that is first seen in this one: those since the one before."""
    if selection.only_steps is None:
        return range(max(0, step - selection.every_n_steps + 1), step + 1)
    before = [known for known in selection.only_steps if known < step]
    return range(before[-1] + 1 if before else 0, step + 1)
