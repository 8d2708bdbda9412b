"""Whether two recordings of one step differ, in how many sites, and how."""

import numpy as np

from det_callbacks.compare.align import Alignment, align
from det_callbacks.compare.differences import StepDifference
from det_callbacks.runs.program import StepView

_MAX_ALIGNMENTS = 16


class StepCounter:
    """Counts what differs in steps; two programs are aligned once.

    ``reordered`` collects the phases of ``Alignment.reordered``.
    """

    def __init__(self) -> None:
        self.reordered: set[str] = set()
        self._known: dict[tuple[int, ...], Alignment] = {}

    def count(self, reference: StepView, current: StepView) -> tuple[int, int]:
        """Return how many sites both steps have, and how many divergences."""
        reference_kind = reference.record.program_id, reference.record.layout_id
        current_kind = current.record.program_id, current.record.layout_id
        if reference_kind == current_kind:
            differs = reference.record.digests != current.record.digests
            # in equal programs, everything else is a difference of content
            if not differs[current.program.arguments].any():
                return len(differs), int(np.count_nonzero(differs))
        key = (*reference_kind, *current_kind)
        alignment = self._known.get(key) or align(reference, current)
        if len(self._known) < _MAX_ALIGNMENTS:
            self._known[key] = alignment
        self.reordered.update(alignment.reordered)
        found = StepDifference(reference, current, alignment)
        return found.num_compared, found.num_differing


def compare_steps(reference: StepView, current: StepView) -> StepDifference:
    return StepDifference(reference, current, align(reference, current))
