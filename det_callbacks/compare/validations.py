"""The batches of validations, compared where both runs recorded them (``validation_batches=True``)."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

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
    """Yield the validation batches of a fit, attempt by attempt: of a step in several attempts, those of the last.

    Raises:
        ReferenceFormatError: a file is damaged.
    """
    streams: dict[object, list[int]] = defaultdict(list)
    for step in run.rank(rank).steps(segment).tolist():
        streams[run.rank(rank).stream_of(segment, step)].append(step)
    for stream, steps in streams.items():
        last_of_run = run.rank(rank).steps(segment).tolist()[-1]
        kept = {*steps, *((last_of_run + 1,) if steps[-1] == last_of_run else ())}
        for row in read_evidence(evidence_path(stream), run_id=run.run_id, keep=_are_validations):  # type: ignore[arg-type]  # paths
            if row.step in kept:
                yield row


def compare_validations(builder: VerdictBuilder, reference: Run, current: Run, rank: int) -> None:
    """Compare the validation batches of two recorded runs, step by step, into a builder."""
    for segment in current.rank(rank).segments:
        validations = Validations(read_validations(reference, rank, segment), rank=rank, segment=segment)
        found = dict(_by_step(read_validations(current, rank, segment)))
        steps = current.rank(rank).steps(segment).tolist()
        resumed = {step for fit, step in (*reference.resumed_steps, *current.resumed_steps) if fit == segment}
        for step in (*steps, steps[-1] + 1):
            differing = validations.compare(step, found.get(step, ()))
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
