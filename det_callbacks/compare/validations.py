"""The batches of validations, compared where both runs recorded them (``validation_batches=True``)."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from det_callbacks.compare.verdict_builder import VerdictBuilder
from det_callbacks.compare.whole_steps import WholeSteps
from det_callbacks.digest import format_digest
from det_callbacks.trace.evidence import SAMPLES, VALIDATION, Row, evidence_path, read_evidence
from det_callbacks.trace.store import Run
from det_callbacks.verdict import Cause

Place = tuple[int, str, str]
"""Training step that follows, point and name."""


class Validations:
    """Compares the validation batches of a rank's fit with the reference's, as they come; one step's are held.

    Args:
        reference: rows of the reference, in order.
        rank: of the process.
        segment: fit.
    """

    def __init__(self, reference: Iterator[Row], *, rank: int, segment: int) -> None:
        self._reference = reference
        self._next: Row | None = next(reference, None)
        self._rank = rank
        self._segment = segment

    def compare(self, step: int, rows: Sequence[Row]) -> WholeSteps | None:
        """Return how the validations ahead of a step differ, None where they do not; steps come in order."""
        ours: list[Row] = []
        while self._next is not None and self._next.step <= step:
            if self._next.step == step:
                ours.append(self._next)
            self._next = next(self._reference, None)
        for left, right in zip_longest(ours, rows):
            if left is None or right is None or left[1:4] != right[1:4]:
                return self._difference(step, left, right, ours, rows)
        return None

    def _difference(
        self, step: int, left: Row | None, right: Row | None, ours: Sequence[Row], theirs: Sequence[Row]
    ) -> WholeSteps:
        known = right if right is not None else left
        assert known is not None, "one of them is there"
        is_reordered = _samples(ours) == _samples(theirs) != {}
        cause: Cause = "data_order" if is_reordered else "data_content"
        return WholeSteps(
            rank=self._rank,
            segment=self._segment,
            kind="content",
            first=step,
            last=step,
            name=f"{known.point}: {known.name}",
            cause=cause,
            digests=(
                None if left is None else format_digest(left.value),
                None if right is None else format_digest(right.value),
            ),
        )


def read_validations(run: Run, rank: int, segment: int) -> Iterator[Row]:
    """Yield the validation batches of a fit in order; where a later attempt goes on, those of the later one.

    Raises:
        ReferenceFormatError: a file is damaged.
    """
    starts: dict[Path, int] = {}
    for step in run.rank(rank).steps(segment).tolist():
        starts.setdefault(run.rank(rank).stream_of(segment, step), step)
    streams = list(starts)
    for number, stream in enumerate(streams):
        end = starts[streams[number + 1]] if number + 1 < len(streams) else None
        for row in read_evidence(evidence_path(stream), run_id=run.run_id, keep=_are_validations):
            if end is None or row.step < end:
                yield row


def compare_validations(builder: VerdictBuilder, reference: Run, current: Run, rank: int) -> None:
    """Compare the validation batches of two recorded runs, step by step, into a builder."""
    segments = [segment for segment in reference.rank(rank).segments if segment in current.rank(rank).segments]
    for segment in segments:
        resumed = {step for fit, step in (*reference.resumed_steps, *current.resumed_steps) if fit == segment}
        rows = [list(_by_step(read_validations(run, rank, segment))) for run in (reference, current)]
        ours, theirs = (dict(known) for known in rows)
        for step in sorted({*ours, *theirs}):
            validations = Validations(iter(ours.get(step, ())), rank=rank, segment=segment)
            differing = validations.compare(step, theirs.get(step, ()))
            # a run that was resumed leaves out the validation that was over when the checkpoint was saved
            if differing is not None and step not in resumed:
                builder.add_whole(differing)


def _are_validations(batch: pa.RecordBatch) -> pa.Array:
    return pc.starts_with(batch.column("point"), VALIDATION)


def _by_step(rows: Iterable[Row]) -> Iterator[tuple[int, list[Row]]]:
    held: list[Row] = []
    for row in rows:
        if held and row.step != held[0].step:
            yield held[0].step, held
            held = []
        held.append(row)
    if held:
        yield held[0].step, held


def _samples(rows: Sequence[Row]) -> dict[tuple[str, str], int]:
    return {(row.point, row.name): row.value for row in rows if row.name.startswith(SAMPLES)}
