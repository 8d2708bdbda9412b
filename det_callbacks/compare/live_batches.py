"""Comparing batches that are not trained on while a verification runs."""

from collections.abc import Mapping

from det_callbacks.compare.eval_batches import EvalBatches, read_batches, resumed_at
from det_callbacks.compare.verdict_builder import VerdictBuilder
from det_callbacks.trace.eval_batches import FIT, Batch, recorded_stages, stages_of_segments
from det_callbacks.trace.store import Run
from det_callbacks.trace.writer import RunWriter

KEPT_BATCHES = 100
"""Batches that differ and are kept, as ``diff`` needs them."""


class LiveBatches:
    """Compares the batches of one rank's segments with the reference's, and keeps those that differ.

    Args:
        reference: opened.
        builder: what differs is added to it.
        writer: of the verification.
        rank: of this process.
        is_common: only batches that both runs have are compared.
    """

    def __init__(
        self, reference: Run, builder: VerdictBuilder, writer: RunWriter, *, rank: int, is_common: bool
    ) -> None:
        self._reference = reference
        self._builder = builder
        self._writer = writer
        self._rank = rank
        self._is_common = is_common
        self._is_recorded = bool(recorded_stages(reference.manifest))
        self._batches: EvalBatches | None = None
        self._num_kept = 0
        self._differs = self._is_resuming = False

    @property
    def stages(self) -> Mapping[int, str]:
        """What the segments of the reference are."""
        return stages_of_segments(self._reference.manifest)

    def begin(self, segment: int, stage: str, *, is_resumed: bool) -> None:
        """Start a segment; of what is ahead of the first step after a resume nothing is said."""
        self._is_resuming = is_resumed
        self._batches = self._of(segment, is_alone=stage != FIT) if self._is_recorded else None
        self._differs = False

    def add(self, batch: Batch) -> None:
        """Compare a batch."""
        if self._batches is None or self._is_resuming:
            return
        if self._batches.add(batch, self._builder):
            self._differs = True
            if self._num_kept < KEPT_BATCHES:
                self._num_kept += 1
                self._writer.put_evidence(batch)

    def end_step(self, step: int) -> None:
        """Count what the reference has up to ahead of a step, and this run had not."""
        if self._batches is not None and self._is_resuming:
            self._batches.leave_out(step)
        elif self._batches is not None:
            self._batches.end(self._builder, step)
        self._is_resuming = False

    def end_stage(self, step: int | None) -> bool:
        """Note that a validation, a test or the like is over; return whether it differs.

        Args:
            step: the training step that follows; None where none does.
        """
        if self._batches is not None and not self._is_resuming:
            before = self._builder.tally.num_differing
            self._batches.end(self._builder, step)
            self._differs |= self._builder.tally.num_differing != before
        self._writer.flush_evidence()
        differs, self._differs = self._differs, False
        return differs

    def end_segment(self) -> None:
        """Count all that the reference has of the segment, and this run had not."""
        if self._batches is not None:
            self._batches.end(self._builder)

    def add_missing(self, builder: VerdictBuilder, segment: int) -> None:
        """Count all batches of a segment of the reference as missing."""
        if self._is_recorded:
            self._of(segment, is_alone=self.stages[segment] != FIT).end(builder)

    def _of(self, segment: int, *, is_alone: bool) -> EvalBatches:
        is_there = segment in self._reference.rank(self._rank).segments
        return EvalBatches(
            read_batches(self._reference, self._rank, segment) if is_there else iter(()),
            rank=self._rank,
            segment=segment,
            is_alone=is_alone,
            is_common=self._is_common,
            resumed=resumed_at(segment, self._reference),
        )
