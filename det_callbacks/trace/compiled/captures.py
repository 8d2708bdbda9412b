"""CUDA graphs in a step: a capture computes nothing, and a replay bypasses every mode."""

from typing import Any

import torch

from det_callbacks.runs.program import GRAPH
from det_callbacks.trace.places import Places
from det_callbacks.trace.step import Step


class GraphCaptures:
    def __init__(self, step: Step, places: Places) -> None:
        self._step, self._places = step, places
        self.begun: set[int] = set()  # ids of captured graphs; always the same set object

    def clear(self) -> None:
        self.begun.clear()

    def before_capture(self, graph: Any) -> None:
        self._step.deferred.flush()  # a capture cannot contain these launches
        self.begun.add(id(graph))

    def before_replay(self, _graph: Any) -> None:
        """Forget the writers of all memory, since a replay may write any.

        The next read of a tensor digests it again and adds a row of role "graph_output".
        """
        self._step.deferred.before_any_write()
        if not self._places.is_in_region():  # a compiled region has rows for its replay
            self._step.counts.skipped["replayed"] += 1
            self._step.run_unseen(GRAPH, *self._places.now())

    def is_capturing(self) -> bool:
        return bool(self.begun) and torch.cuda.is_current_stream_capturing()

    def is_captured(self) -> bool:
        """Return whether a CUDA graph is being captured; if so, count the op as skipped,
        since it computes nothing.
        """
        if not (self.begun and self.is_capturing()):
            return False
        self._step.counts.skipped["captured"] += 1
        return True
