"""CUDA graphs in a step: what is captured computes nothing yet, and a replay runs past every mode."""

from typing import Any

import torch

from det_callbacks.runs.program import GRAPH
from det_callbacks.trace.attribution.places import Places
from det_callbacks.trace.step import Step


class GraphCaptures:
    """Knows which CUDA graphs were begun in one step after the other."""

    def __init__(self, step: Step, places: Places) -> None:
        self._step, self._places = step, places
        self.begun: set[int] = set()  # in this step, by ``id``; the same set for good

    def clear(self) -> None:
        """Start or end a step."""
        self.begun.clear()

    def before_capture(self, graph: Any) -> None:
        """Note that a CUDA graph is about to be captured."""
        self._step.deferred.flush()  # within the capture the device could not read what waits
        self.begun.add(id(graph))

    def before_replay(self, _graph: Any) -> None:
        """Note that a CUDA graph is about to run, past every mode: what the step knew of memory counts no more.

        What is read next is digested anew, as a row of role "graph_output".
        """
        self._step.deferred.before_any_write()
        if not self._places.is_in_region():  # a compiled region that replays one has rows for what it gives
            self._step.counts.skipped["replayed"] += 1
            self._step.run_unseen(GRAPH, *self._places.now())

    def is_capturing(self) -> bool:
        """Return whether what runs here becomes part of a CUDA graph: nothing is computed, or may be done beside it."""
        return bool(self.begun) and torch.cuda.is_current_stream_capturing()

    def is_captured(self) -> bool:
        """Return whether what is about to be recorded does not exist: a CUDA graph is being captured. Counts it."""
        if not self.is_capturing():
            return False
        self._step.counts.skipped["captured"] += 1
        return True
