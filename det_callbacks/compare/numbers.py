"""The size of a difference, and what to record again to learn more."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from det_callbacks.compare.collectives import FirstDifference
from det_callbacks.compare.facts import COLLECTIVES
from det_callbacks.digest.numbers import tensor_numbers
from det_callbacks.errors import ReferenceFormatError, SelectionError
from det_callbacks.runs.environment import ARGUMENTS
from det_callbacks.runs.files import MANIFEST, damaged
from det_callbacks.runs.patterns import OpPattern, as_patterns
from det_callbacks.runs.program import REGION
from det_callbacks.runs.selection import PHASES, Selection
from det_callbacks.runs.store import Run
from det_callbacks.tensors.files import KEPT, LEFT_OUT, SavedStep, SavedTensor, common_elements
from det_callbacks.verdict import Divergence, Numbers, TensorNumbers, Verdict

MAX_RANKS = 16
"""How many ranks, those that differ first, have their tensors measured."""
MEASURED_ORIGINS = 5
"""How many origins of a rank are measured: each takes time to read, and up to 10 KB to send to the other ranks."""
MAX_OP_STEPS = 10
"""How many steps are recorded again at level op at once; more are first recorded at level state."""


def with_numbers(reference: Run, current: Run, first: Mapping[int, FirstDifference]) -> dict[int, FirstDifference]:
    """Return the first differences of ranks, with their size if both runs kept the tensors."""
    try:
        patterns = [*map(OpPattern.parse, as_patterns("keep_tensors", reference.manifest.keep_tensors))]
    except SelectionError as error:
        raise damaged(reference.path / MANIFEST, str(error)) from error

    def is_wanted(divergence: Divergence) -> bool:
        place = divergence.phase, divergence.module, divergence.op
        is_in_both = divergence.kind not in ("missing", "extra")
        is_tensor = bool(divergence.op) and is_in_both and divergence.shape is not None
        return is_tensor and any(pattern.matches(*place) for pattern in patterns)

    found = dict(first)
    for rank, known in sorted(first.items(), key=lambda one: one[1].order)[:MAX_RANKS]:
        segment, step = known.moment
        sides = [SavedStep.of(run, rank=rank, segment=segment, step=step, kind=KEPT) for run in (reference, current)]
        listed = dict.fromkeys((known.first, *known.origins[:MEASURED_ORIGINS]))
        wanted = filter(is_wanted, listed)
        measured = {divergence: replace(divergence, numbers=_numbers(divergence, sides)) for divergence in wanted}
        origins = tuple(measured.get(origin, origin) for origin in known.origins)
        found[rank] = replace(known, first=measured.get(known.first, known.first), origins=origins)
    return found


def _numbers(divergence: Divergence, sides: Sequence[SavedStep]) -> Numbers:
    found, digests = list[SavedTensor](), (divergence.reference_digest, divergence.current_digest)
    for name, saved, digest in zip(("the reference", "the current run"), sides, digests, strict=True):
        try:
            kept, reason = saved.find(divergence, str(digest)), saved.values.get(LEFT_OUT, "")
        except ReferenceFormatError as error:
            return Numbers(problem=f"the kept tensors of {name} cannot be read: {error}")
        if kept is None:
            return Numbers(problem=f"{name} did not keep it" + (f": {reason}" if reason else ""))
        found.append(kept)
    reference, current = found
    label = TensorNumbers(tensor=f"output {divergence.output}", shape=reference.shape, dtype=reference.dtype)
    if (reference.shape, reference.dtype) == (current.shape, current.dtype):
        reference, current = common_elements(reference, current)
        if reference.every > 1:
            what = f"{label.tensor}, {reference.num_saved:,} of {label.num_elements:,} elements"
            label = replace(label, tensor=what, shape=(reference.num_saved,))
        return Numbers(output=(tensor_numbers(label, np.ravel(reference.bits), np.ravel(current.bits)),))
    shapes = [f"{side.dtype} {list(side.shape)}" for side in found]
    problem = f"{shapes[0]} in the reference and {shapes[1]} in the current run, so elements cannot be paired"
    return Numbers(output=(TensorNumbers(tensor=label.tensor, problem=problem),))


# what to record again


def next_recording(verdict: Verdict, selection: Selection) -> dict[str, Any] | None:
    """Return the arguments of ``DeterminismCallback`` that record what a verdict lacks, if any."""
    first = verdict.first_divergence
    if first is None or first.phase == "metric":  # a metric is in no step
        return None
    if first.kind in ("missing", "extra") and first.shape is None and not first.op:
        return None  # a whole step that only one run has
    steps = range(first.step, first.step + 1) if first.is_origin else _suspects(first.step, selection)
    if len(steps) > MAX_OP_STEPS:
        return {"level": "state"}
    arguments: dict[str, Any] = {"level": "op", "only_steps": list(steps)}
    wanted = to_keep(verdict) if len(steps) == 1 else None
    if wanted is not None:
        return {**arguments, "only_steps": [wanted[0].step], "keep_tensors": [wanted[1]]}
    regions = [origin.op for origin in verdict.origins if origin.op.startswith(REGION)]
    if any(not op.endswith(".graph") for op in regions):
        return {**arguments, "compiled": "eager"}
    has_all = selection.level == "op" and selection.modules == ("*",) and selection.phases == PHASES
    return None if has_all and len(steps) == 1 else arguments


def find_command(run: Run) -> str | None:
    """Return the ``det-callbacks find`` command for the script that made a run, or None if the run does not say."""
    argv = run.manifest.environment.get(ARGUMENTS)
    words = argv.value if argv is not None and isinstance(argv.value, list) else []
    return shlex.join(["det-callbacks", "find", "--", "python", *map(str, words)]) if words else None


def _suspects(step: int, selection: Selection) -> range:
    """Return the steps in which the difference may have started that this step shows."""
    if selection.only_steps is None:
        return range(max(0, step - selection.every_n_steps + 1), step + 1)
    before = [known for known in selection.only_steps if known < step]
    return range(before[-1] + 1 if before else 0, step + 1)


def to_keep(verdict: Verdict) -> tuple[Divergence, str] | None:
    """Return the divergence to measure, and the pattern of the tensors to keep, or None."""
    first = verdict.origins[0] if verdict.origins else verdict.first_divergence
    if first is None or first.kind != "content" or first.shape is None:
        return None
    is_known = first.numbers is not None and not first.numbers.problem
    # results of collectives come after their call; ends of a compiled region are not outputs
    if is_known or not first.op or first.op.startswith((*COLLECTIVES, REGION)):
        return None
    return first, OpPattern.exactly(first.phase, first.module, first.op)
