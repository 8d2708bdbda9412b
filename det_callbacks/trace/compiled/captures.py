"""CUDA graphs in a step: a capture computes nothing, and a replay bypasses every mode."""

from typing import Any

import torch

from det_callbacks.runs.program import GRAPH
from det_callbacks.trace.places import Places
from det_callbacks.trace.step import Step


class GraphCaptures:
    """Follows the CUDA graphs that a step captures and replays."""

    def __init__(self, step: Step, places: Places) -> None:
        self._step, self._places = step, places
        # ids of captured graphs; listener.py and native.py hold this set, so it is never replaced
        self.captured: set[int] = set()

    def clear(self) -> None:
        self.captured.clear()

    def before_capture(self, graph: Any) -> None:
        self._step.deferred.flush()  # a capture cannot contain these launches
        self.captured.add(id(graph))

    def before_replay(self, _graph: Any) -> None:
        """Forget the writers of all memory, since a replay may write any.

        The next read of a tensor digests it again and adds a row of role "graph_output".
        """
        self._step.deferred.before_any_write()
        if not self._places.is_in_region():  # a compiled region has rows for its replay
            self._step.counts.skipped["replayed"] += 1
            self._step.add_unseen_writer(GRAPH, *self._places.now())

    def is_capturing(self) -> bool:
        return bool(self.captured) and torch.cuda.is_current_stream_capturing()

    def skips(self) -> bool:
        """Return whether a CUDA graph is being captured, and count the tensor as skipped if so:
        nothing has computed it.
        """
        if not self.captured or not self.is_capturing():
            return False
        self._step.counts.skipped["captured"] += 1
        return True
