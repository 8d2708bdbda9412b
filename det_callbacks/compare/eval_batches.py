"""Comparing batches that are not trained on: of validations, sanity checks, tests and predictions."""

from collections import Counter
from collections.abc import Collection, Iterator
from heapq import merge
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
        resumed: first steps after a resume, of either run: of what is ahead of them one run may have less, since
            Lightning leaves it out where it was over when the checkpoint was saved.
    """

    def __init__(
        self,
        reference: Iterator[Batch],
        *,
        rank: int,
        segment: int,
        is_alone: bool,
        is_common: bool,
        resumed: Collection[int] = (),
    ) -> None:
        self._resumed = frozenset(resumed)
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
        elif self._may_lack(batch):
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
            if not self._may_lack(missing) and (found := self._difference(missing, ())) is not None:
                builder.add_whole(found)

    def _may_lack(self, batch: Batch) -> bool:
        """Return whether it is no difference that one run alone has a batch."""
        return self._is_common or batch[0].step in self._resumed

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
    """Yield the batches of a segment in order; of what several attempts have, the latest one's.

    A fit is what all its attempts have: one that goes on need not come as far again. A test and the like is made anew.

    Raises:
        ReferenceFormatError: a file is damaged.
    """
    streams = run.rank(rank).streams(segment)[::-1]
    if stages_of_segments(run.manifest).get(segment, FIT) != FIT:
        streams = streams[:1]
    read = [_of_stream(run, stream) for stream in streams]
    last: tuple[Path, Key] | None = None
    for stream, key, batch in merge(*read, key=lambda item: item[1]):  # of equal ones, that of the first comes first
        if last is None or key != last[1] or stream == last[0]:
            last = stream, key
            yield batch


def _of_stream(run: Run, stream: Path) -> Iterator[tuple[Path, Key, Batch]]:
    for batch in batches_of(read_evidence(evidence_path(stream), run_id=run.run_id, keep=are_batches)):
        yield stream, key_of(batch), batch


def count_recorded(run: Run, rank: int) -> dict[str, int]:
    """Return how many batches a rank holds that are not trained on, by stage; it reads them.

    Raises:
        ReferenceFormatError: a file is damaged.
    """
    counts = Counter[str]()
    for segment in run.rank(rank).segments if recorded_stages(run.manifest) else ():
        counts.update(map(stage_of, read_batches(run, rank, segment)))
    return dict(counts)


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
            known = {whole.kind for whole in (told[segment].whole if segment in told else ())}
            target = builder.part() if "content" in known else builder
            batches = EvalBatches(
                ours,
                rank=rank,
                segment=segment,
                is_alone=stage != FIT,
                is_common=is_common,
                resumed=resumed_at(segment, reference, current),
            )
            for batch in theirs:
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


def resumed_at(segment: int, *runs: Run) -> set[int]:
    """Return the first steps after a resume in a segment of some runs."""
    return {step for run in runs for fit, step in run.resumed_steps if fit == segment}


def _samples(rows: Batch | tuple[()]) -> dict[str, int]:
    return {row.name: row.value for row in rows if row.name.startswith(SAMPLES)}
