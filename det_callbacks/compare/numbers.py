"""By how much two runs differ where they do, from the tensors that both kept."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from det_callbacks.compare.ranks import FirstDifference
from det_callbacks.errors import ReferenceFormatError, SelectionError
from det_callbacks.numbers import tensor_numbers
from det_callbacks.patterns import OpPattern, as_patterns
from det_callbacks.runs.program import REGION
from det_callbacks.runs.store import Run
from det_callbacks.tensors.files import KEPT, SavedStep, StepPlace, tensor_path
from det_callbacks.tensors.kept import KeptStep, KeptTensor
from det_callbacks.verdict import Divergence, Numbers, TensorNumbers, Verdict

MAX_RANKS = 16
"""Ranks whose tensors are looked into, those that differ first."""
MAX_ORIGINS = 5
"""Origins of a rank that are: each takes the time to read what was kept of it, and up to 10 KB to tell other ranks."""
MAX_INPUTS = 16
"""Inputs of an op that are listed, those that differ first."""

Measure: TypeAlias = Callable[[int, Divergence], Numbers | None]
"""(segment, divergence) -> by how much it differs."""

StreamOf: TypeAlias = Callable[[int, int, int], Path]
"""(rank, segment, step) -> the stream that a step is in; KeyError where there is none."""

_COLLECTIVES = ("c10d.", "_c10d_functional", "c10d_functional.", "symm_mem.")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRun:
    """One of the two runs, as far as kept tensors are concerned.

    Attributes:
        name: "the reference" or "the current run".
        run_id: of it.
        stream_of: where its steps are.
    """

    name: str
    run_id: str
    stream_of: StreamOf

    @classmethod
    def of(cls, run: Run, name: str) -> "KeptRun":
        """Return what is needed of a run that is open for reading."""
        return cls(
            name=name, run_id=run.run_id, stream_of=lambda rank, segment, step: run.rank(rank).stream_of(segment, step)
        )


class KeptNumbers:
    """Says by how much a divergence differs, from what two runs kept of it; a ``Measure``.

    Bits are those of the digests that differ, or there are no numbers: each tensor is checked against its digest, and
    belongs to a site of the digest that the run holds.

    Args:
        reference: run that was recorded with ``keep_tensors``.
        current: the other one.
        patterns: what the reference was asked to keep.
    """

    def __init__(self, reference: KeptRun, current: KeptRun, patterns: Sequence[str]) -> None:
        self._sides = reference, current
        self._patterns = [*map(OpPattern.parse, patterns)]
        self._steps: dict[tuple[str, int, int, int], KeptStep | str] = {}

    @classmethod
    def of(cls, reference: Run, current: KeptRun) -> "KeptNumbers":
        """Return those of a reference and a run.

        Raises:
            ReferenceFormatError: run.json of the reference says nothing that could have been asked for.
        """
        try:
            patterns = as_patterns("keep_tensors", reference.manifest.keep_tensors)
        except SelectionError as error:
            path = str(reference.path / "run.json")
            raise ReferenceFormatError(f"{path}: {error} Record the run again.", path) from error
        return cls(KeptRun.of(reference, "the reference"), current, patterns)

    def __call__(self, segment: int, divergence: Divergence) -> Numbers | None:
        """Return by how much a divergence differs; None where nothing was to be kept there, or one side has no tensor.

        Args:
            segment: fit of the step.
            divergence: of a step that both runs have.
        """
        place = divergence.phase, divergence.module, divergence.op
        if not divergence.op or not any(pattern.matches(*place) for pattern in self._patterns):
            return None
        digests = divergence.reference_digest, divergence.current_digest
        if divergence.kind in ("missing", "extra") or divergence.shape is None:
            return None
        calls: list[list[KeptTensor]] = []
        for side, digest in zip(self._sides, digests, strict=True):
            found = self._find(side, segment, divergence, str(digest))
            if isinstance(found, str):
                return Numbers(problem=found)
            calls.append(found)
        return _compare(*calls)

    def _find(self, side: KeptRun, segment: int, divergence: Divergence, digest: str) -> list[KeptTensor] | str:
        """Return what a run kept; a sentence where it did not, or where that cannot be read."""
        key = side.name, divergence.rank, segment, divergence.step
        if key not in self._steps:
            self._steps[key] = _open(side, divergence.rank, segment, divergence.step)
        step = self._steps[key]
        if isinstance(step, str):
            return step
        try:
            call = step.find(divergence, digest)
            return call or f"{side.name} did not keep it" + (f": {step.reason}" if step.reason else "")
        except ReferenceFormatError as error:
            return f"what {side.name} kept could not be read: {error}"


def to_keep(verdict: Verdict) -> tuple[Divergence, str] | None:
    """Return the divergence whose tensors would have to be kept to say by how much it differs, and their pattern.

    None where that is known, where nothing differs, or where no op made the difference.
    """
    first = verdict.origins[0] if verdict.origins else verdict.first_divergence
    if first is None or first.kind not in ("content", "argument") or first.shape is None:
        return None
    is_known = first.numbers is not None and not first.numbers.problem
    # what a collective delivers comes later than its call; the ends of a compiled region are no outputs of an op
    if is_known or not first.op or first.op.startswith((*_COLLECTIVES, REGION)):
        return None
    return first, OpPattern.exactly(first.phase, first.module, first.op)


def measured(known: Mapping[int, FirstDifference], measure: Measure) -> dict[int, FirstDifference]:
    """Return the first differences of the first ranks with their numbers.

    Args:
        known: by rank; what has its numbers stays as it is.
        measure: says by how much a divergence differs.
    """
    first = sorted(known.items(), key=lambda item: item[1].order)[:MAX_RANKS]
    return {rank: _measured(one, measure) for rank, one in first if one.first.numbers is None}


def _measured(known: FirstDifference, measure: Measure) -> FirstDifference:
    segment = known.order[0]
    first = replace(known.first, numbers=measure(segment, known.first))
    origins = (
        first if origin == known.first else replace(origin, numbers=measure(segment, origin))
        for origin in known.origins[:MAX_ORIGINS]
    )
    return replace(known, first=first, origins=(*origins, *known.origins[MAX_ORIGINS:]))


def _open(side: KeptRun, rank: int, segment: int, step: int) -> KeptStep | str:
    try:
        path = tensor_path(side.stream_of(rank, segment, step), KEPT, step)
        return KeptStep(SavedStep(path, StepPlace(run_id=side.run_id, rank=rank, segment=segment, step=step)))
    except KeyError:
        return f"{side.name} has no such step"
    except ReferenceFormatError as error:
        return f"what {side.name} kept could not be read: {error}"


def _compare(reference: Sequence[KeptTensor], current: Sequence[KeptTensor]) -> Numbers:
    output = _compare_tensors(reference[0], current[0])
    first, second = ({one.label: one for one in kept[1:]} for kept in (reference, current))
    inputs: list[TensorNumbers] = []
    for label in dict.fromkeys((*first, *second)):
        ours, theirs = first.get(label), second.get(label)
        if ours is not None and theirs is not None:
            inputs.append(_compare_tensors(ours, theirs))
        else:
            side = "the current run" if ours is None else "the reference"
            inputs.append(TensorNumbers(tensor=label, problem=f"only {side} kept it"))
    listed = sorted(inputs, key=lambda one: not (one.num_differing or one.problem))[:MAX_INPUTS]
    return Numbers(output=(output,), inputs=tuple(listed), num_inputs=len(inputs))


def _compare_tensors(reference: KeptTensor, current: KeptTensor) -> TensorNumbers:
    label = TensorNumbers(tensor=reference.label, name=reference.name or current.name)
    ours, theirs = reference.saved, current.saved
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        shapes = [f"{one.dtype} {list(one.shape)}" for one in (ours, theirs)]
        problem = f"{shapes[0]} in the reference and {shapes[1]} now, so that no element has a partner"
        return replace(label, problem=problem)
    return tensor_numbers(replace(label, shape=ours.shape, dtype=ours.dtype), ours.bits, theirs.bits)
