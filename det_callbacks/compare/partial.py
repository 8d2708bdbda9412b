"""Comparing a step that has not ended yet: what the reference has beyond it is not missing."""

from dataclasses import replace

import numpy as np

from det_callbacks.compare.align import align
from det_callbacks.runs.program import Layout, Program, StepView


def reached_part(reference: StepView, current: StepView) -> StepView:
    """Return the reference's step up to the last site that the step under way has too."""
    num_sites = len(current.program)
    if current.program.sites == reference.program.sites[:num_sites]:
        return _beginning(reference, num_sites)
    alignment = align(reference, current)
    reached = alignment.reference[(alignment.reference >= 0) & (alignment.current >= 0)]
    return _beginning(reference, int(reached.max()) + 1 if len(reached) else 0)


def empty_step(view: StepView) -> StepView:
    """Return a step with the same number and without sites, so that everything in the other one is extra."""
    return _beginning(view, 0)


def _beginning(view: StepView, num_sites: int) -> StepView:
    program = Program(sites=view.program.sites[:num_sites])
    layout = Layout(entries=view.layout.entries[:num_sites])
    record = replace(
        view.record,
        program_id=program.id,
        layout_id=layout.id,
        digests=np.array(view.record.digests[:num_sites], dtype=np.uint64),
    )
    return replace(view, record=record, program=program, layout=layout)
