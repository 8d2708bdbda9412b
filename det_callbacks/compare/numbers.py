"""The size of a difference, if both runs kept the tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from det_callbacks.compare.ranks import FirstDifference
from det_callbacks.digest.numbers import PARTS, can_measure
from det_callbacks.errors import ReferenceFormatError, SelectionError
from det_callbacks.runs.files import MANIFEST, damaged
from det_callbacks.runs.selection import OpPattern, as_patterns
from det_callbacks.runs.store import Run
from det_callbacks.tensors.files import KEPT, LEFT_OUT, SavedStep, SavedTensor, measure_saved
from det_callbacks.verdict import Divergence, Numbers, TensorNumbers

MAX_RANKS = 16
"""How many ranks, those that differ first, have their tensors measured."""
MEASURED_ORIGINS = 5
"""How many origins of a rank are measured: each takes time to read,
and up to 10 KB to send to the other ranks.
"""
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

    with_sizes = dict(first)
    for rank, difference in sorted(first.items(), key=lambda item: item[1].order)[:MAX_RANKS]:
        segment, step = difference.moment
        sides = [
            SavedStep.of(run, rank=rank, segment=segment, step=step, kind=KEPT)
            for run in (reference, current)
        ]
        wanted = filter(
            is_wanted, dict.fromkeys((difference.first, *difference.origins[:MEASURED_ORIGINS]))
        )
        measured = {
            divergence: replace(divergence, numbers=_numbers(divergence, sides))
            for divergence in wanted
        }
        with_sizes[rank] = replace(
            difference,
            first=measured.get(difference.first, difference.first),
            origins=tuple(measured.get(origin, origin) for origin in difference.origins),
        )
    return with_sizes


def _numbers(divergence: Divergence, sides: Sequence[SavedStep]) -> Numbers:
    tensors, digests = list[SavedTensor](), (divergence.reference_digest, divergence.current_digest)
    for run, saved, digest in zip(
        ("the reference", "the current run"), sides, digests, strict=True
    ):
        try:
            kept, reason = saved.find(divergence, str(digest)), saved.values.get(LEFT_OUT, "")
        except ReferenceFormatError as error:
            return Numbers(problem=f"the kept tensors of {run} cannot be read: {error}")
        if kept is None:
            return Numbers(problem=f"{run} did not keep it" + (f": {reason}" if reason else ""))
        tensors.append(kept)
    reference, current = tensors
    name = f"output {divergence.output}"
    if (reference.shape, reference.dtype) == (current.shape, current.dtype):
        return Numbers(output=(_tensor_numbers(name, reference, current),))
    shapes = [f"{side.dtype} {list(side.shape)}" for side in tensors]
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
    measure = measure_saved(reference, current)
    numbers = TensorNumbers(
        tensor=name,
        shape=shape if part is None else (*shape, 2),
        dtype=part or reference.dtype,
        ulps=measure.histogram if can_measure(reference.dtype) else (),
        **{name: getattr(measure, name) for name in _COUNTS},
    )
    if measure.first is None or measure.worst is None:
        return numbers
    (first, first_values), (_, worst, worst_values) = measure.first, measure.worst
    first_place, worst_place = (
        tuple(map(int, np.unravel_index(index, numbers.shape))) for index in (first, worst)
    )
    return replace(
        numbers,
        first=first_place,
        first_values=first_values,
        worst=worst_place,
        worst_values=worst_values,
    )
