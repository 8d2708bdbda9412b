"""Two recordings of one step: whether they differ, in how many sites, and how."""

from dataclasses import replace

import numpy as np

from det_callbacks.compare.align import Alignment, align
from det_callbacks.compare.differences import StepDifference
from det_callbacks.runs.program import Layout, Program, StepView

_MAX_ALIGNMENTS = 16


class StepCounter:
    """Counts what differs in steps; those of two programs are aligned once, where these first occur."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Alignment] = {}

    def count(self, reference: StepView, current: StepView) -> tuple[int, int]:
        """Return how many sites both steps have, and how many divergences there are."""
        ours, theirs = reference.record, current.record
        if (ours.program_id, ours.layout_id) == (theirs.program_id, theirs.layout_id):
            differs = ours.digests != theirs.digests
            # other arguments are looked into; all else that differs in one and the same program is content
            if not differs[current.program.arguments].any():
                return len(differs), int(np.count_nonzero(differs))
        key = ours.program_id, ours.layout_id, theirs.program_id, theirs.layout_id
        alignment = self._known.get(key) or align(reference, current)
        if len(self._known) < _MAX_ALIGNMENTS:
            self._known[key] = alignment
        found = StepDifference(reference, current, alignment)
        return found.num_compared, found.num_differing


def compare_steps(reference: StepView, current: StepView) -> StepDifference:
    """Return how a step differs from the reference's; different programs are aligned first."""
    return StepDifference(reference, current, align(reference, current))


def reached_part(reference: StepView, current: StepView) -> StepView:
    """Return the reference's step up to the last site that the step under way has too."""
    num_sites = len(current.program)
    if current.program.sites == reference.program.sites[:num_sites]:
        return _beginning(reference, num_sites)
    alignment = align(reference, current)
    reached = alignment.reference[(alignment.reference >= 0) & (alignment.current >= 0)]
    return _beginning(reference, int(reached.max()) + 1 if len(reached) else 0)


def _beginning(view: StepView, num_sites: int) -> StepView:
    program = Program(sites=view.program.sites[:num_sites])
    layout = Layout(entries=view.layout.entries[:num_sites])
    digests = np.array(view.record.digests[:num_sites], dtype=np.uint64)
    record = replace(view.record, program_id=program.id, layout_id=layout.id, digests=digests)
    return replace(view, record=record, program=program, layout=layout)
