"""A step that has just run, compared with one that is recorded."""

from collections.abc import Callable, Mapping

import numpy as np

from det_callbacks.compare.restored import find_unrestored
from det_callbacks.compare.verdict_builder import VerdictBuilder
from det_callbacks.runs.program import StepView
from det_callbacks.runs.steps import StepTrace
from det_callbacks.runs.store import Run


def add_traced_step(
    builder: VerdictBuilder, reference: StepView, trace: StepTrace, *, epoch: int, is_resumed: bool = False
) -> bool:
    """Compare a step that has just run with the reference's; return whether it differs.

    An equal step of the same program costs one comparison of two arrays.

    Args:
        builder: what it is counted in.
        reference: the same step in the reference.
        trace: of the step.
        epoch: counted from 0.
        is_resumed: it is the first one after a checkpoint was restored.
    """
    record = reference.record
    if (
        record.program_id == trace.program.id
        and record.layout_id == trace.layout_id
        and np.array_equal(record.digests, trace.digests)
    ):
        builder.add_equal_step(reference)
        return False
    current = trace.view(rank=reference.rank, step=record.step, epoch=epoch, segment=record.segment)
    # another program may be the same step: which arguments vary shows only after some steps
    return bool(builder.add_step(reference, current, is_resumed=is_resumed).num_differing)


def compare_restored(
    builder: VerdictBuilder,
    reference: Run,
    rank: int,
    segment: int,
    step: int,
    digest_state: Callable[[], Mapping[str, int]],
) -> None:
    """Tell a builder which restored state is not what the reference ended the step before with.

    Nothing is done at level "op", whose steps record what they read, nor where the reference lacks that step.
    """
    is_told = reference.selection.level == "op"
    if not is_told and step - 1 in reference.rank(rank).steps(segment):
        builder.set_unrestored(find_unrestored(reference.view(rank, segment, step - 1), digest_state()))
