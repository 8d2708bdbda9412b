"""Looking at a step that is still under way."""

from functools import partial

import numpy as np

from det_callbacks.runs.steps import StepTrace
from det_callbacks.trace.recorder import Recorder


def trace_so_far(recorder: Recorder) -> StepTrace:
    """Return what the step under way did up to here, as a copy; it counts no ops. Builds a program at each call.

    Waits for the devices that compute digests.
    """
    recorder.late.settle(recorder.digests)
    event = recorder.at
    known, event.program = event.program, None
    try:
        program = recorder.tree.program_at(event, ops_seen=0, ops_digested=0, skipped={}, opaque_regions=())
    finally:
        event.program = known
    indices = list(recorder.layout_indices)
    return StepTrace(
        program=program,
        digests=np.array(recorder.digests, dtype=np.uint64),
        layout_id=recorder.layouts.layout_id(indices),
        unseen_writes=frozenset(),
        _make_layout=partial(recorder.layouts.layout, indices),
    )
