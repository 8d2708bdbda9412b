"""The size of a difference, the first NaN, and what to record again to learn more.

Finds the first op that made a NaN or an infinity from finite numbers,
by the statistics of kept tensors.

An infinity may be intended: an attention mask contains infinities, and its softmax does not. So an
infinity counts only if it leads to a NaN, or to a tensor that nothing reads.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from det_callbacks.compare.ranks import FirstDifference
from det_callbacks.compare.step_numerics import kept_sites
from det_callbacks.digest.numbers import PARTS, can_measure
from det_callbacks.errors import ReferenceFormatError, SelectionError
from det_callbacks.runs.files import MANIFEST, damaged
from det_callbacks.runs.manifest import ARGUMENTS
from det_callbacks.runs.program import Site, StepView, is_collective, is_region
from det_callbacks.runs.selection import PHASES, OpPattern, Selection, as_patterns
from det_callbacks.runs.store import Run
from det_callbacks.tensors.files import KEPT, LEFT_OUT, SavedStep, SavedTensor, measure_saved
from det_callbacks.verdict import Divergence, Numbers, TensorNumbers, Verdict

MAX_RANKS = 16
"""How many ranks, those that differ first, have their tensors measured."""
MEASURED_ORIGINS = 5
"""How many origins of a rank are measured: each takes time to read,
and up to 10 KB to send to the other ranks.
"""
MAX_OP_STEPS = 10
"""How many steps are recorded again at level op at once; more are first recorded at level state."""

_COUNTS = ("num_differing", "num_nan", "num_inf", "max_ulps", "max_absolute", "max_relative")


def with_numbers(
    reference: Run, current: Run, first: Mapping[int, FirstDifference]
) -> dict[int, FirstDifference]:
    """Return the first differences of ranks, with their size if both runs kept the tensors."""
    try:
        patterns = [
            *map(OpPattern.parse, as_patterns("keep_tensors", reference.manifest.keep_tensors))
        ]
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
        sides = [
            SavedStep.of(run, rank=rank, segment=segment, step=step, kind=KEPT)
            for run in (reference, current)
        ]
        listed = dict.fromkeys((known.first, *known.origins[:MEASURED_ORIGINS]))
        wanted = filter(is_wanted, listed)
        measured = {
            divergence: replace(divergence, numbers=_numbers(divergence, sides))
            for divergence in wanted
        }
        origins = tuple(measured.get(origin, origin) for origin in known.origins)
        found[rank] = replace(known, first=measured.get(known.first, known.first), origins=origins)
    return found


def _numbers(divergence: Divergence, sides: Sequence[SavedStep]) -> Numbers:
    found, digests = list[SavedTensor](), (divergence.reference_digest, divergence.current_digest)
    for name, saved, digest in zip(
        ("the reference", "the current run"), sides, digests, strict=True
    ):
        try:
            kept, reason = saved.find(divergence, str(digest)), saved.values.get(LEFT_OUT, "")
        except ReferenceFormatError as error:
            return Numbers(problem=f"the kept tensors of {name} cannot be read: {error}")
        if kept is None:
            return Numbers(problem=f"{name} did not keep it" + (f": {reason}" if reason else ""))
        found.append(kept)
    reference, current = found
    name = f"output {divergence.output}"
    if (reference.shape, reference.dtype) == (current.shape, current.dtype):
        return Numbers(output=(_tensor_numbers(name, reference, current),))
    shapes = [f"{side.dtype} {list(side.shape)}" for side in found]
    problem = (
        f"{shapes[0]} in the reference and {shapes[1]} in the current run, so elements cannot be "
        "paired"
    )
    return Numbers(output=(TensorNumbers(tensor=name, problem=problem),))


def _tensor_numbers(name: str, reference: SavedTensor, current: SavedTensor) -> TensorNumbers:
    """Return the distance of two tensors of one dtype and shape; of a complex one, by its parts."""
    shape = reference.shape
    num = min(reference.num_saved, current.num_saved)
    if num < prod(shape):
        name, shape = f"{name}, {num:,} of {prod(shape):,} elements", (num,)
    part = PARTS.get(reference.dtype)
    known = measure_saved(reference, current)
    found = TensorNumbers(
        tensor=name,
        shape=shape if part is None else (*shape, 2),
        dtype=part or reference.dtype,
        ulps=known.histogram if can_measure(reference.dtype) else (),
        **{name: getattr(known, name) for name in _COUNTS},
    )
    if known.first is None or known.worst is None:
        return found
    (place, values), (_, worst, worst_values) = known.first, known.worst
    first, worst_place = (
        tuple(map(int, np.unravel_index(at, found.shape))) for at in (place, worst)
    )
    return replace(
        found, first=first, first_values=values, worst=worst_place, worst_values=worst_values
    )


# what to record again


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
    wanted = to_keep(verdict) if len(steps) == 1 else None
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
    before = [known for known in selection.only_steps if known < step]
    return range(before[-1] + 1 if before else 0, step + 1)


def to_keep(verdict: Verdict) -> tuple[Divergence, str] | None:
    """Return the divergence to measure, and the pattern of the tensors to keep, or None."""
    first = verdict.origins[0] if verdict.origins else verdict.first_divergence
    if first is None or first.kind != "content" or first.shape is None:
        return None
    is_known = first.numbers is not None and not first.numbers.problem
    # results of collectives come after their call; ends of a compiled region are not outputs
    if is_known or not first.op or is_collective(first.op) or is_region(first.op):
        return None
    return first, OpPattern.exactly(first.phase, first.module, first.op)


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """An op that reads only finite numbers and writes NaNs or infinities,
    as far as tensors were kept.

    Attributes:
        num_unknown: number of tensors that the op reads and that were not kept.
        first_nan: the op that turned its infinities into the first NaN, if it is a different op.
    """

    rank: int
    segment: int
    step: int
    site: Site
    num_nan: int
    num_inf: int
    num_elements: int
    num_unknown: int
    first_nan: Site | None


def first_nonfinite(run: Run) -> NonFinite | None:
    """Return the first such op of the earliest step that has one,
    or None if no kept step has one.
    """
    return next(_found(run), None) if run.manifest.keep_tensors else None


def _found(run: Run) -> Iterator[NonFinite]:
    places = {
        (segment, int(step), rank)
        for rank in run.ranks
        for segment in run.rank(rank).segments
        for step in run.rank(rank).steps(segment)
    }
    for segment, step, rank in sorted(places):
        place: dict[str, Any] = {"rank": rank, "segment": segment, "step": step}
        saved = SavedStep.of(run, **place, kind=KEPT)
        if any(_number(entry, "nan", "inf") for entry in saved.entries.values()):
            yield from _in_step(run.view(**place), saved)


def _number(entry: Any, *kinds: str) -> int:
    return sum(int(entry.get("statistics", {}).get(kind, 0)) for kind in kinds)


def _in_step(view: StepView, saved: SavedStep) -> Iterator[NonFinite]:
    sites = view.program.sites
    known = {position: saved.entries[key] for position, key in kept_sites(view, saved).items()}
    # a tensor that was not kept inherits from its inputs
    bad, has_nan = list[bool](), list[bool]()
    for position, site in enumerate(sites):
        entry = known.get(position)
        of_read = [any(flags[read] for read in site.inputs) for flags in (bad, has_nan)]
        bad.append(of_read[0] if entry is None else _number(entry, "nan", "inf") > 0)
        has_nan.append(of_read[1] if entry is None else _number(entry, "nan") > 0)
    readers: dict[int, list[int]] = {}
    for position, site in enumerate(sites):
        for read in site.inputs:
            readers.setdefault(read, []).append(position)
    # whether it leads to a NaN, or to a tensor that nothing reads; and the first such NaN
    lasts, next_nan = [False] * len(sites), [len(sites)] * len(sites)
    for position in reversed(range(len(sites))):
        if not bad[position]:
            continue
        later = [reader for reader in readers.get(position, []) if bad[reader]]
        lasts[position] = (
            has_nan[position] or not readers.get(position) or any(lasts[reader] for reader in later)
        )
        next_nan[position] = (
            position
            if has_nan[position]
            else min((next_nan[it] for it in later), default=len(sites))
        )
    for position, entry in known.items():
        site, nan = sites[position], next_nan[position]
        if not (bad[position] and lasts[position]) or any(bad[read] for read in site.inputs):
            continue
        yield NonFinite(
            rank=view.rank,
            segment=view.record.segment,
            step=view.record.step,
            site=site,
            num_nan=_number(entry, "nan"),
            num_inf=_number(entry, "inf"),
            num_elements=prod(entry["shape"]),
            num_unknown=sum(read not in known for read in site.inputs),
            first_nan=sites[nan] if position < nan < len(sites) else None,
        )
