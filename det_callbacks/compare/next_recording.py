"""What to record again to learn more about a difference."""

import shlex
from typing import Any

from det_callbacks.runs.manifest import ARGUMENTS
from det_callbacks.runs.program import is_collective, is_region
from det_callbacks.runs.selection import PHASES, OpPattern, Selection
from det_callbacks.runs.store import Run
from det_callbacks.verdict import Divergence, Verdict

MAX_OP_STEPS = 10
"""How many steps are recorded again at level op at once; more are first recorded at level state."""


def next_recording(verdict: Verdict, selection: Selection) -> dict[str, Any] | None:
    """Return the arguments of ``DeterminismCallback`` that record what a verdict lacks, if any."""
    first = verdict.first_divergence
    if first is None or first.phase == "metric":  # a metric is in no step
        return None
    if first.kind in ("missing", "extra") and first.shape is None and not first.op:
        return None  # a whole step that only one run has
    steps = (
        range(first.step, first.step + 1) if first.is_origin else _suspects(first.step, selection)
    )
    if len(steps) > MAX_OP_STEPS:
        return {"level": "state"}
    arguments: dict[str, Any] = {"level": "op", "only_steps": list(steps)}
    wanted = _to_keep(verdict) if len(steps) == 1 else None
    if wanted is not None:
        return {**arguments, "only_steps": [wanted[0].step], "keep_tensors": [wanted[1]]}
    regions = [origin.op for origin in verdict.origins if is_region(origin.op)]
    if any(not op.endswith(".graph") for op in regions):
        return {**arguments, "compiled": "eager"}
    has_all = selection.level == "op" and selection.modules == ("*",) and selection.phases == PHASES
    return None if has_all and len(steps) == 1 else arguments


def find_command(run: Run) -> str | None:
    """Return the ``det-callbacks find`` command for the script that made a run,
    or None if the run does not say.
    """
    argv = run.manifest.environment.get(ARGUMENTS)
    words = argv.value if argv is not None and isinstance(argv.value, list) else []
    return (
        shlex.join(["det-callbacks", "find", "--", "python", *map(str, words)]) if words else None
    )


def _suspects(step: int, selection: Selection) -> range:
    """Return the steps in which the difference may have started that this step shows."""
    if selection.only_steps is None:
        return range(max(0, step - selection.every_n_steps + 1), step + 1)
    before = [earlier for earlier in selection.only_steps if earlier < step]
    return range(before[-1] + 1 if before else 0, step + 1)


def _to_keep(verdict: Verdict) -> tuple[Divergence, str] | None:
    """Return the divergence to measure, and the pattern of the tensors to keep, or None."""
    first = verdict.origins[0] if verdict.origins else verdict.first_divergence
    if first is None or first.kind != "content" or first.shape is None:
        return None
    is_known = first.numbers is not None and not first.numbers.problem
    # results of collectives come after their call; ends of a compiled region are not outputs
    if is_known or not first.op or is_collective(first.op) or is_region(first.op):
        return None
    return first, OpPattern.exactly(first.phase, first.module, first.op)
