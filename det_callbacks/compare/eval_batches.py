"""Comparing batches that are not trained on: of validations, sanity checks, tests and predictions."""

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from det_callbacks.compare.compared import read_compared
from det_callbacks.compare.verdict_builder import VerdictBuilder
from det_callbacks.compare.whole_steps import WholeSteps
from det_callbacks.digest import format_digest
from det_callbacks.trace.eval_batches import (
    FIT,
    SAMPLES,
    Batch,
    Key,
    are_batches,
    batches_of,
    key_of,
    recorded_stages,
    stage_of,
    stages_of_segments,
)
from det_callbacks.trace.evidence import evidence_path, read_evidence
from det_callbacks.trace.store import Run
from det_callbacks.verdict import Cause


class EvalBatches:
    """Compares the batches of a segment with the reference's as they come; one of each is held.

    Args:
        reference: its batches, in order.
        rank: of the process.
        segment: of the run.
        is_alone: it is no fit, but a test or the like.
        is_common: only batches that both runs have are compared; else those of one alone differ.
    """

    def __init__(self, reference: Iterator[Batch], *, rank: int, segment: int, is_alone: bool, is_common: bool) -> None:
        self._reference = reference
        self._next = next(reference, None)
        self._rank = rank
        self._segment = segment
        self._is_alone = is_alone
        self._is_common = is_common

    def add(self, batch: Batch, builder: VerdictBuilder) -> bool:
        """Compare the next batch, and those of the reference before it, into a builder; return whether it differs."""
        key = key_of(batch)
        self._pass(builder, below=key)
        left = self._next
        if left is not None and key_of(left) == key:
            self._next = next(self._reference, None)
            builder.tally.count_batch(self._rank, stage_of(batch))
        elif self._is_common:
            return False
        else:
            left = None
        found = self._difference(left, batch)
        if found is not None:
            builder.add_whole(found)
        return found is not None

    def end(self, builder: VerdictBuilder, step: int | None = None) -> None:
        """Count what the reference has besides as missing: up to what is ahead of a training step, or all of it."""
        self._pass(builder, below=None if step is None else (step + 1, 0, 0, 0))

    def leave_out(self, step: int) -> None:
        """Leave out what the reference has up to ahead of a training step."""
        while self._next is not None and self._next[0].step <= step:
            self._next = next(self._reference, None)

    def _pass(self, builder: VerdictBuilder, below: Key | None) -> None:
        while self._next is not None and (below is None or key_of(self._next) < below):
            missing, self._next = self._next, next(self._reference, None)
            if not self._is_common and (found := self._difference(missing, ())) is not None:
                builder.add_whole(found)

    def _difference(self, ours: Batch | None, theirs: Batch) -> WholeSteps | None:
        for left, right in zip_longest(ours or (), theirs):
            if left is not None and right is not None and left[1:4] == right[1:4]:
                continue
            known = right if right is not None else left
            is_reordered = _samples(ours or ()) == _samples(theirs) != {}
            cause: Cause = "data_order" if is_reordered else "data_content"
            return WholeSteps(
                rank=self._rank,
                segment=self._segment,
                kind="content",
                first=known.step,
                last=known.step,
                name=f"{known.point}: {known.name}",
                stage=stage_of((known,)),
                is_alone=self._is_alone,
                cause=cause,
                digests=(
                    None if left is None else format_digest(left.value),
                    None if right is None else format_digest(right.value),
                ),
            )
        return None


def read_batches(run: Run, rank: int, segment: int) -> Iterator[Batch]:
    """Yield the batches of a segment in order; where a later attempt goes on, those of the later one.

    Raises:
        ReferenceFormatError: a file is damaged.
    """
    known = run.rank(rank)
    if stages_of_segments(run.manifest).get(segment, FIT) != FIT:
        starts: dict[Path, int] = dict.fromkeys(known.streams(segment)[-1:], 0)
    else:
        # of what began after a step that another attempt ran again, that attempt's word counts
        starts = {}
        for step in known.steps(segment).tolist():
            starts.setdefault(known.stream_of(segment, step), step)
        starts = starts or dict.fromkeys(known.streams(segment)[:1], 0)
    streams = list(starts)
    for number, stream in enumerate(streams):
        end = starts[streams[number + 1]] if number + 1 < len(streams) else None
        for batch in batches_of(read_evidence(evidence_path(stream), run_id=run.run_id, keep=are_batches)):
            if end is None or batch[0].step < end:
                yield batch


def compare_eval_batches(builder: VerdictBuilder, reference: Run, current: Run, *, is_common: bool) -> None:
    """Compare the batches of two recorded runs into a builder, in their order; one batch of each is in memory.

    Of the folder of a verification, which keeps the batches that differ, only those are compared, and what it found to
    be there in one run only is taken from what it says.

    Args:
        builder: what they are counted in.
        reference: the run that is compared with.
        current: the run that is compared.
        is_common: only batches that both have are compared.
    """
    stages = [recorded_stages(run.manifest) for run in (reference, current)]
    both = [stage for stage in stages[0] if stage in stages[1]]
    if one := sorted({*stages[0], *stages[1]} - {*both}):
        left_out = " and ".join(f"{stage}s" for stage in one)
        builder.note(f"Batches of {left_out} were not compared: only one of the runs has them")
    segments = {**stages_of_segments(current.manifest), **stages_of_segments(reference.manifest)}
    for rank in reference.ranks:
        told = {} if current.keeps == "all" else read_compared(current.path, rank)
        for segment, stage in segments.items() if both else ():
            ours, theirs = (_of_stages(run, rank, segment, both) for run in (reference, current))
            resumed = {step for fit, step in (*reference.resumed_steps, *current.resumed_steps) if fit == segment}
            known = {whole.kind for whole in (told[segment].whole if segment in told else ())}
            target = builder.part() if "content" in known else builder
            batches = EvalBatches(
                _without(ours, resumed), rank=rank, segment=segment, is_alone=stage != FIT, is_common=is_common
            )
            for batch in _without(theirs, resumed):
                batches.add(batch, target)
            batches.end(target)
            if target is not builder:
                target.tally.num_differing = 0  # what the verification found counts
                builder.tally.add(target.tally)
        for done in told.values():
            for whole in done.whole:
                builder.add_whole(whole)


def _of_stages(run: Run, rank: int, segment: int, stages: list[str]) -> Iterator[Batch]:
    if segment in run.rank(rank).segments:
        yield from (batch for batch in read_batches(run, rank, segment) if stage_of(batch) in stages)


def _without(batches: Iterator[Batch], steps: set[int]) -> Iterator[Batch]:
    """Leave out what is ahead of the first step after a resume: a run that was resumed need not have it."""
    return (batch for batch in batches if batch[0].step not in steps)


def _samples(rows: Batch | tuple[()]) -> dict[str, int]:
    return {row.name: row.value for row in rows if row.name.startswith(SAMPLES)}
